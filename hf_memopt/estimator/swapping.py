"""Buffers through which DeepSpeed swaps optimizer states to a disk: as large as its largest group of weights."""

from collections.abc import Iterable
from itertools import accumulate

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

    def extend(group: int, part: int) -> int:
        return part if group >= limit else group + part

    return max(accumulate(parts, extend))
