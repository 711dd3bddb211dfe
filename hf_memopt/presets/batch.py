"""The effective batch as the invariant: micro-batch × accumulation × world size."""

from math import isqrt

from hf_memopt.errors import InputError

# Samples of a step that plans and comparisons of cards are for unless the user says more: the batch belongs to the
# training, so that two cards answer the same question. Presets keep their own.
EFFECTIVE_BATCH = 32


def batch_settings(
    effective: int, preferred: int, world_size: int, micro: int | None = None, accumulation: int | None = None
) -> tuple[int, int]:
    """Micro-batch and accumulation whose product with the world size is the effective batch.

    Args:
        effective: samples per optimizer step over all processes.
        preferred: the micro-batch to use if the user set none; the next smaller divisor where it does not divide.
        world_size: number of processes.
        micro, accumulation: the user's. Both together define the effective batch.

    Raises:
        InputError: no whole numbers give the effective batch.
    """
    if effective < 1:
        raise InputError(f"effective_batch_size={effective} must be at least 1")
    for name, value in (("per_device_train_batch_size", micro), ("gradient_accumulation_steps", accumulation)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    if micro and accumulation:
        return micro, accumulation
    if effective % world_size:
        raise InputError(
            f"an effective batch of {effective} cannot be split over {world_size} processes; set "
            f"effective_batch_size={world_size * max(1, round(effective / world_size))} or another number of processes"
        )
    share = effective // world_size
    if fixed := micro or accumulation:
        if share % fixed:
            name = "per_device_train_batch_size" if micro else "gradient_accumulation_steps"
            # Divisors are found up to the square root: a batch may have billions of samples.
            low = [n for n in range(1, isqrt(share) + 1) if share % n == 0]
            divisors = ", ".join(map(str, sorted({*low, *(share // n for n in low)})))
            raise InputError(
                f"{name}={fixed} does not divide the {share} samples per process of the effective batch {effective}; "
                f"use one of {divisors}, or set effective_batch_size too"
            )
        return (micro, share // micro) if micro else (share // accumulation, accumulation)
    micro = max(n for n in range(1, min(preferred, share) + 1) if share % n == 0)
    return micro, share // micro
