"""A training job as the estimator knows it: model, settings, batch, device and engine."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memopt.engines import NO_ENGINE, Engine
from hf_memopt.engines.mesh import Mesh
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import Peak, TraceResult
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job_checks import (
    check_combination,
    check_length,
    check_shared,
    count_positions,
    own_attention,
)
from hf_memopt.estimator.patches.fake_cluster import spread
from hf_memopt.estimator.patches.flex_attention import runs_flex
from hf_memopt.estimator.patches.liger import check_liger
from hf_memopt.estimator.patches.trl_offloading import FORWARD_STASH, check_offloading
from hf_memopt.estimator.quantized_checkpoints import check_quantized_training, resolve_quantization
from hf_memopt.estimator.tracing.extrapolate import count_layers, extrapolate_peaks, shallow_depths, with_depth
from hf_memopt.estimator.tracing.fake_quantization import quantization_method
from hf_memopt.estimator.tracing.model import (
    ModelSettings,
    count_weights,
    make_model,
    resolve_dtype,
    weight_sizes,
)
from hf_memopt.estimator.tracing.shallow_adapters import adapter_at_depth, adapts_layers_alike, check_adapter
from hf_memopt.estimator.tracing.tasks import EMBEDDINGS, TASKS, batch_shapes, find_task, infer_task
from hf_memopt.estimator.tracing.trace import TracedJob
from hf_memopt.estimator.training_fields import (
    check_fsdp,
    checkpointing_period,
    evaluates,
    read_fields,
    settle_engine,
    sharing_processes,
)
from hf_memopt.field_values import check_value
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.hardware.allocator import expands_segments
from hf_memopt.hardware.attention_kernels import check_attention
from hf_memopt.levers.activation_offload import IN_FLIGHT
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.feature import liger_replaces
from hf_memopt.levers.token_budget import samples_within
from hf_memopt.video.inputs import VideoInputs, value_tensors

# Of describe()'s arguments, those that nothing else checks before it uses them.
_TYPES = {
    "hardware": str | Hardware,
    "seq_len": int,
    "world_size": int | None,
    "strategy": str | None,
    "rank": int | None,
    "padded": bool,
    "packed": bool,
    "kbit_preparation": bool,
    "autocast_adapter_dtype": bool,
    "memory_args": MemoryArguments | None,
    "video": VideoInputs | None,
    "frozen": list[str] | None,
}
_MOST_LAYERS = 16  # of a shallow model; more would take longer than they make the estimate better


@dataclass(frozen=True, kw_only=True)
class Job(ModelSettings):
    """A training job, as far as memory is concerned: a model (see ModelSettings) and how it is trained.

    Attributes:
        fields: TrainingArguments fields that differ from their defaults; `deepspeed` is a dict.
        seq_len: tokens per sample.
        device: what each process trains on.
        padded: samples are padded, so that there is an attention mask.
        packed: several rows per sample, separated by their `position_ids`.
        video: the clips of a batch; None for text.
        engine: of all processes, as the fields configure it; FSDP1 is traced as FSDP2.
        world_size: processes, one device each.
        mesh: how the processes share the model; None where transformers does not shard it.
        rank: the process that is estimated.
        shared: processes that share the tokens of each sample: by DeepSpeed's Ulysses, under FSDP2 by a ring.
        real_batch: the tensors of a micro-batch that ran, in place of one of `seq_len` tokens a sample; pixels are on
            the meta device.
        expandable: the caching allocator has expandable segments, as presets set it; by default as this process has.
    """

    fields: dict[str, Any]
    seq_len: int
    device: Hardware
    padded: bool = False
    packed: bool = False
    video: VideoInputs | None = None
    engine: Engine = NO_ENGINE
    world_size: int = 1
    mesh: Mesh | None = None
    rank: int = 0
    shared: int = 1
    real_batch: dict[str, Any] | None = None
    expandable: bool = field(default_factory=expands_segments)

    # What only the job of a Trainer may have.
    generates = False  # its steps begin with generated text
    fuses_head = False  # TRL's kernels compute the loss from the weights of the head
    kept_batches = 0  # evaluation batches whose logits wait on the device for compute_metrics
    evaluated_batches = 0  # evaluation batches whose logits compute_metrics gets, in host memory
    concatenates_logits = False  # each batch's logits are concatenated with those before them

    @property
    def batch(self) -> dict:
        """The tensors of one micro-batch: name -> (shape, dtype)."""
        if tensors := self._known_batch:
            return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if self.shares_heads:  # as deepspeed 0.19's UlyssesSPDataLoaderAdapter leaves it
            import torch

            part = (self._micro_batch, -(-self.seq_len // self.shared))
            return dict.fromkeys(("input_ids", "position_ids", "shift_labels"), (part, torch.int64))
        return batch_shapes(self.task, self.config, self._micro_batch, self.seq_len, self.padded, self.packed)

    @property
    def _micro_batch(self) -> int:
        """Samples of a micro-batch; within a budget of tokens, as many of the longest as fit."""
        budget = getattr(self.memory_args, "max_tokens_per_batch", None)
        if budget is None:
            return self.fields["per_device_train_batch_size"]
        return samples_within(budget, self.seq_len if self.video is None else self.video.longest(self.config))

    @property
    def shares_heads(self) -> bool:
        """True if processes exchange tokens for attention heads (Ulysses), and get batches in parts."""
        return self.shared > 1 and self.engine.deepspeed is not None

    @property
    def positions(self) -> int | None:
        """The positions that its configuration names; None where there is no such number."""
        return count_positions(self.config)

    @property
    def method(self) -> str:
        """full, lora or qlora."""
        return "qlora" if self.quantization_config is not None else "full" if self.peft_config is None else "lora"

    @property
    def micro_batch_tokens(self) -> int | None:
        """Tokens of one micro-batch that a process computes, padding included; None where samples are not made of
        tokens."""
        shape, _ = self.batch.get("input_ids", (None, None))
        return shape and math.prod(shape) // (1 if self.shares_heads else self.shared)

    @property
    def attention(self) -> tuple[str, ...]:
        """The `attn_implementation` of the model and of its parts; none where the model's own choice holds."""
        chosen = self.attn_implementation
        return tuple(chosen.values()) if isinstance(chosen, dict) else (chosen,) if chosen else ()

    @functools.cached_property
    def _known_batch(self) -> dict[str, Any]:
        """The tensors of a micro-batch whose values are known; empty where there are none but shapes."""
        if self.real_batch is not None:
            return self.real_batch
        return {} if self.video is None else self.video.batch(self.config, self._micro_batch)

    def in_words(self, attention: str) -> str:
        """The job in one line: dtype, optimizer, checkpointing, attention, loss, engine, other memory features, and
        micro-batch × accumulation × processes.

        Args:
            attention: the model's `attn_implementation`.
        """
        fields, levers = self.fields, self.memory_args.levers() if self.memory_args is not None else {}
        half = "".join(f" + {name}" for name in ("bf16", "fp16") if fields.get(name))
        quantized = quantization_method(self.quantization_config)
        optimizer = "adam_mini" if levers.pop("adam_mini", None) else fields.get("optim", "adamw_torch_fused")
        checkpointing = self._checkpointing_in_words(
            levers.pop("checkpoint_ratio", 0), levers.pop("checkpoint_keeps", "")
        )
        chunk = levers.pop("loss_chunk_size", None)
        fused = liger_replaces(fields, "fused_linear_cross_entropy", "cross_entropy") or self.fuses_head
        engine = str(self.mesh.strategy) if self.engine.by_transformers else self.engine.label
        budget = levers.pop("max_tokens_per_batch", None)
        micro = f"{budget} tokens" if budget else fields["per_device_train_batch_size"]
        return ", ".join(
            [
                f"{self.dtype}{half}",
                *([quantized] if quantized else []),
                optimizer,
                checkpointing,
                attention or "no attention",
                f"loss in chunks of {chunk}" if chunk else "fused loss" if fused else "plain loss",
                *([] if self.engine.alone else [engine]),
                *(name if value is True else f"{name}={value}" for name, value in levers.items()),
                *([f"samples shared by {self.shared}"] if self.shared > 1 else []),
                f"{micro} × {fields['gradient_accumulation_steps']} × {self.world_size // self.shared}",
            ]
        )

    def _checkpointing_in_words(self, ratio: float, keeps: str) -> str:
        every = checkpointing_period(self.fields)
        if not (self.fields.get("activation_checkpointing") or self.engine.checkpointing or ratio or keeps):
            return "no checkpointing"
        share = f" of {ratio:.0%}" if ratio else f" every {every} layers" if every > 1 else ""
        return f"checkpointing{share}" + (f" but {keeps}" if keeps else "")

    @property
    def runs_triton(self) -> bool:
        """True if the device runs Triton kernels."""
        return self.device.backend in ("cuda", "rocm", "xpu")

    def elements(self, trained: bool = False) -> tuple[int, int]:
        """Weights outside the layers and within one layer, on average where they differ; only trained ones if
        `trained`."""
        adapters = self.peft_config if trained else None
        layers, depths = count_layers(self.config), shallow_depths(self.config)
        counts = [
            count_weights(
                with_depth(self.config, depth), self.task, self.dtype, adapter_at_depth(adapters, layers, depth)
            )
            for depth in depths
        ]
        low, high = (0, depths[0]) if len(depths) == 1 else depths
        grown = counts[-1] - (counts[0] if low else 0)
        layer = max(1, grown // (high - low))
        return counts[-1] + grown * (layers - high) // (high - low) - layer * layers, layer

    def peaks(self, depths: Sequence[int], traces: Sequence[TraceResult]) -> dict[str, Peak]:
        """Peaks per segment at the model's own depth, from traces of this job or of one with the same layers."""
        moments = [trace.moments for trace in traces]
        return extrapolate_peaks(self.config, depths, moments, not self.engine.flat_buffers, self.unlike_layers)

    def trained_sizes(self) -> list[int]:
        """The number of elements of each trained weight, in the model's order."""
        return weight_sizes(self.config, self.task, self.dtype, self.peft_config)

    def depths(self) -> tuple[int, ...]:
        """Numbers of layers with which the job is traced."""
        layers = count_layers(self.config)
        if not adapts_layers_alike(self.peft_config, layers):
            return (layers,)
        period = checkpointing_period(self.fields, self.memory_args)
        depths = shallow_depths(self.config, max(self._fewest_layers(), 2 * self.unlike_layers), period)
        return depths if self._grows_linearly(depths) else (layers,)

    @property
    def unlike_layers(self) -> int:
        """The first layers, in whose passes less is held than in those of the layers above: fewer are below that are
        on their way to the host, or fetched ahead. 0 where all layers are alike."""
        if self.fields.get("activation_offloading"):
            return (1 + FORWARD_STASH) * checkpointing_period(self.fields, self.memory_args)
        if self.memory_args is None:
            return self.engine.unlike_layers
        streamed = max(2, checkpointing_period({}, self.memory_args)) * self.memory_args.weight_streaming
        # Of checkpoints that are a tensor each, the one in use and those that are fetched ahead.
        offloaded = (1 + IN_FLIGHT) * checkpointing_period(self.fields, self.memory_args)
        return max(streamed, offloaded * self.memory_args.activation_offload, self.engine.unlike_layers)

    def _grows_linearly(self, depths: tuple[int, ...]) -> bool:
        """True if the shallow models' numbers of weights extend to the number at the model's own depth. False
        where a configuration makes single layers different in a way that extrapolate.py does not know."""
        if len(depths) == 1 or self.task not in TASKS:  # a Trainer's model shows its layers itself
            return True
        try:
            low, high, own = (
                count_weights(with_depth(self.config, depth), self.task, self.dtype)
                for depth in (*depths, count_layers(self.config))
            )
        except InputError:  # the model cannot be built with fewer layers
            return False
        return (own - low) * (depths[1] - depths[0]) == (high - low) * (count_layers(self.config) - depths[0])

    def _fewest_layers(self) -> int:
        """Layers that a shallow model of this job needs, at least."""
        fewest, live, bucket = self.engine.fewest_layers, self.engine.live_weights, self.engine.gradient_bucket
        limit = bucket if live is None else live
        if limit is None:
            return fewest
        # ZeRO-3 keeps gathered weights up to a limit, and ZeRO-2 whole gradients. If a model exceeds it, the shallow
        # one must too, or the extrapolation would keep those of every layer. Of weights at most 16 layers, with fewer
        # the estimate is too high; gradients of small layers fill buckets that end in others of a deeper model.
        layers, (_, layer) = count_layers(self.config), self.elements(trained=live is None)
        needed = int(2 * limit / layer) + 2 if layer * layers > limit else 0
        if live is None:
            return layers if needed > fewest else fewest
        return max(fewest, min(needed, _MOST_LAYERS))

    def at_depth(self, depth: int) -> TracedJob:
        """The traced job: the job on a model with so many layers."""
        adapters = adapter_at_depth(self.peft_config, count_layers(self.config), depth)
        shallow = replace(self, config=with_depth(self.config, depth), peft_config=adapters)
        bf16 = self.fields.get("bf16", False)
        distribute = functools.partial(spread, mesh=self.mesh, bf16=bf16) if self.mesh else None
        whole = self.task, self.config, 1, self.seq_len, self.padded
        return TracedJob(
            make_model=lambda: make_model(shallow, distribute),
            batch=self.batch,
            values=value_tensors(self._known_batch),
            padded=self.padded or self.packed,
            evaluated=evaluates(self.fields),
            # In evaluation Ulysses leaves a sample whole, with the positions that it needs in training.
            eval_batch=batch_shapes(*whole, packed=True) if self.shares_heads else None,
            **self._trace_settings(),
        )

    def _trace_settings(self) -> dict[str, Any]:
        """The fields of a TracedJob that follow from the settings, whatever the model is."""
        return {
            "fields": self.engine.traceable(self.fields),
            "backend": self.device.backend,
            "discrete_memory": self.device.discrete_memory,
            "flex": runs_flex(self.device),
            "attention": self.attention,
            "capability": self.device.capability,
            "fp8": quantization_method(self.quantization_config) in ("fp8", "mxfp8"),
            "dequantized": self.dequantized,
            "world_size": self.world_size,
            "engine": self.engine,
            "memory_args": self.memory_args,
            "rank": self.rank,
            "shared": self.shared,
        }


def describe(
    model,
    args,
    seq_len: int,
    hardware: str | Hardware = "auto",
    *,
    world_size: int | None = None,
    strategy: str | None = None,
    task: str | None = None,
    rank: int | None = None,
    config_class: type | None = None,
    **settings: Any,
) -> Job:
    """The checked Job of estimate()'s arguments, which document these.

    Args:
        config_class: the class whose fields a dict of `args` has, by default TrainingArguments.
        settings: further fields of Job: peft_config, dtype, attn_implementation, padded, quantization_config,
            kbit_preparation, autocast_adapter_dtype, memory_args, packed, video, frozen, shared.

    Raises:
        InputError: an unknown model, or a job that cannot run or is not modelled.
    """
    video = settings.get("video")
    arguments = settings | {"hardware": hardware, "world_size": world_size, "strategy": strategy, "rank": rank}
    _check_types(arguments if video is not None else arguments | {"seq_len": seq_len})  # clips decide it
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    config = load_config(model)
    if video is not None:
        seq_len = video.batch(config, 1)["input_ids"].shape[1]
    settings |= {
        "frozen": tuple(settings.get("frozen") or ()),
        "dtype": resolve_dtype(config, settings.get("dtype", "auto")),
    }
    fields = read_fields(args, config_class)
    world_size = world_size or (1 if isinstance(args, dict) else args.world_size)
    check_fsdp(fields, strategy, world_size)
    fields, engine = settle_engine(fields, strategy, world_size)
    if (shared := sharing_processes(fields, engine, world_size, launched=not isinstance(args, dict))) > 1:
        settings["shared"] = shared
    engine.check(fields, world_size)
    config = _resolve_model(config, settings, fields, engine, device)
    task = find_task(task, config) if task else infer_task(config)
    if video is not None or task == EMBEDDINGS:  # samples and pairs of texts differ in length
        settings["padded"] = True
    rank = engine.peak_rank(world_size) if rank is None else rank
    if not 0 <= rank < world_size:
        raise InputError(f"rank={rank} must be from 0 to {world_size - 1}, one of the {world_size} processes")
    check_length(config, task, seq_len if video is None else video.longest(config))
    job = Job(
        config=config,
        fields=fields,
        seq_len=seq_len,
        device=device,
        engine=engine,
        world_size=world_size,
        task=task,
        rank=rank,
        mesh=engine.mesh(world_size),
        **settings,
    )
    check_combination(job)
    check_shared(job)
    check_offloading(fields, device, engine)
    return job


def _resolve_model(config, settings: dict[str, Any], fields: dict[str, Any], engine: Engine, device: Hardware):
    """The configuration of what is loaded. Quantization and attention are put into the settings; adapter, quantization
    and kernels are checked."""
    adapter = settings.get("peft_config")
    check_adapter(adapter)
    config, quantization, dequantized = resolve_quantization(config, settings.get("quantization_config"), device)
    settings |= {"quantization_config": quantization, "dequantized": dequantized}
    check_quantized_training(quantization, adapter, engine)
    settings["attn_implementation"] = settings.get("attn_implementation") or own_attention(config)
    check_attention(settings["attn_implementation"], device)
    check_liger(fields, device)
    return config


def _check_types(arguments: dict[str, Any]) -> None:
    for name in _TYPES.keys() & arguments.keys():
        check_value(name, _TYPES[name], arguments[name])
    world_size = arguments["world_size"]
    if world_size is not None and world_size < 1:
        raise InputError(f"world_size={world_size!r} must be a whole number of at least 1")
