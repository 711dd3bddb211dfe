"""The model of a job, as from_pretrained and peft would leave it, made where tensors have no bytes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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


def task_of(config) -> str:
    """What a configuration's model is trained for: what its checkpoint says, else what its type is made for."""
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


def make_model(
    config,
    task: str,
    dtype: str,
    attn_implementation: str | None,
    quantization,
    peft_config,
    kbit_preparation: bool = False,
    memory_args: MemoryArguments | None = None,
    frozen: tuple[str, ...] = (),
    spread: Callable | None = None,
):
    """Called in the fake world.

    Args:
        task: one of TASKS.
        quantization: a BitsAndBytesConfig with load_in_4bit, or None.
        peft_config: a LoraConfig, or None for full fine-tuning.
        kbit_preparation: peft's prepare_model_for_kbit_training is called, which this project's recipes avoid.
        memory_args: MemoryArguments, whose levers are put on the model.
        frozen: parts of a video model that are not trained (levers.video_parts.PARTS).
        spread: cuts the model up where from_pretrained would.

    Raises:
        InputError: an unknown task.
    """
    import torch
    import transformers
    from transformers.initialization import no_tie_weights

    if task not in TASKS:
        raise choose("task", task, TASKS)
    auto = getattr(transformers, _AUTO_CLASSES[task])
    with no_tie_weights() if spread else nullcontext(), _refused_configuration(config):
        model = auto.from_config(
            config,
            dtype=traceable(getattr(torch, dtype)),
            trust_remote_code=is_trusted(config),
            attn_implementation=attn_implementation,
        )
    if spread is not None:
        model = spread(model)
        model.tie_weights(recompute_mapping=False)
    if quantization is not None:
        quantization = copy.deepcopy(quantization)
        quantization.bnb_4bit_compute_dtype = traceable(quantization.bnb_4bit_compute_dtype)
        quantize(model, quantization)
    if kbit_preparation:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if frozen:
        model = train_parts(model, copy.deepcopy(peft_config), frozen)
    elif peft_config is not None:
        model = add_adapters(model, copy.deepcopy(peft_config))
    if memory_args is not None:
        apply_levers(model, memory_args)
    return model


@contextmanager
def _refused_configuration(config) -> Iterator[None]:
    """A model's constructor divides, indexes and multiplies by what its configuration says, and looks attention up by
    name; whatever that raises is the input's fault."""
    with as_input_error(f"model type {config.model_type!r} cannot be made", Exception):
        yield


@contextmanager
def outside_zero3() -> Iterator[None]:
    """Models made in here stay whole and ask no other process, also in a job that runs under ZeRO-3."""
    with replaced("transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref", None):
        yield


def traceable(dtype):
    """The CPU's autocast does not know fp16; bf16 takes as many bytes."""
    import torch

    return torch.bfloat16 if dtype is torch.float16 else dtype


def quantize(model, quantization) -> None:
    """Pack a model's linear layers as from_pretrained does with a BitsAndBytesConfig, head and output projections
    left as they are, and the same modules skipped."""
    import bitsandbytes
    from bitsandbytes import functional
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    before = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    with unset_fake_temporarily():  # bitsandbytes keeps its code table for good, and its layers begin on meta tensors
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
        quantizer._process_model_before_weight_loading(model, device_map={"": "cpu"})
    for name, module in model.named_modules():
        if not isinstance(module, bitsandbytes.nn.Linear4bit):
            continue
        old = before.pop(name)
        # transformers' Conv1D keeps its weight transposed.
        data = old.weight.data if type(old).__name__ != "Conv1D" else old.weight.data.T.contiguous()
        module.weight = _packed(data, module.weight)
        module.quant_state = module.weight.quant_state  # from where it is taken up again after sharding
        if old.bias is not None:
            module.bias = old.bias.requires_grad_(False)
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantization


def _packed(data, template):
    """A fake 4-bit weight with its quantization state. Params4bit itself cannot hold a fake tensor."""
    import torch
    from bitsandbytes import functional

    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    settings = {name: getattr(template, name) for name in names}
    packed, state = functional.quantize_4bit(data.contiguous(), **settings)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    vars(weight).update(settings, quant_state=state, bnb_quantized=True)
    return weight


def batch_of(
    task: str, config, micro_batch: int, seq_len: int, padded: bool, packed: bool = False
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The tensors of one micro-batch: name -> (shape, dtype). Token ids are int64, as collators make them."""
    import torch

    tokens = ((micro_batch, seq_len), torch.int64)
    labels = ((micro_batch,), torch.int64) if task == "sequence-classification" else tokens
    more = {name: tokens for name, there in (("attention_mask", padded), ("position_ids", packed)) if there}
    return {"input_ids": tokens, "labels": labels, **more}


def count_weights(config, task: str, dtype: str = "float32", peft_config=None) -> int:
    """A model's number of weights, without making them; of one with adapters those that are trained."""
    return sum(sizes_of_weights(config, task, dtype, peft_config))


def sizes_of_weights(config, task: str, dtype: str = "float32", peft_config=None) -> list[int]:
    """The elements of each of a model's tensors, without making them; of one with adapters those that are trained."""
    import torch

    with torch.device("meta"), outside_zero3():
        model = make_model(config, task, dtype, None, None, peft_config)
    return [weight.numel() for weight in model.parameters() if weight.requires_grad]
