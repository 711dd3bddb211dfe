"""estimate(): from a model's configuration and TrainingArguments to the peak of the job, in seconds."""

import copy
import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_memopt.compatibility.engine import Engine, deepspeed_config
from hf_memopt.compatibility.mesh import Mesh, is_mesh, mesh_of
from hf_memopt.compatibility.resolve import resolve_engine
from hf_memopt.compatibility.setup import Setup, compile_mode, quant_storage, refusals
from hf_memopt.errors import InputError, choose, one_line
from hf_memopt.estimator import constants as overheads
from hf_memopt.estimator.accounting.ledger import KINDS, Books, Peak
from hf_memopt.estimator.allocator.replay import Replay, replay
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.patches.fake_cluster import spread
from hf_memopt.estimator.patches.flex_attention import runs_flex
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.adapters import adapts_layers_alike, at_depth, check_adapter
from hf_memopt.estimator.tracing.extrapolate import (
    FEWEST,
    FEWEST_IN_PARTITIONS,
    at_full_depth,
    layers_of,
    shallow_depths,
    with_depth,
)
from hf_memopt.estimator.tracing.model import batch_of, count_weights, make_model, sizes_of_weights, task_of
from hf_memopt.estimator.tracing.parallel import one_by_one
from hf_memopt.estimator.tracing.trace import TracedJob, trace
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.levers.refusals import check_levers
from hf_memopt.levers.selective_checkpointing import period_of
from hf_memopt.levers.token_budget import samples_within
from hf_memopt.video.inputs import VideoInputs, values_of

_PHASES = ("load", "forward", "backward", "optimizer", "eval", "between", "save")
_MOST_LAYERS = 16
_SWAPPED = re.compile(r"More elements (\d+) than buffer size (\d+)")  # deepspeed.runtime.swap_tensor
_PARALLEL = ("fsdp2", "ddp", "none")


@dataclass(frozen=True)
class Job:
    """A training job, as far as memory is concerned.

    Attributes:
        fields: TrainingArguments fields that differ from their defaults; `deepspeed` is a dict.
        engine: none, ddp, fsdp2, mesh or deepspeed.
        task: what the model is trained for (estimator.model.TASKS).
        kbit_preparation: peft's prepare_model_for_kbit_training is called.
        memory_args: MemoryArguments, whose levers are on.
        packed: several rows to a sample.
        video: the clips of a batch; None for text.
        frozen: of levers.video_parts.PARTS.
        rank: which of the processes.
        mesh: how they share the model, for the engine "mesh".
    """

    config: Any
    fields: dict[str, Any]
    seq_len: int
    device: Hardware
    peft_config: Any
    quantization: Any
    dtype: str
    attn_implementation: str | None
    padded: bool
    world_size: int
    engine: str
    task: str
    kbit_preparation: bool = False
    memory_args: Any = None
    packed: bool = False
    video: VideoInputs | None = None
    frozen: tuple[str, ...] = ()
    rank: int = 0
    mesh: Mesh | None = None

    @property
    def batch(self) -> dict:
        """The tensors of one micro-batch: name -> (shape, dtype)."""
        if self.video is not None:
            return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._videos.items()}
        micro, budget = (
            self.fields["per_device_train_batch_size"],
            getattr(self.memory_args, "max_tokens_per_batch", None),
        )
        if budget is not None:
            micro = samples_within(budget, self.seq_len)
        return batch_of(self.task, self.config, micro, self.seq_len, self.padded, self.packed)

    @functools.cached_property
    def _videos(self) -> dict:
        return self.video.batch(self.config, self.fields["per_device_train_batch_size"])

    def elements(self, trained: bool = False) -> tuple[int, int]:
        """Weights outside and within one layer; only those that are trained."""
        adapters = self.peft_config if trained else None
        one, two = (
            count_weights(
                with_depth(self.config, depth),
                self.task,
                self.dtype,
                at_depth(adapters, layers_of(self.config), depth),
            )
            for depth in (1, 2)
        )
        layer = max(1, two - one)
        return one - layer, layer

    def trained_sizes(self) -> list[int]:
        """Elements of every tensor that is trained, in the model's order."""
        return sizes_of_weights(self.config, self.task, self.dtype, self.peft_config)

    def at(self, depth: int) -> TracedJob:
        """The job on a model with so many layers."""
        shallow, mesh = with_depth(self.config, depth), self.mesh
        cut_up = functools.partial(spread, mesh=mesh, bf16=self.fields.get("bf16", False)) if mesh else None
        return TracedJob(
            make_model=lambda: make_model(
                shallow,
                self.task,
                self.dtype,
                self.attn_implementation,
                self.quantization,
                at_depth(self.peft_config, layers_of(self.config), depth),
                self.kbit_preparation,
                self.memory_args,
                self.frozen,
                cut_up,
            ),
            fields=traceable(self.fields, self.engine),
            batch=self.batch,
            accelerator=self.device.backend != "cpu",
            host_apart=self.device.memory_apart,
            flex=runs_flex(self.device),
            padded=self.padded or self.packed,
            world_size=self.world_size,
            engine=self.engine,
            evaluated=evaluates(self.fields),
            memory_args=self.memory_args,
            values={} if self.video is None else values_of(self._videos),
            rank=self.rank,
        )


def estimate(
    model,
    args,
    seq_len: int,
    hardware: str | Hardware = "auto",
    peft_config=None,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    padded: bool = False,
    quantization_config=None,
    world_size: int | None = None,
    strategy: str | None = None,
    task: str | None = None,
    kbit_preparation: bool = False,
    memory_args=None,
    packed: bool = False,
    video: VideoInputs | None = None,
    frozen: tuple[str, ...] = (),
    rank: int | None = None,
) -> Estimate:
    """Predict the peak memory of a training job on one of its devices, without its weights and without the device.

    The genuine Trainer, and the genuine engine where there is one, take two optimizer steps on fake tensors, on a
    shallow copy of the model at two depths; every segment of the step grows linearly with the number of layers, so
    the peak at full depth is the largest of the segments' own extrapolations.

    Args:
        model: a bundled architecture's name, hub id, folder, config.json or PretrainedConfig.
        args: TrainingArguments, or a dict of its fields. `deepspeed`: a dict, a file, or a shipped JSON's name.
        seq_len: tokens per sample.
        hardware: a name in the catalog. "cpu" counts as the CPU's allocator does.
        peft_config: any of peft's configurations; None trains all weights.
        dtype: of the loaded weights.
        attn_implementation: by default the model's own choice, sdpa where it has it. Flash attention is counted as
            sdpa's flash kernel.
        padded: samples are padded, so that an attention mask is built.
        quantization_config: a BitsAndBytesConfig with load_in_4bit.
        world_size: processes that train together, one device each; by default those of `args`, else 1.
        strategy: ddp, fsdp2, tpN, hsdpN, tpN_hsdpM (compatibility.mesh), or a DeepSpeed JSON as for `args`; by default
            what `args` says.
        task: causal-lm, masked-lm, seq2seq-lm, sequence-classification or image-text-to-text (text only); by default
            what the configuration is for.
        kbit_preparation: peft's prepare_model_for_kbit_training is called on the model.
        memory_args: MemoryArguments of a MemoryTrainer; by default a plain Trainer's job.
        packed: several rows to a sample, kept apart by their `position_ids`.
        video: what clips a sample has; `seq_len` then follows from it.
        frozen: parts of a video model that are not trained, "vision" and "projector".
        rank: which of the processes; by default the one that needs the most.

    Raises:
        InputError: the model is not known, or the job is of a kind that is not modelled.
    """
    job = describe(
        model,
        args,
        seq_len,
        hardware,
        peft_config,
        dtype,
        attn_implementation,
        padded,
        quantization_config,
        world_size,
        strategy,
        task,
        kbit_preparation,
        memory_args,
        packed,
        video,
        frozen,
        rank,
    )
    return estimate_job(job)


def estimate_job(job: Job, each=one_by_one) -> Estimate:
    """estimate() of a job that is described already.

    Args:
        each: gives a function's results for all items; parallel.on_all_cores takes half the time, in copies of this
            process.
    """
    (found,) = estimate_jobs([job], each)
    if isinstance(found, InputError):
        raise found
    return found


def estimate_jobs(jobs: Sequence[Job], each=one_by_one) -> list[Estimate | InputError]:
    """The estimate of every job, or why it has none.

    Args:
        each: as for estimate_job(); all traces of all jobs are given to it at once.
    """
    depths = [_depths(job) for job in jobs]
    traces = [(job, depth) for job, its in zip(jobs, depths, strict=True) for depth in its]
    books = iter(each(_books, traces))
    taken = [(job, its, [next(books) for _ in its]) for job, its in zip(jobs, depths, strict=True)]
    return each(_reported, taken)


def _depths(job: Job) -> tuple[int, ...]:
    layers = layers_of(job.config)
    if not adapts_layers_alike(job.peft_config, layers):
        return (layers,)
    return shallow_depths(job.config, fewest_layers(job), checkpointing_period(job.fields, job.memory_args))


def _books(trace_of: tuple[Job, int]) -> Books | InputError:
    job, depth = trace_of
    try:
        return traced(job.at(depth))
    except InputError as error:
        return error


def _reported(taken: tuple[Job, tuple[int, ...], list[Books | InputError]]) -> Estimate | InputError:
    job, depths, books = taken
    for found in books:
        if isinstance(found, InputError):
            return found
    by_depth = dict(zip(depths, books, strict=True))
    peaks = at_full_depth(job.config, lambda depth: by_depth[depth].peaks, depths)
    bound_by_groups(peaks, books[-1], job, depths[-1])
    return report(job, peaks, books[-1], *missing_layers(job.config, depths))


def bound_by_groups(peaks: dict[str, Peak], books: Books, job, depth: int) -> None:
    """ZeRO-3's optimizer works through groups of weights: beyond the first full group its temporaries grow no more.

    Args:
        books: of the deepest trace.
        depth: of that trace.
    """
    if job.engine != "deepspeed" or _stage(job.fields) < 3 or depth == layers_of(job.config):
        return
    rest, layer = job.elements(trained=True)
    group = _limit(job.fields, "sub_group_size") * job.world_size
    if rest + layer * layers_of(job.config) <= group:
        return
    traced_group = min(group, rest + layer * depth)
    bound = int(books.peaks["optimizer"].by_kind.get("workspace", 0) * group / traced_group)
    peak = peaks["optimizer"]
    peak.total += bound - peak.by_kind.get("workspace", 0)
    peak.by_kind["workspace"] = bound


def _limit(fields: dict[str, Any], name: str) -> float:
    value = fields["deepspeed"].get("zero_optimization", {}).get(name, 1e9)
    return 1e9 if value == "auto" else float(value)


def fewest_layers(job) -> int:
    """Layers that a shallow model of this job needs, at least."""
    if job.engine != "deepspeed":
        return FEWEST[job.engine]
    return FEWEST_IN_PARTITIONS if _stage(job.fields) < 3 else _beyond_the_limits(job)


def _beyond_the_limits(job) -> int:
    """ZeRO-3 keeps gathered weights up to a limit: where the whole model is beyond it, the shallow one must be too, as
    far as that takes no more than 16 layers (with fewer it needs too much)."""
    live = max(_limit(job.fields, f"stage3_max_{name}") for name in ("live_parameters", "reuse_distance"))
    _, layer = job.elements()
    needed = int(2 * live / layer) + 2 if layer * layers_of(job.config) > live else 0
    return max(FEWEST["deepspeed"], min(needed, _MOST_LAYERS))


def checkpointing_period(fields: dict[str, Any], memory_args=None) -> int:
    """After how many layers activation checkpointing repeats."""
    if getattr(memory_args, "checkpoint_ratio", None) is not None:
        return period_of(memory_args.checkpoint_ratio)
    kwargs = fields.get("activation_checkpointing_kwargs") or {}
    return kwargs.get("every_n_layers") or 1 if isinstance(kwargs, dict) else 1


def missing_layers(config, depths: tuple[int, ...]) -> tuple[int, int]:
    """The period of a model's layers, and how many periods the deepest of its traces lacks."""
    period = 1 if len(depths) == 1 else depths[1] - depths[0]
    return period, (layers_of(config) - depths[-1]) // period


def traced(job: TracedJob) -> Books:
    """The books of a traced job.

    Raises:
        InputError: a setting that the model or the Trainer refuses.
    """
    try:
        return trace(job)
    except InputError:
        raise
    except (
        ValueError,
        TypeError,
        ImportError,
        AssertionError,
        AttributeError,
        ArithmeticError,
        LookupError,
        RuntimeError,
    ) as error:
        if found := _SWAPPED.fullmatch(one_line(error)):
            raise InputError(
                f"deepspeed: offload_param.buffer_size={found[2]} is smaller than a process's part of a "
                f"weight, {found[1]} elements: set it to as many or more"
            ) from error
        raise InputError(f"the job cannot be traced: {one_line(error)}") from error


def report(job, peaks: dict[str, Peak], books: Books, period: int, added: int, kept_batches: int = 0) -> Estimate:
    """The answer, with what traces on the CPU cannot see added.

    Args:
        job: a Job, or what has its fields.
        peaks: at full depth.
        books: of a model with `added` × `period` layers fewer.
        kept_batches: evaluation batches, beyond those traced, whose logits wait on the device.
    """
    overheads.add_prefetched(peaks, job)
    overheads.add_kept_logits(peaks, books.kept_logits * kept_batches)
    overheads.add_save(peaks)
    overheads.add_workspace(peaks, job.device)
    segment, peak = max(peaks.items(), key=lambda item: item[1].total)
    replayed = _replayed(books, period, added, job, peak.total)
    # What was added to the trace's peak (prefetched batches, workspaces, kept logits) is reserved too.
    beside = peak.total - replayed.allocated
    reserved = {name: max(peak.total, size + beside) for name, size in replayed.reserved.items()}
    usual = reserved["expandable" if job.device.backend == "cuda" else "segments"]
    return Estimate(
        peak_allocated_bytes=peak.total,
        peak_reserved_bytes=usual,
        device_bytes=usual + overheads.context(job.device),
        host_bytes=overheads.host_bytes(peaks, job),
        phase=phase_of(segment),
        breakdown={kind: peak.by_kind.get(kind, 0) for kind in KINDS},
        phases={
            phase: max((found.total for name, found in peaks.items() if phase_of(name) == phase), default=0)
            for phase in _PHASES
        },
        capacity_bytes=job.device.memory,
        training_arguments=job.fields,
        notes=overheads.notes(job, books),
        reserved_bytes=reserved,
        timeline=replayed.timeline,
    )


def _replayed(books: Books, period: int, added: int, job, peak: int) -> Replay:
    """The job's events replayed. DeepSpeed's flat tensors grow with the model instead of becoming more, so the shallow
    model's own replay is scaled to the peak."""
    if job.engine != "deepspeed":
        return replay(books, period, added, job.device)
    shallow = replay(books, period, 0, job.device)
    scale = peak / max(1, shallow.allocated)
    return Replay(
        peak,
        {name: int(size * scale) for name, size in shallow.reserved.items()},
        tuple((segment, int(size * scale)) for segment, size in shallow.timeline),
    )


def phase_of(segment: str) -> str:
    """The phase of a segment's name."""
    phase = segment.split(":")[0]
    return "load" if phase == "start" else phase


def describe(
    model,
    args,
    seq_len,
    hardware="auto",
    peft_config=None,
    dtype="float32",
    attn_implementation=None,
    padded=False,
    quantization_config=None,
    world_size=None,
    strategy=None,
    task=None,
    kbit_preparation=False,
    memory_args=None,
    packed=False,
    video=None,
    frozen=(),
    rank=None,
) -> Job:
    """The job that estimate()'s arguments amount to, checked."""
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    if quantization_config is not None and not getattr(quantization_config, "load_in_4bit", False):
        raise InputError("quantization_config: only load_in_4bit=True of bitsandbytes is modelled")
    check_adapter(peft_config)
    config = load_config(model)
    if quantization_config is None and getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"the checkpoint is quantized already ({type(config.quantization_config).__name__}): "
            "estimate its original with quantization_config"
        )
    layers_of(config)
    if video is not None:
        seq_len = video.batch(config, 1)["input_ids"].shape[1]
        padded = True
    _check_length(config, seq_len)
    fields = fields_of(args)
    if fields.get("bf16") and fields.get("fp16"):
        raise InputError("bf16 and fp16 exclude each other: set one of them")
    world_size = world_size or (1 if isinstance(args, dict) else args.world_size)
    engine = engine_of(fields, strategy, world_size)
    if memory_args is not None:
        check_levers(memory_args, fields, engine, _stage(fields) if engine == "deepspeed" else 0, device.backend)
    mesh = mesh_of(strategy, world_size) if engine == "mesh" else None
    method = "qlora" if quantization_config is not None else "full" if peft_config is None else "lora"
    _check_combination(fields, engine, strategy, mesh, method, dtype, quantization_config)
    return Job(
        config,
        fields,
        seq_len,
        device,
        peft_config,
        quantization_config,
        dtype,
        attn_implementation,
        padded,
        world_size,
        engine,
        task or task_of(config),
        kbit_preparation,
        memory_args,
        packed,
        video,
        tuple(frozen),
        neediest_rank(fields, engine, world_size) if rank is None else rank,
        mesh,
    )


def _check_combination(fields, engine, strategy, mesh, method, dtype, quantization) -> None:
    """Refuse what would be refused before training, on whatever device: an estimate is of a job that can run."""
    running = Engine(strategy if mesh else engine)
    if engine == "deepspeed":
        running = Engine.of_deepspeed(fields["deepspeed"])
    elif engine == "fsdp2":
        running = Engine.of_fsdp(2, fsdp_checkpoints(fields))
    setup = Setup(
        **running.setup(),
        optim=fields.get("optim", "adamw_torch_fused"),
        method=method,
        precision="bf16" if fields.get("bf16") else "fp16" if fields.get("fp16") else "fp32",
        dtype=dtype,
        quant_storage=quant_storage(quantization),
        activation_checkpointing=bool(fields.get("activation_checkpointing")),
        auto_find_batch_size=bool(fields.get("auto_find_batch_size")),
        accumulates=fields["gradient_accumulation_steps"] > 1,
        compile_mode=compile_mode(fields.get),
        replicated=mesh is not None and mesh.dp_replicate_size > 1,
    )
    for refusal in refusals(setup):
        raise InputError(refusal)


def neediest_rank(fields: dict[str, Any], engine: str, world_size: int) -> int:
    """The process that needs the most. Under ZeRO-1 and 2 the last holds the gradients that backward makes first, from
    then on; otherwise all need as much as the first, to which FSDP2 gives what cannot be shared evenly."""
    return world_size - 1 if engine == "deepspeed" and _stage(fields) < 3 else 0


def _check_length(config, seq_len: int) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if seq_len < 1 or (positions and seq_len > positions):
        raise InputError(f"seq_len={seq_len} must be from 1 to the model's {positions} positions")


def fields_of(args) -> dict[str, Any]:
    """The TrainingArguments fields that were set: those that differ from their defaults.

    Raises:
        InputError: a field that TrainingArguments lacks.
    """
    from transformers import TrainingArguments

    kind = TrainingArguments if isinstance(args, dict) else type(args)
    defaults = {item.name: item.default for item in dataclasses.fields(kind) if item.init}
    if isinstance(args, dict):
        fields = dict(args)
        for name in fields.keys() - defaults.keys():
            raise choose("TrainingArguments field", name, defaults)
    else:
        fields = {name: getattr(args, name) for name in defaults if getattr(args, name) != defaults[name]}
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        if value := fields.pop(old, None):
            fields.setdefault(old.replace("gradient", "activation"), value)
    if fields.get("torch_compile_mode") or fields.get("torch_compile_backend"):
        fields["torch_compile"] = True  # as TrainingArguments set it
    for name in ("accelerator_config", "output_dir"):
        fields.pop(name, None)
    fields.setdefault("per_device_train_batch_size", 8)
    fields.setdefault("gradient_accumulation_steps", 1)
    if "optim" in fields:
        fields["optim"] = getattr(fields["optim"], "value", fields["optim"])
    if fields.get("deepspeed"):
        fields["deepspeed"] = deepspeed_config(fields["deepspeed"])
    elif not isinstance(args, dict):
        fields |= _fields_of_engine(resolve_engine(args), fields)
    return fields


def _fields_of_engine(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    """An engine that the launcher or a plugin chose, as the TrainingArguments fields that would choose it."""
    if engine.deepspeed is not None:
        return {"deepspeed": engine.deepspeed}
    if engine.fsdp_version is None:
        return {}
    config = fields.get("fsdp_config")
    config = config if isinstance(config, dict) else {}
    return {"fsdp": True, "fsdp_config": {**config, "activation_checkpointing": engine.checkpointing}}


def fields_of_trainer(trainer) -> dict[str, Any]:
    """fields_of() a Trainer's arguments, with the engine that `accelerate launch` gave it."""
    fields = fields_of(trainer.args)
    fields |= _fields_of_engine(resolve_engine(trainer.args, trainer.accelerator.state), fields)
    if trainer.accelerator.mixed_precision == "fp8":  # what is kept is what bf16 keeps
        fields["bf16"] = True
    return fields


def engine_of(fields: dict[str, Any], strategy: str | None, world_size: int) -> str:
    """none, ddp, fsdp2, mesh or deepspeed."""
    if is_mesh(strategy):
        return "mesh"
    if strategy and strategy not in _PARALLEL:
        fields["deepspeed"] = deepspeed_config(strategy)
    if fields.get("deepspeed"):
        return "deepspeed"
    if world_size == 1:
        return "none"
    if strategy == "fsdp2" or fields.get("fsdp"):
        return "fsdp2"
    return "ddp"


def traceable(fields: dict[str, Any], engine: str) -> dict[str, Any]:
    """Fields of which every one can be traced: accelerate's activation checkpointing under FSDP2 is transformers' own,
    and DeepSpeed's batch sizes follow the Trainer's, of which fewer micro-batches are traced."""
    if engine == "fsdp2" and fsdp_checkpoints(fields):
        return {
            **fields,
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
        }
    if engine != "deepspeed":
        return fields
    config = copy.deepcopy(fields["deepspeed"])
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = "auto"
    return {**fields, "deepspeed": config}


def fsdp_checkpoints(fields: dict[str, Any]) -> bool:
    """Whether accelerate is to checkpoint the activations of the layers that it shards."""
    return bool((fields.get("fsdp_config") or {}).get("activation_checkpointing"))


def _stage(fields: dict[str, Any]) -> int:
    return fields["deepspeed"].get("zero_optimization", {}).get("stage", 0)


def evaluates(fields: dict[str, Any]) -> bool:
    """Whether the job evaluates while it trains."""
    strategy = fields.get("eval_strategy", "no")
    return bool(fields.get("do_eval")) or getattr(strategy, "value", strategy) != "no"
