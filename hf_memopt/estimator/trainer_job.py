"""The job of a Trainer that is ready to train: its own model, its own data, its own class."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_memopt.engines import Engine
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.engine_tensors import tensors_in
from hf_memopt.estimator.fake_pretrained import RESIZED
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.job_checks import check_shared
from hf_memopt.estimator.largest_batch import is_padded, largest_batch, largest_eval_batch
from hf_memopt.estimator.patches.liger import check_liger
from hf_memopt.estimator.patches.trl_offloading import check_offloading
from hf_memopt.estimator.tracing.extrapolate import count_layers, read_config
from hf_memopt.estimator.tracing.rollouts import check_rollouts, generates
from hf_memopt.estimator.tracing.segments import repeated_layers
from hf_memopt.estimator.tracing.shallow_adapters import adapts_layers_alike
from hf_memopt.estimator.tracing.trace import TracedJob
from hf_memopt.estimator.tracing.trainer_copy import TrainerCopy
from hf_memopt.estimator.training_fields import (
    evaluates,
    read_trainer_fields,
    settle_engine,
    sharing_processes,
)
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.hardware.attention_kernels import attention_names, check_attention
from hf_memopt.levers.language_model import inner_model
from hf_memopt.video.inputs import VideoInputs
from hf_memopt.video.model_parts import frozen_parts


@dataclass(frozen=True, kw_only=True)
class TrainerJob(Job):
    """A Job whose model, batch and class are a Trainer's.

    Attributes:
        trainer: stays as it is; copies of it are traced.
        inputs: its largest micro-batch.
        eval_inputs: its largest evaluation batch; None where it does not evaluate.
        layer_lists: the ModuleLists of its model's repeated layers; empty where they are not recognised.
    """

    trainer: Any
    inputs: Any
    eval_inputs: Any
    layer_lists: list[torch.nn.ModuleList]

    @property
    def batch(self) -> dict:
        tensors = enumerate(tensors_in(self.inputs))
        return {str(number): (tuple(tensor.shape), tensor.dtype) for number, tensor in tensors}

    @property
    def generates(self) -> bool:
        return generates(self.trainer)

    @property
    def micro_batch_tokens(self) -> int | None:
        if self.generates:  # of prompts, which the trainer tokenizes itself
            return self.fields["per_device_train_batch_size"] * self.seq_len
        inputs = self.inputs if isinstance(self.inputs, Mapping) else {}
        ids = [value for name, value in inputs.items() if str(name).endswith("input_ids")]
        tokens = sum(tensor.numel() for tensor in ids if isinstance(tensor, torch.Tensor))
        return tokens // self.shared or None

    @property
    def attention(self) -> tuple[str, ...]:
        return tuple(attention_names(read_config(self.trainer.model)))

    @property
    def kept_batches(self) -> int:
        batches = self.evaluated_batches
        return min(batches, self.fields.get("eval_accumulation_steps") or batches)

    @property
    def evaluated_batches(self) -> int:
        trainer = self.trainer
        if trainer.compute_metrics is None or trainer.args.prediction_loss_only or trainer.eval_dataset is None:
            return 0
        if getattr(self.memory_args, "reduce_eval_logits", False) and trainer.preprocess_logits_for_metrics is None:
            return 0  # only the predicted token ids are kept
        if trainer.args.batch_eval_metrics:
            return 1
        data = trainer.eval_dataset.values() if isinstance(trainer.eval_dataset, dict) else [trainer.eval_dataset]
        longest = max((len(each) for each in data if hasattr(each, "__len__")), default=1)
        return max(1, math.ceil(longest / trainer.args.per_device_eval_batch_size))

    @property
    def concatenates_logits(self) -> bool:
        return self.trainer.args.eval_do_concat_batches

    @property
    def fuses_head(self) -> bool:
        forward = vars(inner_model(self.trainer.model)).get("forward")
        code = getattr(getattr(forward, "__func__", None), "__code__", None)
        return code is not None and code.co_name == "_fused_forward"  # trl.trainer.utils.add_fused_lm_head (1.16)

    def elements(self, trained: bool = False) -> tuple[int, int]:
        def count(module) -> int:
            return sum(map(_count_elements, _weights(module, trained)))

        layer = max(1, count(self.layer_lists[0][0] if self.layer_lists else self.trainer.model))
        return count(self.trainer.model) - layer * count_layers(self.config), layer

    def trained_sizes(self) -> list[int]:
        return [_count_elements(weight) for weight in _weights(self.trainer.model, trained=True)]

    def depths(self) -> tuple[int, ...]:
        layers = count_layers(self.config)
        adapters = getattr(self.trainer.model, "peft_config", None) or {}
        alike = all(adapts_layers_alike(adapter, layers) for adapter in adapters.values())
        return super().depths() if self.layer_lists and alike else (layers,)

    def at_depth(self, depth: int) -> TracedJob:
        copies = TrainerCopy(self.trainer, self.layer_lists, depth)
        return TracedJob(
            make_model=copies.copy_models,
            batch=self.batch,
            padded=self.padded,
            evaluated=self.eval_inputs is not None,
            kept_logits=self.kept_batches,
            trainer=copies,
            inputs=self.inputs,
            eval_inputs=self.eval_inputs,
            resizing=max(vars(module).get(RESIZED, 0) for module in self.trainer.model.modules()),
            **self._trace_settings(),
        )


def _weights(module: torch.nn.Module, trained: bool) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad or not trained]


def _count_elements(weight: torch.Tensor) -> int:
    """The size of the whole weight: under ZeRO-3 `numel()` is that of an empty placeholder."""
    return getattr(weight, "ds_numel", weight.numel())


def describe_trainer(trainer, hardware: str | Hardware, world_size: int | None, strategy: str | None) -> TrainerJob:
    """The job of a Trainer; the arguments are estimate_trainer()'s.

    Raises:
        InputError: the trainer has no model or no data, or is of a kind that is not modelled.
    """
    model = trainer.model
    if trainer.model is None:
        raise InputError("trainer.model is None: an estimate needs the model")
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise InputError("trainer.model is sharded already: estimate its configuration, with strategy=hsdpN or tpN")
    if generates(trainer):
        check_rollouts(trainer)
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    for name in attention_names(read_config(model)):
        check_attention(name, device)
    world_size = world_size or trainer.args.world_size
    fields = read_trainer_fields(trainer)
    fields, engine = settle_engine(fields, strategy, world_size)
    shared = sharing_processes(fields, engine, world_size, launched=True)
    if shared > 1 and engine.deepspeed is not None:
        raise InputError(
            f"parallelism_config.sp_size={shared}: a Trainer's own batches are not predicted in parts: estimate() and "
            "`hf-memopt estimate --sequence-parallel` predict samples of one length"
        )
    check_liger(fields, device)
    check_offloading(fields, device, engine)
    engine.check(fields, world_size)
    check_held(trainer, engine)
    layer_lists = _layer_lists(model)
    inputs = largest_batch(trainer)
    tensors = list(tensors_in(inputs))
    names = [str(name) for name in inputs] if isinstance(inputs, Mapping) else []
    sees = "input_ids" in names and any(name.startswith("pixel_values") for name in names)
    job = TrainerJob(
        shared=shared,
        config=_layered_config(model, layer_lists),
        task="the trainer's own",
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        quantization_config=getattr(read_config(model), "quantization_config", None),
        memory_args=getattr(trainer, "memory_args", None),
        frozen=frozen_parts(model) if sees else (),
        fields=fields,
        seq_len=max((tensor.shape[1] for tensor in tensors if tensor.dim() == 2), default=1),
        device=device,
        padded=generates(trainer) or is_padded(inputs),
        video=VideoInputs(sample=inputs) if sees else None,
        engine=engine,
        world_size=world_size,
        rank=engine.peak_rank(world_size),
        trainer=trainer,
        inputs=inputs,
        eval_inputs=largest_eval_batch(trainer) if evaluates(fields) else None,
        layer_lists=layer_lists,
    )
    check_shared(job)
    if job.generates:
        (prompt, *_), *_ = trainer._tokenize_prompts([inputs[0]["prompt"]])
        job = replace(job, seq_len=len(prompt) + trainer.max_completion_length)
    return job


def check_held(trainer, engine: Engine) -> None:
    """Refuse engines that would shard reference and teacher models, which each Trainer does its own way, and those
    under which TRL gathers weights itself before it generates."""
    from transformers import PreTrainedModel

    held = [
        name
        for name, value in vars(trainer).items()
        if isinstance(value, PreTrainedModel) and name not in ("model", "model_wrapped")
    ]
    if engine.shards_weights and held:
        raise InputError(
            f"trainer.{held[0]} beside the trained model is not modelled where the model is sharded: "
            "precompute what it returns (precompute_ref_log_probs), or estimate with strategy=ddp"
        )
    if engine.gathers_to_generate and generates(trainer):
        raise InputError(
            f"{type(trainer).__name__} under {engine.gathers_to_generate}: what it gathers to generate is not "
            "modelled; estimate it with strategy=ddp, zero2 or fsdp2"
        )


def _layered_config(model, layer_lists: list[torch.nn.ModuleList]):
    """The model's configuration; one of a single layer where it does not say how many there are."""
    from transformers import PretrainedConfig

    config = read_config(model)
    layered = layer_lists or isinstance(getattr(config.get_text_config(), "num_hidden_layers", None), int)
    return config if layered else PretrainedConfig(num_hidden_layers=1)


def _layer_lists(model) -> list[torch.nn.ModuleList]:
    """The ModuleLists of the repeated layers; none where their number is not the configuration's."""
    depth, lists = getattr(read_config(model).get_text_config(), "num_hidden_layers", None), repeated_layers(model)
    return lists if all(len(layers) == depth for layers in lists) else []
