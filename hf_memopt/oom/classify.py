"""Is this failure about memory, about whose memory, and would a smaller micro-batch help?

The table holds messages as libraries print them (torch's allocators, CUDA, cuBLAS, cuDNN, NCCL, HIP, XPU, Metal,
bitsandbytes, DeepSpeed, vLLM, numpy, the kernel, schedulers). accelerate 1.15's should_reduce_batch_size recognizes
five of the seventeen messages that were collected from those that Python code raises.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hf_memopt.errors import chain, one_line


class OomKind(StrEnum):
    """The owner of the memory that ran out."""

    DEVICE = "device"
    LIBRARY_WORKSPACE = "library workspace"
    HOST = "host"
    COMMUNICATION = "communication"
    NOT_MEMORY = "not memory"


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of an exception or a log about memory.

    Attributes:
        kind: whose memory.
        smaller_batch_helps: whether the step may fit in smaller chunks.
        cause: one sentence; "" where the failure has nothing to do with memory or resources.
        message: the exception's text, on one line.
    """

    kind: OomKind
    smaller_batch_helps: bool
    cause: str
    message: str

    def helps_on(self, device) -> bool:
        """True if a smaller batch helps on a torch.device: host memory holds activations only on a CPU."""
        return self.smaller_batch_helps and (self.kind is not OomKind.HOST or device.type == "cpu")


class Row(NamedTuple):
    """A failure as libraries print it.

    Attributes:
        kind: whose memory.
        smaller_batch_helps: whether a smaller micro-batch helps.
        cause: a sentence; where the fix is no setting of the job, then ": " and changes, with "; " between them.
        patterns: `A … B` means A, and B later on the same line.
        indirect: it says that a process was ended, which a launcher also does after another failure, or that a call
            failed, for which there are other reasons.
        stage: when it happens, whatever the frames are; None where they tell.
    """

    kind: OomKind
    smaller_batch_helps: bool
    cause: str
    patterns: tuple[str, ...]
    indirect: bool = False
    stage: str | None = None


KILLED = "the system killed a process, nearly always for host memory"
NO_PINNED_MEMORY = "pinned host memory could not be had"
_VLLM = "vLLM found too little device memory for its KV cache"
# The first match wins. Rows that a smaller batch does not help come first, since their messages often contain those of
# more general rows. tests/oom/test_oom.py and tests/logs have a real message for each.
_TABLE = [
    Row(
        OomKind.NOT_MEMORY,
        False,
        "a Triton kernel asks for more shared memory than this card has, whatever the batch: use another attention "
        "implementation or a kernel of smaller blocks",
        (r"out of resources?: shared memory", r"OutOfResources … shared memory"),
    ),
    Row(
        OomKind.HOST,
        False,
        "/dev/shm, through which data loading workers send batches, is full: raise it (docker run --shm-size=16g or "
        "--ipc=host, on Kubernetes an emptyDir with medium: Memory); set dataloader_num_workers or "
        "dataloader_prefetch_factor lower",
        (
            r"DataLoader worker \(pid … Bus error",
            r"bus error encountered in worker|insufficient shared memory \(shm\)",
            r"No space left on device … /dev/shm",
            r"/dev/shm … No space left on device",
            r"unable to (open|write to|resize|allocate|mmap) … (shared memory|</torch_)",
        ),
    ),
    Row(
        OomKind.HOST,
        False,
        "the system killed a data loading worker, for host memory or /dev/shm: set dataloader_num_workers or "
        "dataloader_prefetch_factor lower",
        (r"DataLoader worker \(pid … (killed by signal: Killed|exited unexpectedly)",),
    ),
    Row(
        OomKind.HOST,
        False,
        "a data loading worker found no host memory: set dataloader_num_workers or dataloader_prefetch_factor lower",
        (r"in DataLoader worker process … (MemoryError|can't allocate memory|Cannot allocate memory)",),
    ),
    Row(
        OomKind.HOST,
        False,
        "a process of datasets.map ended, nearly always for host memory: set num_proc (dataset_num_proc) lower; set "
        "batch_size and writer_batch_size of map() lower",
        (r"subprocesses has abruptly died during map operation",),
    ),
    Row(
        OomKind.HOST,
        False,
        f"{KILLED} (its limit is the machine's, the container's or the scheduler's)",
        (
            r"\boom[-_]kill(ed)? event|\boom-kill:|oom_reaper: reaped|invoked oom-killer|\bOOM ?Killed\b",
            r"Out of memory: Kill(ed)? process|cgroup out[ -]of[ -]memory",
            r"srun: error: … Out Of Memory",
            r"exceeded (job |step )?memory limit|job killed: \w{0,9}mem",
            r"TERM_MEMLIMIT|\bOUT_OF_ME(MORY|\+)|the node running low on memory",
        ),
    ),
    Row(
        OomKind.HOST,
        False,
        KILLED,
        (
            r"died with <Signals\.SIGKILL|Signal 9 \(SIGKILL\)|interrupted by signal 9\b|signal SIGKILL\b",
            r"task \d{1,6}: Killed$",
            r"exit ?code\s{0,9}[:=]?\s{0,9}(-9|137)\b|(return(ed)?|exit(ed)?)[ -](return[ -])?(code|status|with code)?"
            r"[\s:=(]{0,4}(-9|137)\b|non-zero exit status (-9|137)\b",
            # A shell's report of its child; bash names script and line, zsh the job.
            r"(^|[\]>])\s{0,9}killed$|(: line \d{1,7}:|^\[\d{1,4}\]\s{0,4}[-+]?)\s{0,9}\d{1,9}\s{1,9}killed\b",
            r"^\d{1,9} Killed\s",
        ),
        indirect=True,
    ),
    Row(
        OomKind.COMMUNICATION,
        False,
        "the communication library found no device memory for its buffers: leave more free (a lower "
        "target_memory_utilization), or set NCCL_BUFFSIZE lower",
        (r"(NCCL|RCCL|nccl\w{0,40}Error|rccl\w{0,40}Error|Cuda failure|Hip failure) … out of memory",),
    ),
    Row(
        OomKind.HOST,
        False,
        f"{NO_PINNED_MEMORY}: raise the memlock limit, or set pin_memory false",
        (
            r"OS call failed or operation not supported on this OS|page-locked|posix_memalign",
            r"cu(da|)?(MemHostAlloc|HostAlloc|HostRegister)",
            r"pin(ned)?[ _]memory … (fail|out of memory|cannot allocate)",
        ),
    ),
    Row(
        OomKind.DEVICE,
        False,
        'the quantized weights do not fit the device memory that is free: device_map={"": 0}, since "auto" leaves '
        "a margin; end other processes on the device; a smaller model",
        (r"Some modules are dispatched on the CPU or the disk",),
        stage="load",
    ),
    Row(
        OomKind.DEVICE,
        False,
        "device memory ran out",
        (r"Failed to clone\(\) tensor … out of memory",),  # FSDP1's warning, with its own error and no frames
        stage="save",
    ),
    Row(
        OomKind.DEVICE,
        False,
        f"{_VLLM}: raise vllm_gpu_memory_utilization; set vllm_max_model_length lower; shard vLLM over more devices "
        "(vllm_tensor_parallel_size)",
        (
            r"No available memory for the cache blocks",
            r"larger than the (maximum number of tokens that can be stored in|available) KV cache",
        ),
        stage="generate",
    ),
    Row(
        OomKind.DEVICE,
        False,
        "vLLM finds less device memory free than it may take: set vllm_gpu_memory_utilization lower; end other "
        "processes on the device; vllm_enable_sleep_mode=true, where it shares the device with training",
        (r"Free memory on device … less than desired GPU memory utilization",),
        stage="generate",
    ),
    Row(
        OomKind.LIBRARY_WORKSPACE,
        True,
        "a math library found no device memory for its workspace",
        (
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_"
            r"(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)",
        ),
    ),
    Row(
        OomKind.LIBRARY_WORKSPACE,
        True,
        "a math library found no device memory for its workspace",
        (
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_NOT_INITIALIZED|"
            r"CUDNN_STATUS_NOT_SUPPORTED",
        ),
        indirect=True,
    ),
    Row(
        OomKind.HOST,
        True,
        "host memory ran out",
        (
            r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|ArrowMemoryError|"
            # A thread-local block of a shared library is too small, whatever memory there is.
            r"Cannot allocate memory(?! in static TLS)|Unable to allocate [\d.]{1,30} .iB for an array|"
            r"paging file is too small|os error 1455|WinError 1455",
        ),
    ),
    Row(
        OomKind.DEVICE,
        True,
        "device memory ran out",
        (
            r"(CUDA|HIP|XPU|NPU|MPS backend|MLU|MUSA|HPU) out of memory|(CUDA|HIP|CUDA driver) error: out of memory|"
            r"(cuda|hip)ErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|"
            r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY|UR_RESULT_ERROR_OUT_OF_RESOURCES|Invalid buffer size: |"
            r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Error out of memory at line \d|"
            r"cuda runtime err(or)? ?\(2\)|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor",
        ),
    ),
    Row(
        OomKind.DEVICE,
        True,
        "device memory ran out (torch could not ask NVML whose it is, as on a MIG slice)",
        # pytorch/pytorch#112377: the allocator asks only when it is about to report an OOM.
        (r"NVML_SUCCESS == … INTERNAL ASSERT FAILED",),
    ),
]
# Every message that the table matches has one of these, in lower case. Searching for a fixed string is a hundred times
# faster than the patterns, and nearly all lines of a log have none.
_HINTS = (
    *("memory", "memlimit", "outofresources", "out of resource", "dataloader worker", "bus error", "kill", "/dev/shm"),
    *("exitcode", "exit code", "return", "exit", "signal 9", "os call failed", "page-locked", "posix_memalign"),
    *("hostalloc", "hostregister", "_status_", "bad_alloc", "unable to allocate", "ur_result_error", "1455"),
    *("invalid buffer size", "abruptly died", "some modules are dispatched", "kv cache", "cuda runtime err"),
    *("paging file", "out_of_me", "nvml_success", "oom", "</torch_"),
)
_HOST_MEMORY = next(row for row in _TABLE if row.cause == "host memory ran out")
_GAP = " … "


def classify_oom(error: BaseException) -> OomKind:
    """Diagnose whose memory ran out, from an exception or one in its chain of causes."""
    return diagnose(error).kind


def diagnose(error: BaseException) -> Diagnosis:
    """The diagnosis of an exception, or of the first in its chain of causes that is in the table."""
    import torch

    for link in chain(error):
        text = one_line(link)
        if isinstance(link, RuntimeError | MemoryError | OSError) and (row := _find_row(text)):
            return diagnosed(row, text)
        if isinstance(link, torch.OutOfMemoryError):
            return Diagnosis(OomKind.DEVICE, True, "device memory ran out", text)
        if isinstance(link, MemoryError):
            return Diagnosis(OomKind.HOST, True, "host memory ran out", text)
    return Diagnosis(OomKind.NOT_MEMORY, False, "", one_line(error))


def diagnose_text(text: str) -> Diagnosis:
    """The diagnosis of the last failure in a message; needs no torch."""
    for line in reversed(text.splitlines()):
        if row := find_row(line):
            return diagnosed(row, line)
    return Diagnosis(OomKind.NOT_MEMORY, False, "", "")


def diagnosed(row: Row, line: str) -> Diagnosis:
    """The diagnosis that a row is of a line."""
    return Diagnosis(row.kind, row.smaller_batch_helps, row.cause, " ".join(line.split()))


def find_row(line: str) -> Row | None:
    """The first row that matches a line of a log."""
    lowered = line.lower()
    if not any(hint in lowered for hint in _HINTS):
        return None
    if row := _find_row(line):
        return row
    return _HOST_MEMORY if re.match(r"\s*(\w{1,60}\.){0,9}_?(Array)?MemoryError\b", line) else None


def _find_row(line: str) -> Row | None:
    return next((row for row in _TABLE if any(_matches(pattern, line) for pattern in row.patterns)), None)


def _matches(pattern: str, line: str) -> bool:
    """True if a line has the pattern, in linear time: `A.*B` would try every B after every A, a minute on 300 KB."""
    first, gap, second = pattern.partition(_GAP)
    match = re.search(first, line, re.IGNORECASE)
    return bool(match and (not gap or re.compile(second, re.IGNORECASE).search(line, match.end())))


def free_memory() -> None:
    """Collect Python's reference cycles, then empty the allocator's cache."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()
