"""Memory that a trace on the CPU cannot see, and what the numbers do and do not cover (hardware.constants)."""

import copy
import math
from collections.abc import Iterable, Iterator
from itertools import accumulate

from hf_memopt.compatibility.rules import CUDA_GRAPHS, PACKAGES
from hf_memopt.compatibility.setup import compile_mode
from hf_memopt.estimator.accounting.ledger import BLOCK, Peak, TraceResult
from hf_memopt.estimator.patches.flex_attention import runs_flex
from hf_memopt.estimator.patches.liger import describe_liger
from hf_memopt.estimator.quantized_checkpoints import quantization_notes
from hf_memopt.estimator.tracing.tasks import EMBEDDINGS
from hf_memopt.estimator.tracing.untraced_optimizers import by_formula
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.attention_kernels import flash_attention
from hf_memopt.hardware.measured import constant, measured_on, show
from hf_memopt.levers.sliding_window import has_window
from hf_memopt.units import gib, size

# torch has a handle for each thread that multiplies (DeviceThreadHandles.h): the main thread, and autograd's, in which
# backward runs.
_BLAS_HANDLES = 2


def context(device: Hardware) -> int:
    """Bytes beside the allocator's (the driver's context, loaded kernels): what nvidia-smi shows of a process that
    has only started."""
    return int(constant("context_bytes", device).value)


def paged_bytes(peaks: dict[str, Peak]) -> int:
    """Bytes of bitsandbytes' paged optimizer states."""
    return max(peak.paged for peak in peaks.values())


def paged_on_device(size: int, peaks: dict[str, Peak], device: Hardware) -> int:
    """Bytes of paged optimizer states on a device beside a process's other bytes: bitsandbytes fills and prefetches
    them there, and the driver moves the pages for which there is no room to host memory. Where device and host share
    one memory nothing moves."""
    paged = paged_bytes(peaks)
    if device.unified_memory or device.memory is None:
        return paged
    return min(paged, max(0, device.memory - size))


def add_prefetched(peaks: dict[str, Peak], job) -> None:
    """The Trainer moves all micro-batches of a step to the device before the first; two of them were traced.
    MemoryTrainer moves one at a time, and none is there while it evaluates."""
    accumulation, alone = job.fields["gradient_accumulation_steps"], _one_at_a_time(job)
    ahead = (1 if alone else accumulation) - min(2, accumulation)
    batch = batch_bytes(job, 1 if job.device.backend == "cpu" else BLOCK)
    size = ahead * batch
    # VideoTrainer's copy of the samples that run lies where they wait: nearly all of it are pixels, which are wanted
    # until the tower has run, or has passed its gradients back.
    copied = job.video is not None and job.memory_args is not None and not job.device.discrete_memory
    sees = ("forward", "backward") if "vision" not in job.frozen else ("forward",)
    without = ("load", "start", "eval") if alone else ("load", "start")
    for name, peak in peaks.items():
        if not name.startswith(without):
            peak.grow("other", size + (batch if copied and name.startswith(sees) else 0))
    if not alone:  # the last step's are let go only when the next step's are there
        fetching = peaks["between: next batches"] = copy.deepcopy(peaks["between"])
        fetching.grow("other", accumulation * batch)
        if job.engine.plain:  # gradients are gone by then
            fetching.grow("gradients", -fetching.by_kind.get("gradients", 0))


def _one_at_a_time(job) -> bool:
    """True if a MemoryTrainer keeps the batches of a step in host memory until they run."""
    return getattr(job.memory_args, "oom_recovery", False) and job.device.discrete_memory and job.engine.plain


def batch_bytes(job, block: int = 1) -> int:
    """Bytes of one micro-batch, each tensor in whole blocks."""
    return sum(-(-math.prod(shape) * dtype.itemsize // block) * block for shape, dtype in job.batch.values())


def add_kept_logits(peaks: dict[str, Peak], size: int) -> None:
    """Logits that wait on the device until all of an evaluation's batches are done."""
    for name, peak in peaks.items():
        if size and name.startswith("eval"):
            peak.grow("logits", size)


def add_concatenation(peaks: dict[str, Peak], size: int) -> None:
    """Logits of a batch are concatenated with those that wait, which are there twice then (transformers 5.23,
    EvalLoopContainer.add).

    Args:
        size: of the result.
    """
    for name, peak in peaks.items():
        passing = peak.by_kind.get("logits", 0) + peak.by_kind.get("activations", 0)  # of a forward, which is over
        if name.startswith("eval") and passing < 2 * size:
            peak.total -= passing
            peak.by_kind |= {"logits": 0, "activations": 0}
            peak.grow("logits", 2 * size)


def _evaluated(job, logits: int) -> int:
    """Host memory of the logits of an evaluation: moved in steps, they are concatenated there, and are there twice."""
    in_steps = job.kept_batches < job.evaluated_batches
    if not (in_steps or job.device.discrete_memory):
        return 0  # numpy's arrays are torch's memory
    return logits * job.evaluated_batches * (2 if in_steps and job.concatenates_logits else 1)


def add_workspace(peaks: dict[str, Peak], device: Hardware) -> None:
    """cuBLAS keeps a workspace for each handle and stream from its first matmul on, in the caching allocator's memory.
    All engines compute on one stream; the others copy and communicate."""
    size = _BLAS_HANDLES * int(constant("workspace_bytes", device).value)
    for name, peak in peaks.items():
        if size and not name.startswith(("load", "start")):
            peak.grow("workspace", size)


def host_bytes(peaks: dict[str, Peak], job, cached: int, logits: int) -> int:
    """Host memory of one process: what engines offload, or the weights on their way to the device; batches waiting in
    the data loader (workers × prefetch factor, pinned once more); and the process itself.

    Args:
        cached: bytes that the device's allocator reserves beyond the peak, which lie in the host's memory if unified.
        logits: bytes of an evaluation batch's, where they are kept.
    """
    spare = int(constant("host_process_bytes", job.device).value)
    swapped = optimizer_buffers(job)
    # Paged states may all leave the device, and a checkpoint reads them in host memory.
    offloaded = max(peak.host for peak in peaks.values()) + swapped + paged_bytes(peaks)
    workers = job.fields.get("dataloader_num_workers", 0)
    waiting = workers * (job.fields.get("dataloader_prefetch_factor") or 2) + 1
    fetched = job.fields["gradient_accumulation_steps"] if _one_at_a_time(job) else 0
    evaluated = _evaluated(job, logits)
    loader = evaluated + (waiting + fetched + bool(job.fields.get("dataloader_pin_memory", True))) * batch_bytes(job)
    if not job.device.discrete_memory:
        return max(peak.total + peak.host for peak in peaks.values()) + cached + swapped + loader + spare
    staged = 0 if job.quantization_config is not None else peaks["load"].by_kind.get("parameters", 0)
    return max(offloaded, staged) + loader + spare


def describe_sample(job) -> str:
    """The content of a sample of a job with videos, in words."""
    video = job.video
    return f"a sample: {video.summary(job.config)}, {video.prompt_tokens + video.answer_tokens} of text"


def notes(job, trace: TraceResult, peaks: dict[str, Peak], otherwise: int) -> Iterator[str]:
    """Sentences on what the numbers do and do not cover.

    Args:
        otherwise: bytes that the allocator reserves beyond the estimate's with the other kind of segments.
    """
    if job.positions and job.seq_len > job.positions:
        yield (
            f"{job.seq_len} tokens are more than the {job.positions} positions of the model's configuration: their "
            "memory is counted; how well the model uses them, its scaling of positions decides"
        )
    optim = job.fields.get("optim", "")
    if by_formula(optim):
        yield f"optim={optim} is counted by formula, from the source of {PACKAGES[optim]}"
    if paged := paged_bytes(peaks):
        yield (
            f"{gib(paged)} of paged optimizer states are CUDA managed memory, which torch does not count: they are in "
            "device bytes as far as there is room for them, and in host bytes"
        )
        if job.device.backend == "rocm":
            # bitsandbytes 0.50.2, functional.get_paged: its ROCm library has cget_managed_ptr (hipMallocManaged), too.
            yield "whether paged states leave the device is not known on ROCm: it takes a kernel with XNACK"
    if job.world_size > 1:
        yield f"predicted for one of {job.world_size} devices, {job.engine.label}"
    if job.engine.fsdp_version == 1:
        yield (
            "FSDP1 is counted as FSDP2, which shards each weight: FSDP1 needs more where a unit holds frozen weights"
        )
    if job.engine.fsdp_version and job.fields.get("activation_checkpointing"):
        yield (
            "the Trainer checkpoints activations: accelerate's file has to say fsdp_activation_checkpointing: false, "
            "or leave it to FSDP and activation_checkpointing out"
        )
    if job.device.backend != "cpu":
        yield from measured_memory(job.device, job.expandable)
    if otherwise and job.device.backend == "cuda":
        kind = "ordinary segments" if job.expandable else "PYTORCH_ALLOC_CONF=expandable_segments:True, not set here,"
        yield f"{kind} would reserve {size(abs(otherwise))} {'more' if otherwise > 0 else 'less'}"
    if trace.unquantized_experts:
        yield "the experts stay in 16 bits: only linear layers are quantized, and they are one tensor a layer"
    yield from quantization_notes(job)
    video = job.video
    if video is not None and video.sample is None and video.packed is None:
        yield describe_sample(job)
        if not video.settings:
            yield "the model's processor could not be asked: they are scaled as its family does by default"
    elif job.task == "image-text-to-text" and video is None:
        yield (
            "text only: images come with --set images=N --set image_size=WIDTHxHEIGHT, videos with max_frames and "
            "frame_size"
        )
    elif job.task == EMBEDDINGS:
        yield (
            f"a sample is a pair of texts of {job.seq_len} tokens, with the other pairs of its micro-batch as "
            "negatives; `hf-memopt dry-run` counts a script's own loss, cached ones (GradCache) too"
        )
    yield from _of_attention(job)
    if job.fields.get("torch_compile"):
        yield "traced without torch_compile, which usually needs less"
    if job.fields.get("use_liger_kernel"):
        yield describe_liger(job.config.model_type)
    if job.fuses_head and job.runs_triton:
        yield (
            "TRL's fused head is counted as its Triton kernels allocate, for as many labeled tokens as the longest "
            "batch has; not measured on a GPU"
        )
    device = job.device
    if device.backend == "rocm" and device.unified_memory and 2 * device.memory <= device.nominal_memory:
        yield (
            "Linux lends this GPU half of the machine's memory; where ttm.pages_limit lends more, describe it: "
            'hardware={"backend": "rocm", "memory": "… GiB"}'
        )
    if job.fields.get("activation_offloading"):
        yield (
            "activation_offloading: TRL's own hooks are traced; blocks that their stream of copies caches are not "
            "counted; not measured on a GPU"
        )
    if (mode := compile_mode(job.fields.get)) in CUDA_GRAPHS and job.device.backend in ("cuda", "rocm"):
        yield (
            f"torch_compile_mode={mode} records CUDA graphs for every shape of a batch; the memory that they "
            "keep is not counted"
        )


def _of_attention(job) -> Iterator[str]:
    """The stand-ins for attention that cannot run here: flash and flex attention, and patterns."""
    for name in sorted(set(filter(None, map(flash_attention, job.attention)))):
        packed = "; a packed row counts as one sequence" if job.packed or getattr(job.video, "packed", None) else ""
        yield f"{name} is counted as its source says; not measured on a GPU{packed}"
    if "flex_attention" in job.attention:
        yield "flex_attention is counted as its source says; not measured on a GPU"
    if getattr(job.memory_args, "sparse_block_size", None) is not None:
        name = "sparse_block_size"
    elif getattr(job.memory_args, "sliding_window", None) is None or has_window(type(job.config.get_text_config())):
        return
    else:
        name = "sliding_window"
    if runs_flex(job.device):
        yield f"{name} is counted as flex attention, as its source says; not measured on a GPU"
    else:
        yield f"{name} is sdpa with a mask of tokens × tokens here, which takes more than causal sdpa without one"


# Of reserved bytes, by benchmarks/results/gpu; tests/benchmarks/test_gpu_results.py compares.
CHECKED = "13 jobs on an H100 and an H200 were -3.1% to +1.4% off"


def measured_memory(device: Hardware, expandable: bool) -> Iterator[str]:
    """The parts of a device's bytes that were measured on it.

    Args:
        expandable: the job sets expandable segments where the device has them.
    """
    if device.backend == "mps":
        model = "reserved and device bytes follow a model of MPS's allocator, whose heaps are up to 1 GiB large"
    else:
        kind = "expandable segments" if expandable and device.backend == "cuda" else "ordinary segments"
        model = f"reserved and device bytes follow a model of CUDA's caching allocator, with {kind}"
    file = measured_on(device)
    if file is None:
        yield f"{model}; {CHECKED if model.endswith('expandable segments') else 'not checked on a GPU yet'}"
        return
    names = [name for name in ("context_bytes", "workspace_bytes") if name in file.constants]
    if names:
        yield f"{', '.join(show(name, file.constants[name]) for name in names)}: {file.source}"
    if errors := file.reserved_errors:
        jobs = f"{len(errors)} job{'s' * (len(errors) > 1)}"
        yield f"{model}: of {jobs} on this device it was {min(errors):+.1%} to {max(errors):+.1%} off"
    else:
        yield f"{model}; not checked on this device yet"


_COUNT = 4  # buffer_count, by default (deepspeed.runtime.zero.offload_config)


def optimizer_buffers(job) -> int:
    """Bytes of one process's buffers, in fp32, from the sizes of the whole model's weights: they do not grow linearly
    with the number of layers (deepspeed 0.19: swap_tensor.utils.SwapBufferManager, stage3._create_fp16_sub_groups).
    """
    zero = (job.fields.get("deepspeed") or {}).get("zero_optimization") or {}
    states = zero.get("offload_optimizer") or {}
    if states.get("device") != "nvme":
        return 0
    parts = [-(-size // job.world_size) for size in job.trained_sizes()]
    return states.get("buffer_count", _COUNT) * 4 * largest_group(parts, int(zero.get("sub_group_size", 1e9)))


def largest_group(parts: Iterable[int], limit: int) -> int:
    """Elements of the largest group; a group ends with the weight that reaches the limit."""
    return max(accumulate(parts, lambda group, part: part if group >= limit else group + part))
