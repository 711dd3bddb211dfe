"""The model of a job on fake tensors, as from_pretrained and peft would leave it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hf_memopt.errors import InputError, as_input_error, choose
from hf_memopt.estimator.patches.replacement import replaced
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.apply import apply_levers
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.remote_code import is_trusted
from hf_memopt.video.model_parts import train_parts

TASKS = ("causal-lm", "image-text-to-text", "seq2seq-lm", "masked-lm", "sequence-classification")
_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "image-text-to-text": "AutoModelForImageTextToText",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}
_ENDINGS = {"ForSequenceClassification": "sequence-classification", "ForMaskedLM": "masked-lm"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model of a job: what from_pretrained, peft and the memory features make of a configuration.

    Attributes:
        config: a PretrainedConfig.
        task: one of TASKS.
        dtype: of the loaded weights.
        attn_implementation: None for the model's own choice, sdpa where it has it.
        quantization_config: a BitsAndBytesConfig with load_in_4bit, or None.
        peft_config: a LoraConfig, or None for full fine-tuning.
        kbit_preparation: peft's prepare_model_for_kbit_training is called, which this project's recipes avoid.
        memory_args: the MemoryArguments of a MemoryTrainer; None for a plain Trainer.
        frozen: parts of a video model that are not trained (video.model_parts.PARTS).
    """

    config: Any
    task: str
    dtype: str = "float32"
    attn_implementation: str | None = None
    quantization_config: Any = None
    peft_config: Any = None
    kbit_preparation: bool = False
    memory_args: MemoryArguments | None = None
    frozen: tuple[str, ...] = ()


def infer_task(config) -> str:
    """What a configuration's model is trained for: the checkpoint's own task, else the usual one of its model type.

    Raises:
        InputError: the model type has no language-model head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

    for name in config.architectures or ():
        for ending, task in _ENDINGS.items():
            if name.endswith(ending):
                return task
    if config.is_encoder_decoder:
        return "seq2seq-lm"
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return "image-text-to-text"
    causal = type(config) in AutoModelForCausalLM._model_mapping
    if type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False):
        return "masked-lm"
    if not causal:
        raise InputError(f"model type {config.model_type!r} has no language-model head that a Trainer could train")
    return "causal-lm"


def make_model(settings: ModelSettings, distribute: Callable | None = None):
    """The model on fake or meta tensors, whichever are in force.

    Args:
        distribute: shards the model where from_pretrained would with a DistributedConfig.

    Raises:
        InputError: an unknown task, or a configuration that the model's class refuses.
    """
    model = _from_config(settings, distribute)
    if settings.quantization_config is not None:
        quantization = copy.deepcopy(settings.quantization_config)
        quantization.bnb_4bit_compute_dtype = traceable_dtype(quantization.bnb_4bit_compute_dtype)
        quantize(model, quantization)
    if settings.kbit_preparation:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if settings.frozen:
        model = train_parts(model, copy.deepcopy(settings.peft_config), settings.frozen)
    elif settings.peft_config is not None:
        model = add_adapters(model, copy.deepcopy(settings.peft_config))
    if settings.memory_args is not None:
        apply_levers(model, settings.memory_args)
    return model


def _from_config(settings: ModelSettings, distribute: Callable | None):
    import torch
    import transformers
    from transformers.initialization import no_tie_weights

    if settings.task not in TASKS:
        raise choose("task", settings.task, TASKS)
    auto = getattr(transformers, _AUTO_CLASSES[settings.task])
    with no_tie_weights() if distribute else nullcontext(), _refused_configuration(settings.config):
        model = auto.from_config(
            settings.config,
            dtype=traceable_dtype(getattr(torch, settings.dtype)),
            trust_remote_code=is_trusted(settings.config),
            attn_implementation=settings.attn_implementation,
        )
    if distribute is not None:
        model = distribute(model)
        model.tie_weights(recompute_mapping=False)
    return model


@contextmanager
def _refused_configuration(config) -> Iterator[None]:
    """A model's constructor computes with the sizes in its configuration and looks attention up by name, so it may
    raise anything; the configuration is to blame."""
    with as_input_error(f"model type {config.model_type!r} cannot be built", Exception):
        yield


@contextmanager
def outside_zero3() -> Iterator[None]:
    """Models built in here are not partitioned, also in a process that trains under ZeRO-3."""
    # transformers asks this module-level weak reference whether to partition every new model.
    with replaced("transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref", None):
        yield


def traceable_dtype(dtype):
    """bfloat16 for float16, which the CPU's autocast does not support; both take two bytes."""
    import torch

    return torch.bfloat16 if dtype is torch.float16 else dtype


def quantize(model, quantization) -> None:
    """Quantize a model's linear layers as from_pretrained does with a BitsAndBytesConfig: transformers' own quantizer
    decides which, so that the head and skipped modules stay as they are."""
    import bitsandbytes
    from bitsandbytes import functional
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    before = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    # Outside the fake mode: the code table needs values, and transformers creates the 4-bit layers on meta tensors.
    with unset_fake_temporarily():
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
        quantizer._process_model_before_weight_loading(model, device_map={"": "cpu"})
    for name, module in model.named_modules():
        if not isinstance(module, bitsandbytes.nn.Linear4bit):
            continue
        old = before.pop(name)
        # transformers' Conv1D keeps its weight transposed.
        data = old.weight.data if type(old).__name__ != "Conv1D" else old.weight.data.T.contiguous()
        module.weight = _quantized_weight(data, module.weight)
        module.quant_state = module.weight.quant_state  # bitsandbytes restores the weight's from here after sharding
        if old.bias is not None:
            module.bias = old.bias.requires_grad_(False)
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantization


def _quantized_weight(data, template):
    """A fake 4-bit weight with its quantization state: a plain Parameter, since Params4bit cannot hold a fake tensor.

    Args:
        data: the unquantized weight.
        template: the Params4bit that transformers put in its place.
    """
    import torch
    from bitsandbytes import functional

    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    settings = {name: getattr(template, name) for name in names}
    packed, state = functional.quantize_4bit(data.contiguous(), **settings)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    vars(weight).update(settings, quant_state=state, bnb_quantized=True)
    return weight


def batch_shapes(
    task: str, config, micro_batch: int, seq_len: int, padded: bool, packed: bool = False
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The tensors of one micro-batch: name -> (shape, dtype). Token ids are int64, as collators make them."""
    import torch

    tokens = ((micro_batch, seq_len), torch.int64)
    labels = ((micro_batch,), torch.int64) if task == "sequence-classification" else tokens
    optional = {name: tokens for name, present in (("attention_mask", padded), ("position_ids", packed)) if present}
    return {"input_ids": tokens, "labels": labels, **optional}


def count_weights(config, task: str, dtype: str = "float32", peft_config=None) -> int:
    """A model's number of weights, without allocating them; with adapters the number of trained ones."""
    return sum(weight_sizes(config, task, dtype, peft_config))


def weight_sizes(config, task: str, dtype: str = "float32", peft_config=None) -> list[int]:
    """The number of elements of each weight, in the model's order; with adapters of the trained ones."""
    import torch

    with torch.device("meta"), outside_zero3():
        model = make_model(ModelSettings(config=config, task=task, dtype=dtype, peft_config=peft_config))
    return [weight.numel() for weight in model.parameters() if weight.requires_grad]
