"""The model of a job on fake tensors, as from_pretrained and peft would leave it."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.errors import InputError, as_input_error, brief
from hf_memopt.estimator.private_names import Part, check
from hf_memopt.estimator.tracing.fake_quantization import is_quantized, quantize, traceable_dtype
from hf_memopt.estimator.tracing.fake_tensors import fake_world
from hf_memopt.estimator.tracing.pair_loss import with_pair_loss
from hf_memopt.estimator.tracing.quantized_linear import QuantizedModule, named_stand_ins
from hf_memopt.estimator.tracing.tasks import EMBEDDINGS, TASKS, with_token_ids
from hf_memopt.levers.adapters import add_adapters, by_names
from hf_memopt.levers.apply import apply_levers
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.streamed_loading import mark_streamed, streams_on_load
from hf_memopt.remote_code import is_trusted
from hf_memopt.stack.versions import has
from hf_memopt.video.model_parts import train_parts


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model of a job: what from_pretrained, peft and the memory features make of a configuration.

    Attributes:
        config: a PretrainedConfig.
        task: one of tasks.TASKS.
        dtype: of the loaded weights; "auto" for the checkpoint's.
        attn_implementation: None for the model's own choice, sdpa where it has it.
        quantization_config: one of transformers' quantization configurations, or None.
        dequantized: the method of a quantized checkpoint whose weights are dequantized while they are loaded; or "".
        peft_config: a LoraConfig, or None for full fine-tuning.
        autocast_adapter_dtype: adapters are trained in fp32, as peft does by default; without, in their base's dtype.
        kbit_preparation: peft's prepare_model_for_kbit_training is called, which this project's recipes avoid.
        memory_args: the MemoryArguments of a MemoryTrainer; None for a plain Trainer.
        frozen: parts of a video model that are not trained (video.model_parts.PARTS).
    """

    config: Any
    task: str
    dtype: str = "auto"
    attn_implementation: str | None = None
    quantization_config: Any = None
    dequantized: str = ""
    peft_config: Any = None
    autocast_adapter_dtype: bool = True
    kbit_preparation: bool = False
    memory_args: MemoryArguments | None = None
    frozen: tuple[str, ...] = ()

    @property
    def loaded_whole(self) -> bool:
        """True if from_pretrained leaves the weights whole under ZeRO-3, which DeepSpeed then shards on the device:
        those that it quantizes or dequantizes (transformers 5.24, get_init_context: `is_quantized`)."""
        return self.quantization_config is not None or bool(self.dequantized)


def make_model(settings: ModelSettings, distribute: Callable | None = None):
    """The model on fake or meta tensors, whichever are in force.

    Args:
        distribute: shards the model where from_pretrained would with a DistributedConfig.

    Raises:
        InputError: a configuration that the model's class refuses.
    """
    check(Part.EVERY_JOB)
    model = _from_config(settings, distribute)
    if settings.quantization_config is not None:
        quantize(model, copy.deepcopy(settings.quantization_config), is_quantized(settings.config))
    if settings.kbit_preparation:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if settings.frozen:
        model = train_parts(model, adapters_for(settings, model), settings.frozen)
    elif settings.peft_config is not None:
        model = add_adapters(model, adapters_for(settings, model), settings.autocast_adapter_dtype)
    if settings.memory_args is not None:
        apply_levers(model, settings.memory_args)
        if not is_quantized(settings.config) and streams_on_load(
            settings.memory_args, settings.quantization_config, settings.peft_config
        ):
            mark_streamed(model)
    return model


def adapters_for(settings: ModelSettings, model):
    """A copy of the peft configuration for the model's task, which knows the layers that stand for quantized ones."""
    from peft import LoraConfig

    adapters = copy.deepcopy(settings.peft_config)
    if adapters is None:  # frozen parts, and the rest trained in full
        return None
    if adapters.task_type == "CAUSAL_LM":  # the presets', whatever the model is for
        kind = TASKS[settings.task].adapters
        # peft asks a model of these for its preparation of generation.
        asks = kind in ("CAUSAL_LM", "SEQ_2_SEQ_LM") and not hasattr(model, "prepare_inputs_for_generation")
        adapters.task_type = None if asks else kind
        linear = isinstance(adapters, LoraConfig) and adapters.target_modules == "all-linear"
        if linear and adapters.exclude_modules is None:
            # peft 0.21 leaves out the head that it trains in full of SEQ_CLS alone, and raises for the others.
            adapters.exclude_modules = {"TOKEN_CLS": ["classifier", "score"], "QUESTION_ANS": ["qa_outputs"]}.get(kind)
    if settings.quantization_config is not None and isinstance(adapters, LoraConfig):
        from peft.tuners.lora.awq import AwqLoraLinear

        # peft's LoRA layers for GPTQ and AWQ use memory alike, and this one is there without its package.
        adapters._register_custom_module({QuantizedModule: AwqLoraLinear})
        if adapters.target_modules == "all-linear" and (names := named_stand_ins(model)):
            adapters.target_modules = names  # peft finds none: they are no nn.Linear
    return by_names(adapters, model)


def _from_config(settings: ModelSettings, distribute: Callable | None):
    import transformers

    auto = getattr(transformers, TASKS[settings.task].auto_class)
    whole = outside_zero3() if settings.loaded_whole else nullcontext()
    # Its constructor computes with the configuration's sizes and looks attention up by name, so it may raise anything.
    refused = as_input_error(f"model type {settings.config.model_type!r} cannot be built", Exception)
    with _untied() if distribute else nullcontext(), whole, refused:
        model = auto.from_config(
            with_token_ids(settings.config),
            dtype=traceable_dtype(getattr(torch, resolve_dtype(settings.config, settings.dtype))),
            trust_remote_code=is_trusted(settings.config),
            attn_implementation=settings.attn_implementation,
        )
    if settings.task == EMBEDDINGS:
        model = with_pair_loss(model)
    if distribute is not None:
        model = distribute(model)
    if distribute is not None or not has("transformers", "5.1"):  # 5.0 ties no weights on the meta device
        model.tie_weights(recompute_mapping=False)
    return model


@contextmanager
def _uninitialized() -> Iterator[None]:
    """No weight is initialized. transformers' functions return nothing then, of which peft's PVERA and RandLoRA make
    more; these return their tensor, as torch's do."""
    from torch.nn import init
    from transformers.initialization import TORCH_INIT_FUNCTIONS, no_init_weights

    with no_init_weights():  # which puts torch's back
        for name in TORCH_INIT_FUNCTIONS:
            setattr(init, name, lambda tensor, *args, **kwargs: tensor)
        yield


def _untied():
    from transformers.initialization import no_tie_weights  # newer than the oldest version that is traced

    return no_tie_weights()


_ZERO3 = Part.EVERY_JOB.replaces(
    "transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref",
    why="a traced model must not become part of a real ZeRO-3 job of this process",
    until="transformers can build a model outside ZeRO-3",
)


def outside_zero3() -> AbstractContextManager:
    """Models built in here are not partitioned, also in a process that trains under ZeRO-3."""
    # transformers asks this module-level weak reference whether to partition every new model.
    return _ZERO3.replaced(_hf_deepspeed_config_weak_ref=None)


def resolve_dtype(config, dtype: str = "auto") -> str:
    """The dtype that from_pretrained loads weights in: for "auto" what config.json says, float32 where it is silent.

    from_pretrained itself would then look into the weights, which are not here.
    """
    if dtype != "auto":
        named = str(dtype).removeprefix("torch.")  # from_pretrained takes torch.bfloat16, too
        if not getattr(getattr(torch, named, None), "is_floating_point", False):
            raise InputError(f"dtype={brief(dtype)} must be auto, or one of torch's floating-point types: bfloat16, …")
        return named
    named = config.dtype or config.get_text_config().dtype or "float32"
    return str(named).removeprefix("torch.")


def _on_meta(config, task: str):
    with torch.device("meta"), outside_zero3():
        return make_model(ModelSettings(config=config, task=task))


def supports_checkpointing(config, task: str) -> bool:
    """True if the model's class has activation checkpointing: XLNet's has not, and the Trainer refuses it there."""

    def build() -> bool:
        return bool(getattr(_on_meta(config, task), "supports_gradient_checkpointing", True))

    return _remembered("checkpointing", config, build, task)


def has_table(config, task: str, positions: int) -> bool:
    """True if the model looks positions up in a table of that many rows, or of two more as OPT's and RoBERTa's."""
    model = _on_meta(config, task)
    tensors = itertools.chain(model.parameters(), model.buffers())
    return any(tensor.dim() == 2 and positions <= tensor.shape[0] <= positions + 2 for tensor in tensors)


def count_weights(config, task: str, dtype: str = "auto", peft_config=None) -> int:
    """A model's number of weights, without allocating them; with adapters the number of trained ones."""
    return sum(weight_sizes(config, task, dtype, peft_config))


def weight_sizes(config, task: str, dtype: str = "auto", peft_config=None) -> list[int]:
    """The number of elements of each weight, in the model's order; with adapters of the trained ones."""

    def build() -> list[int]:
        # Adapters make tensors from values, which the meta device does not have. Nothing is initialized then: SigLIP
        # (Gemma 3's vision tower) would ask for the largest of its weights, which fake tensors do not have.
        unallocated = torch.device("meta") if peft_config is None else fake_world("cpu")
        initialized = nullcontext() if peft_config is None else _uninitialized()
        with unallocated, initialized, outside_zero3():
            model = make_model(ModelSettings(config=config, task=task, dtype=dtype, peft_config=peft_config))
        return [weight.numel() for weight in model.parameters() if weight.requires_grad]

    return list(_remembered("sizes", config, build, task, dtype, repr(peft_config)))


_MOST_REMEMBERED = 1000  # answers; then all are forgotten
_answers: dict[tuple, Any] = {}


def _remembered(question: str, config, build: Callable[[], Any], *settings: str) -> Any:
    """Remember what build() says of a model, which a plan asks again for every combination: with a video model's
    towers each answer takes seconds.

    Args:
        settings: what the answer depends on beside the configuration.
    """
    key = (question, type(config), repr(config.to_dict()), *settings)
    if key not in _answers:
        if len(_answers) >= _MOST_REMEMBERED:
            _answers.clear()
        _answers[key] = build()
    return _answers[key]
