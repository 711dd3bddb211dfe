"""A training job as the estimator knows it: model, settings, batch, device and engine."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from hf_memopt.compatibility.engine import Engine
from hf_memopt.compatibility.mesh import Mesh, mesh_of
from hf_memopt.compatibility.setup import Setup, compile_mode, quant_storage, refusals
from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.patches.fake_cluster import spread
from hf_memopt.estimator.patches.flex_attention import runs_flex
from hf_memopt.estimator.tracing.adapters import adapter_at_depth, adapts_layers_alike, check_adapter
from hf_memopt.estimator.tracing.extrapolate import (
    FEWEST,
    FEWEST_IN_PARTITIONS,
    count_layers,
    shallow_depths,
    with_depth,
)
from hf_memopt.estimator.tracing.model import (
    ModelSettings,
    batch_shapes,
    count_weights,
    infer_task,
    make_model,
    weight_sizes,
)
from hf_memopt.estimator.tracing.trace import TracedJob
from hf_memopt.estimator.training_fields import (
    checkpointing_period,
    engine_name,
    evaluates,
    fsdp_checkpoints,
    peak_rank,
    read_fields,
    traceable_fields,
    with_strategy,
    zero_limit,
    zero_stage,
)
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.levers.refusals import check_levers
from hf_memopt.levers.token_budget import samples_within
from hf_memopt.video.inputs import VideoInputs, value_tensors

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
        engine: none, ddp, fsdp2, mesh or deepspeed.
        world_size: processes, one device each.
        mesh: how the processes share the model; None for other engines than "mesh".
        rank: the process that is estimated.
    """

    fields: dict[str, Any]
    seq_len: int
    device: Hardware
    padded: bool = False
    packed: bool = False
    video: VideoInputs | None = None
    engine: str = "none"
    world_size: int = 1
    mesh: Mesh | None = None
    rank: int = 0

    @property
    def batch(self) -> dict:
        """The tensors of one micro-batch: name -> (shape, dtype)."""
        if self.video is not None:
            return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._video_batch.items()}
        micro = self.fields["per_device_train_batch_size"]
        budget = getattr(self.memory_args, "max_tokens_per_batch", None)
        if budget is not None:
            micro = samples_within(budget, self.seq_len)
        return batch_shapes(self.task, self.config, micro, self.seq_len, self.padded, self.packed)

    @functools.cached_property
    def _video_batch(self) -> dict:
        return self.video.batch(self.config, self.fields["per_device_train_batch_size"])

    @property
    def kept_batches(self) -> int:
        """Evaluation batches whose logits wait on the device for compute_metrics."""
        return 0

    def elements(self, trained: bool = False) -> tuple[int, int]:
        """Weights outside the layers and within one layer; only trained ones if `trained`."""
        adapters = self.peft_config if trained else None
        layers = count_layers(self.config)
        one, two = (
            count_weights(
                with_depth(self.config, depth), self.task, self.dtype, adapter_at_depth(adapters, layers, depth)
            )
            for depth in (1, 2)
        )
        layer = max(1, two - one)
        return one - layer, layer

    def trained_sizes(self) -> list[int]:
        """The number of elements of each trained weight, in the model's order."""
        return weight_sizes(self.config, self.task, self.dtype, self.peft_config)

    def depths(self) -> tuple[int, ...]:
        """Numbers of layers with which the job is traced."""
        layers = count_layers(self.config)
        if not adapts_layers_alike(self.peft_config, layers):
            return (layers,)
        period = checkpointing_period(self.fields, self.memory_args)
        return shallow_depths(self.config, self._fewest_layers(), period)

    def _fewest_layers(self) -> int:
        """Layers that a shallow model of this job needs, at least."""
        if self.engine != "deepspeed":
            return FEWEST[self.engine]
        if zero_stage(self.fields) < 3:
            return FEWEST_IN_PARTITIONS
        # ZeRO-3 keeps gathered weights up to a limit. Where the whole model exceeds it, the shallow one must too, or
        # the extrapolation would keep every layer gathered; at most 16 layers, with fewer the estimate is too high.
        live = max(zero_limit(self.fields, f"stage3_max_{name}") for name in ("live_parameters", "reuse_distance"))
        _, layer = self.elements()
        needed = int(2 * live / layer) + 2 if layer * count_layers(self.config) > live else 0
        return max(FEWEST["deepspeed"], min(needed, _MOST_LAYERS))

    def at_depth(self, depth: int) -> TracedJob:
        """What is traced: the job on a model with so many layers."""
        adapters = adapter_at_depth(self.peft_config, count_layers(self.config), depth)
        shallow = dataclasses.replace(self, config=with_depth(self.config, depth), peft_config=adapters)
        bf16 = self.fields.get("bf16", False)
        distribute = functools.partial(spread, mesh=self.mesh, bf16=bf16) if self.mesh else None
        return TracedJob(
            make_model=lambda: make_model(shallow, distribute),
            batch=self.batch,
            values={} if self.video is None else value_tensors(self._video_batch),
            padded=self.padded or self.packed,
            evaluated=evaluates(self.fields),
            **self._trace_settings(),
        )

    def _trace_settings(self) -> dict[str, Any]:
        """The fields of a TracedJob that follow from the settings, whatever the model is."""
        return {
            "fields": traceable_fields(self.fields, self.engine),
            "accelerator": self.device.backend != "cpu",
            "host_apart": self.device.memory_apart,
            "flex": runs_flex(self.device),
            "world_size": self.world_size,
            "engine": self.engine,
            "memory_args": self.memory_args,
            "rank": self.rank,
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
    **settings: Any,
) -> Job:
    """The checked Job of estimate()'s arguments, which document these.

    Args:
        settings: further fields of Job: peft_config, dtype, attn_implementation, padded, quantization_config,
            kbit_preparation, memory_args, packed, video, frozen.

    Raises:
        InputError: an unknown model, or a job that cannot run or is not modelled.
    """
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    config = load_config(model)
    video = settings.get("video")
    if video is not None:
        seq_len = video.batch(config, 1)["input_ids"].shape[1]
        settings["padded"] = True
    settings["frozen"] = tuple(settings.get("frozen", ()))
    fields = with_strategy(read_fields(args), strategy)
    world_size = world_size or (1 if isinstance(args, dict) else args.world_size)
    engine = engine_name(fields, strategy, world_size)
    _check_model(config, settings.get("peft_config"), settings.get("quantization_config"))
    _check_length(config, seq_len)
    job = Job(
        config=config,
        fields=fields,
        seq_len=seq_len,
        device=device,
        engine=engine,
        world_size=world_size,
        task=task or infer_task(config),
        rank=peak_rank(fields, engine, world_size) if rank is None else rank,
        mesh=mesh_of(strategy, world_size) if engine == "mesh" else None,
        **settings,
    )
    _check_combination(job, strategy)
    return job


def _check_model(config, peft_config, quantization_config) -> None:
    check_adapter(peft_config)
    if quantization_config is not None and not getattr(quantization_config, "load_in_4bit", False):
        raise InputError("quantization_config: only load_in_4bit=True of bitsandbytes is modelled")
    if quantization_config is None and getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"the checkpoint is quantized already ({type(config.quantization_config).__name__}): "
            "estimate its original with quantization_config"
        )
    count_layers(config)


def _check_length(config, seq_len: int) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if seq_len < 1 or (positions and seq_len > positions):
        raise InputError(f"seq_len={seq_len} must be from 1 to the model's {positions} positions")


def _check_combination(job: Job, strategy: str | None) -> None:
    """Refuse what the Trainer or compatibility would refuse before training: only jobs that can run are estimated."""
    fields, engine = job.fields, job.engine
    if fields.get("bf16") and fields.get("fp16"):
        raise InputError("bf16 and fp16 exclude each other: set one of them")
    if job.memory_args is not None:
        stage = zero_stage(fields) if engine == "deepspeed" else 0
        check_levers(job.memory_args, fields, engine, stage, job.device.backend)
    running = Engine(strategy if job.mesh else engine)
    if engine == "deepspeed":
        running = Engine.of_deepspeed(fields["deepspeed"])
    elif engine == "fsdp2":
        running = Engine.of_fsdp(2, fsdp_checkpoints(fields))
    setup = Setup(
        **running.setup(),
        optim=fields.get("optim", "adamw_torch_fused"),
        method="qlora" if job.quantization_config is not None else "full" if job.peft_config is None else "lora",
        precision="bf16" if fields.get("bf16") else "fp16" if fields.get("fp16") else "fp32",
        dtype=job.dtype,
        quant_storage=quant_storage(job.quantization_config),
        activation_checkpointing=bool(fields.get("activation_checkpointing")),
        auto_find_batch_size=bool(fields.get("auto_find_batch_size")),
        accumulates=fields["gradient_accumulation_steps"] > 1,
        compile_mode=compile_mode(fields.get),
        replicated=job.mesh is not None and job.mesh.dp_replicate_size > 1,
    )
    for refusal in refusals(setup):
        raise InputError(refusal)
