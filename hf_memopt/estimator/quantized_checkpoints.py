"""The quantization that a job trains on: the checkpoint's own or the one asked for, if transformers trains it."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hf_memopt.engines import Engine
from hf_memopt.errors import InputError, MethodRefused, as_input_error
from hf_memopt.estimator.tracing.fake_quantization import is_quantized, quantization_method
from hf_memopt.estimator.tracing.process_state import quiet
from hf_memopt.estimator.tracing.quantized_linear import SCHEMES
from hf_memopt.hardware import Hardware

_AS_CONFIG = "quantization_config"
_DEQUANTIZE = {"dequantize": True}  # of whichever method the checkpoint is
# Methods whose `is_trainable` is True, or asks for a package, but that cannot be trained, and why.
_REFUSED = {
    "hqq": "transformers 5 does not load HQQ weights (get_quantize_ops: not available yet)",
    "sinq": "peft has no adapter for its SINQLinear modules",
    "fp_quant": "its training kernels (qutlass, Triton) are not modelled",
    **dict.fromkeys(("fouroversix", "eetq", "aqlm", "quanto"), "its training kernels are not modelled"),
}
# What a checkpoint or its configuration would have to say.
_REMEDIES = {
    "mxfp4": ": use method=lora or full, which load it with Mxfp4Config(dequantize=True), or for qlora a copy in bf16",
    "torchao": ": take an 8-bit quant_type (Int8WeightOnlyConfig, Float8WeightOnlyConfig, …)",
    "bitnet": ": it takes linear_class=autobitlinear and quantization_mode=online",
}
# Compute capability below which from_pretrained dequantizes instead (validate_environment of the two quantizers).
_LEAST_CAPABILITY = {"fp8": 8.9, "mxfp8": 8.9, "mxfp4": 7.5}


class _Fields(SimpleNamespace):
    """A configuration whose class needs its package."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def resolve_quantization(config, quantization, device: Hardware | None = None) -> tuple[Any, Any, str]:
    """A job's configuration and quantization, as get_hf_quantizer of transformers combines the checkpoint's with the
    one that is passed to from_pretrained.

    Args:
        device: what the job trains on; None for one that runs the method's kernels.

    Returns:
        The configuration, without its `quantization_config` where the weights are dequantized while they are loaded;
        the quantization, None for unquantized weights; and the method that is dequantized, or "".

    Raises:
        InputError: the two do not go together, or transformers cannot train on them.
    """
    if quantization is None and not is_quantized(config):
        return config, None, ""
    with as_input_error(_AS_CONFIG, Exception):  # configuration classes raise anything for values that they refuse
        quantization = _merged(config, quantization)
    method = quantization_method(quantization)
    if getattr(quantization, "dequantize", False) or _dequantizes(method, device):
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)
        return config, None, method
    if reason := _REFUSED.get(method):
        raise MethodRefused(f"{_AS_CONFIG}: models quantized with {method} are refused: {reason}")
    if not _is_trainable(quantization, method):
        remedy = _REMEDIES.get(method, "")
        raise MethodRefused(
            f"{_AS_CONFIG}: transformers does not train models quantized with {method} (its quantizer's "
            f"is_trainable is False){remedy}"
        )
    return config, quantization, ""


def dequantized(config) -> dict[str, Any]:
    """The quantization with which a checkpoint trains whose own transformers does not train and can undo while it
    loads; empty of others."""
    return dict(_DEQUANTIZE) if quantization_method(getattr(config, _AS_CONFIG, None)) == "mxfp4" else {}


def loading_quantization(config):
    """What from_pretrained takes for dequantized(); None of checkpoints that it loads as they are."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    return AutoQuantizationConfig.from_dict(_dequantized(config.quantization_config)) if dequantized(config) else None


def check_quantized_training(quantization, peft_config, engine: Engine) -> None:
    """Refuse what transformers' Trainer and peft refuse, and sharded weights that are not modelled.

    Raises:
        InputError: full fine-tuning, an adapter that these layers cannot have, or an engine that cannot hold them.
    """
    if quantization is None:
        return
    method = quantization_method(quantization)
    if peft_config is None and method != "bitnet":  # the one that transformers trains in full (is_qat_trainable)
        raise MethodRefused(
            f"{_AS_CONFIG}: quantized models are not fine-tuned as they are (transformers' Trainer: attach trainable "
            f"adapters): set peft_config, --method lora, or load {method} weights dequantized"
        )
    if reason := engine_refusal(quantization, engine):
        raise MethodRefused(f"{_AS_CONFIG}: {reason}")
    if method in SCHEMES:
        _check_adapter_of_stand_ins(peft_config, method)


def holds_fp8(config, quantization, device: Hardware) -> bool:
    """True if a device keeps a checkpoint's FP8 weights as they are, whole: neither dequantized nor sharded."""
    if quantization_method(getattr(config, _AS_CONFIG, None)) not in ("fp8", "mxfp8"):
        return False
    return resolve_quantization(config, quantization, device)[1] is not None


def engine_refusal(quantization, engine: Engine) -> str | None:
    """The reason that an engine cannot hold quantized weights; None where it can."""
    method = quantization_method(quantization)
    if engine.shards_weights and method not in ("", "bitsandbytes_4bit"):
        return f"weights quantized with {method} are not sharded: strategy ddp or zero2"
    if engine.flat_buffers and method == "torchao":
        return "torchao's weights lack operators that DeepSpeed calls: strategy ddp"
    return None


def _check_adapter_of_stand_ins(peft_config, method: str) -> None:
    kind = peft_config.peft_type.value
    if peft_config.is_prompt_learning or kind in ("LN_TUNING", "TRAINABLE_TOKENS"):  # they adapt other layers
        return
    if kind != "LORA" or peft_config.use_dora:
        name = "use_dora=True" if kind == "LORA" else f"peft_type={kind}"
        raise MethodRefused(f"{name} is not modelled on layers quantized with {method}: plain LoRA is")


def quantization_notes(job) -> Iterator[str]:
    """The parts of a quantized model's memory that are counted from its source and have not been measured."""
    method, accelerator = quantization_method(job.quantization_config), job.device.backend != "cpu"
    if job.dequantized:
        yield f"{job.dequantized} weights are dequantized while they are loaded, {_dequantizing(job)}"
    if method in SCHEMES:
        yield f"{method} layers are counted as in {SCHEMES[method].source}; not measured"
        if getattr(job.peft_config, "target_modules", None) == "all-linear":
            yield f"target_modules=all-linear counts {method} layers, none of which peft finds: name them to train"
    elif method == "bitsandbytes_4bit" and job.engine.zero_stage == 3:
        # transformers 5.23, modeling_utils: needs_zero3_init and not quantized; bitsandbytes 0.50.2, MatMul4Bit.
        yield (
            "every process loads the 4-bit weights whole, and bitsandbytes keeps each gathered layer until its "
            "backward pass: ZeRO-3 needs as much as ZeRO-2"
        )
    elif method == "bitsandbytes_8bit" and accelerator:
        yield "8-bit matmuls are counted as in bitsandbytes' CUDA kernels, without columns of outliers; not measured"
    elif method in ("fp8", "mxfp8"):
        yield "FP8 matmuls are counted as transformers' Triton kernels, from their source; not measured"
    elif method == "compressed-tensors":
        yield "compressed-tensors decompresses all weights at the first forward: they take what unquantized ones do"


def _dequantizing(job) -> str:
    """The part of a sentence that says where a checkpoint is dequantized, and what of it is counted."""
    if job.engine.zero_stage == 3:
        return "whole on every process's device before ZeRO-3 shards them; a copy in 16 bits is sharded as it is read"
    if job.engine.shards_weights:
        return "whole in every process's host memory; of a copy in 16 bits the first process alone reads the weights"
    if job.dequantized == "mxfp4":
        return "counted as in transformers' integrations/mxfp4.py, which goes on in host memory where it does not fit"
    return "which is not counted"


def _merged(config, quantization):
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    own = getattr(config, "quantization_config", None)
    if quantization == _DEQUANTIZE:
        quantization, own = None, _dequantized(own)
    if own is None:
        return AutoQuantizationConfig.from_dict(quantization) if isinstance(quantization, dict) else quantization
    if quantization is not None and quantization_method(quantization) != quantization_method(own):
        raise MethodRefused(
            f"{_AS_CONFIG}: the checkpoint is quantized with {quantization_method(own)}, which transformers does not "
            f"load as {quantization_method(quantization)}: name a checkpoint that is not quantized"
        )
    if isinstance(own, dict) and own.get("quant_method") in (*_REFUSED, "compressed-tensors"):
        return _Fields(**own)  # transformers builds these only where their package is installed
    with quiet():
        return AutoHfQuantizer.merge_quantization_configs(copy.deepcopy(own), quantization)


def _dequantized(own) -> dict[str, Any]:
    """A checkpoint's own configuration with dequantize=True.

    Raises:
        InputError: it has none, or one that transformers cannot dequantize while it loads.
    """
    method = quantization_method(own)
    if method not in ("fp8", "mxfp8", "mxfp4", "compressed-tensors"):
        what = f"{method} weights are not" if method else "the checkpoint is not quantized, so that nothing is"
        raise InputError(f"quantization.dequantize: {what} dequantized while they are loaded")
    return {**(own if isinstance(own, dict) else own.to_dict()), **_DEQUANTIZE}


def _dequantizes(method: str, device: Hardware | None) -> bool:
    """True if from_pretrained dequantizes a checkpoint on a device that has no kernels for it."""
    if device is None or method not in _LEAST_CAPABILITY:
        return False
    if device.backend != "cuda":
        return device.backend != "rocm"
    return float(device.architecture or "inf") < _LEAST_CAPABILITY[method]


def _is_trainable(quantization, method: str) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if method not in AUTO_QUANTIZER_MAPPING:
        raise InputError(f"{_AS_CONFIG}: unknown quant_method {method}; known: {', '.join(AUTO_QUANTIZER_MAPPING)}")
    # Asked of a stand-in: the quantizers of GPTQ and compressed-tensors import their packages to be built.
    quantizer = SimpleNamespace(
        quantization_config=quantization, use_fp8_kernel=getattr(quantization, "use_optimized_inference", False)
    )
    try:
        with quiet():
            return bool(AUTO_QUANTIZER_MAPPING[method].is_trainable.fget(quantizer))
    except ImportError:  # AWQ and AQLM ask for the version of a package that is not installed here
        return True
