"""Is this failure about memory, about whose memory, and would a smaller micro-batch help?

The table holds messages as libraries print them (torch's allocators, CUDA, cuBLAS, cuDNN, NCCL, HIP, XPU, Metal,
bitsandbytes, DeepSpeed, numpy, the kernel). accelerate 1.15's should_reduce_batch_size recognizes five of the
seventeen messages that were collected from them.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

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


# (kind, whether a smaller micro-batch helps, patterns, cause). The first match wins. Rows that a smaller batch does
# not help come first, since their messages often contain those of more general rows. `A … B` in a pattern means A, and
# B later on the same line. tests/test_oom.py has a real message for each.
_TABLE = [
    (
        OomKind.NOT_MEMORY,
        False,
        [r"out of resources?: shared memory", r"OutOfResources … shared memory"],
        "a Triton kernel asks for more shared memory than this card has, whatever the batch: use another attention "
        "implementation or a kernel of smaller blocks",
    ),
    (
        OomKind.HOST,
        False,
        [r"DataLoader worker \(pid … (killed by signal|exited unexpectedly)"],
        "the system killed a data loading worker, for host memory or /dev/shm: set dataloader_num_workers or "
        "dataloader_prefetch_factor lower",
    ),
    (
        OomKind.HOST,
        False,
        [r"in DataLoader worker process … (MemoryError|can't allocate memory|Cannot allocate memory)"],
        "a data loading worker found no host memory: set dataloader_num_workers or dataloader_prefetch_factor lower",
    ),
    (
        OomKind.HOST,
        False,
        [r"Signals\.SIGKILL|exitcode\s{0,9}: -9\b|Signal 9 \(SIGKILL\)"],
        "the system killed a process, nearly always for host memory: load and offload less (hf-memopt estimate says "
        "what host memory a job takes)",
    ),
    (
        OomKind.COMMUNICATION,
        False,
        [r"(NCCL|RCCL|nccl\w{0,40}Error|rccl\w{0,40}Error|Cuda failure|Hip failure) … out of memory"],
        "the communication library found no device memory for its buffers: leave more free (a lower "
        "target_memory_utilization), or set NCCL_BUFFSIZE lower",
    ),
    (
        OomKind.HOST,
        False,
        [
            r"OS call failed or operation not supported on this OS|page-locked|posix_memalign",
            r"cu(da|)?(MemHostAlloc|HostAlloc|HostRegister)",
            r"pin(ned)?[ _]memory … (fail|out of memory|cannot)",
        ],
        "pinned host memory could not be had: raise the memlock limit, or set pin_memory false",
    ),
    (
        OomKind.LIBRARY_WORKSPACE,
        True,
        [
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_"
            r"(ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|CUDNN_STATUS_NOT_SUPPORTED"
        ],
        "a math library found no device memory for its workspace",
    ),
    (
        OomKind.HOST,
        True,
        [
            r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|"
            r"Cannot allocate memory|Unable to allocate [\d.]{1,30} .iB for an array"
        ],
        "host memory ran out",
    ),
    (
        OomKind.DEVICE,
        True,
        [
            r"(CUDA|HIP|XPU|NPU|MPS backend|MLU|MUSA|HPU) out of memory|"
            r"(CUDA|HIP|CUDA driver) error: out of memory|(cuda|hip)ErrorMemoryAllocation|hipErrorOutOfMemory|"
            r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY|UR_RESULT_ERROR_OUT_OF_RESOURCES|Invalid buffer size: |"
            r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Error out of memory at line \d"
        ],
        "device memory ran out",
    ),
]
# Every message that the table matches has one of these, in lower case. Searching for a fixed string is a hundred times
# faster than the patterns, and nearly all lines of a log have none.
_HINTS = (
    "memory",
    "outofresources",
    "out of resource",
    "dataloader worker",
    "sigkill",
    "exitcode",
    "os call failed",
    "page-locked",
    "posix_memalign",
    "hostalloc",
    "hostregister",
    "_status_",
    "bad_alloc",
    "unable to allocate",
    "ur_result_error",
    "invalid buffer size",
)
_GAP = " … "


def classify_oom(error: BaseException) -> OomKind:
    """Diagnose whose memory ran out, from an exception or one in its chain of causes."""
    return diagnose(error).kind


def diagnose(error: BaseException) -> Diagnosis:
    """The diagnosis of an exception, or of the first in its chain of causes that is in the table."""
    for link in chain(error):
        diagnosis = _diagnose_one(link)
        if diagnosis.cause:
            return diagnosis
    return Diagnosis(OomKind.NOT_MEMORY, False, "", one_line(error))


def diagnose_text(text: str) -> Diagnosis:
    """The diagnosis of the last failure in a log or a pasted error; needs no torch."""
    for line in reversed(text.splitlines()):
        if not any(hint in line.lower() for hint in _HINTS):
            continue
        if row := _find_row(line):
            kind, helps, cause = row
            return Diagnosis(kind, helps, cause, " ".join(line.split()))
        if re.match(r"\s*(\w+\.)*MemoryError\b", line):
            return Diagnosis(OomKind.HOST, True, "host memory ran out", " ".join(line.split()))
    return Diagnosis(OomKind.NOT_MEMORY, False, "", "")


def _find_row(line: str) -> tuple[OomKind, bool, str] | None:
    """Kind, whether a smaller batch helps, and cause, from the first row that matches a line."""
    for kind, helps, patterns, cause in _TABLE:
        if any(_matches(pattern, line) for pattern in patterns):
            return kind, helps, cause
    return None


def _matches(pattern: str, line: str) -> bool:
    """True if a line has the pattern, in linear time: `A.*B` would try every B after every A, a minute on 300 KB."""
    first, gap, second = pattern.partition(_GAP)
    match = re.search(first, line, re.IGNORECASE)
    return bool(match and (not gap or re.compile(second, re.IGNORECASE).search(line, match.end())))


def _diagnose_one(error: BaseException) -> Diagnosis:
    import torch

    text = one_line(error)
    if isinstance(error, RuntimeError | MemoryError | OSError) and (row := _find_row(text)):
        kind, helps, cause = row
        return Diagnosis(kind, helps, cause, text)
    if isinstance(error, torch.OutOfMemoryError):
        return Diagnosis(OomKind.DEVICE, True, "device memory ran out", text)
    if isinstance(error, MemoryError):
        return Diagnosis(OomKind.HOST, True, "host memory ran out", text)
    return Diagnosis(OomKind.NOT_MEMORY, False, "", text)


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
