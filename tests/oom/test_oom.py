"""The table of failures: messages as the libraries print them, collected from public reports, not provoked here."""

import torch

from hf_memopt import classify_oom
from hf_memopt.oom.classify import OomKind, diagnose

NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)
ASYNC = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/"
MPS = "MPS backend out of memory (MPS allocated: 33.48 GB, other allocations: 2.45 GB, max allowed: 36.27 GB)."
XPU = "XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.91 GiB."
CPU = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"
)
WORKER = "DataLoader worker (pid 21196) is killed by signal: Killed."
PINNED = "CUDA error: OS call failed or operation not supported on this OS"
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
TABLE = [
    (torch.OutOfMemoryError(CUDA), "device", True),
    (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."), "device", True),
    (torch.OutOfMemoryError(XPU), "device", True),
    (torch.AcceleratorError(ASYNC), "device", True),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), "device", True),
    (RuntimeError("HIP error: out of memory"), "device", True),
    (RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), "device", True),
    (RuntimeError(MPS), "device", True),
    (RuntimeError("Invalid buffer size: 30.00 GiB"), "device", True),
    (RuntimeError("Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"), "device", True),
    (RuntimeError("Caught OutOfMemoryError in replica 0 on device 0. CUDA out of memory."), "device", True),
    (RuntimeError("train.py FAILED\n  exitcode  : -9 (pid: 4242)"), "host", False),
    (RuntimeError("Command died with <Signals.SIGKILL: 9>."), "host", False),
    (RuntimeError(CUBLAS), "library workspace", True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "library workspace", True),
    (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling hipblasCreate"), "library workspace", True),
    (torch.distributed.DistBackendError(NCCL), "communication", False),
    (RuntimeError(PINNED), "host", False),
    (RuntimeError("cudaHostAlloc failed: unable to get 2 GiB"), "host", False),
    (RuntimeError(CPU), "host", True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory"), "host", True),
    (RuntimeError("std::bad_alloc"), "host", True),
    (MemoryError("Unable to allocate"), "host", True),
    (OSError(12, "Cannot allocate memory"), "host", True),
    (RuntimeError(WORKER), "host", False),
    (MemoryError("Caught MemoryError in DataLoader worker process 0. MemoryError"), "host", False),
    (RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."), "not memory", False),
    (ValueError("too many values to unpack"), "not memory", False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "not memory", False),
    (KeyError("out of memory"), "not memory", False),
]


def test_known_messages(subtests):
    for error, kind, helps in TABLE:
        with subtests.test(error=error, kind=kind, helps=helps):
            assert classify_oom(error) == kind
            assert diagnose(error).smaller_batch_helps is helps


def test_causes_are_followed():
    def chained(explicit: bool):
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except RuntimeError as error:
                if explicit:
                    raise ValueError("the loss failed") from error
                raise ValueError("the loss failed") from None
        except ValueError as error:
            return error

    assert classify_oom(chained(True)) is OomKind.DEVICE
    assert classify_oom(chained(False)) is OomKind.NOT_MEMORY, "the author said that it is not the cause"
    group = ExceptionGroup("several", [ValueError("x"), RuntimeError("CUDA error: out of memory")])
    assert classify_oom(group) is OomKind.DEVICE


def test_resources_that_are_not_memory_have_a_name():
    assert "Triton" in diagnose(RuntimeError("out of resource: shared memory, Required: 1")).cause
    assert "dataloader_num_workers" in diagnose(RuntimeError(WORKER)).cause
    assert diagnose(ValueError("x")).cause == ""
