"""Buffers through which DeepSpeed's optimizer states go to a disk and back: as large as its largest group of
weights."""

from collections.abc import Iterable
from itertools import accumulate

_COUNT = 4  # buffer_count, by default (deepspeed.runtime.zero.offload_config)


def optimizer_buffers(job) -> int:
    """Bytes of one process's buffers, in fp32; a shallow model's do not grow to the deep one's along a line.

    (deepspeed.runtime.swap_tensor.utils.SwapBufferManager; groups: stage3.py, _create_fp16_sub_groups.)
    """
    zero = (job.fields.get("deepspeed") or {}).get("zero_optimization") or {}
    states = zero.get("offload_optimizer") or {}
    if states.get("device") != "nvme":
        return 0
    parts = [-(-size // job.world_size) for size in job.trained_sizes()]
    return states.get("buffer_count", _COUNT) * 4 * largest_group(parts, int(zero.get("sub_group_size", 1e9)))


def largest_group(parts: Iterable[int], limit: int) -> int:
    """Elements of the largest group, each of which is closed by the weight that fills it."""

    def joined(group: int, part: int) -> int:
        return part if group >= limit else group + part

    return max(accumulate(parts, joined))
