"""Why memory ran out, and what helps: from when it did, and what the message says."""

import re

from hf_memopt.monitor.growth import ADVICE
from hf_memopt.oom.classify import Diagnosis, OomKind
from hf_memopt.units import GIB, gib

_SIZE = r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|GB|MB)"  # bounded: a long row of digits costs linear time
_FIGURES = {
    "asked_bytes": rf"[Tt]r(?:ied|ying) to allocate {_SIZE}",
    "capacity_bytes": rf"total capacity of {_SIZE}|{_SIZE} total capacity",
    "free_bytes": rf"of which {_SIZE} is free|; {_SIZE} free",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "unused_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "others_bytes": rf"Process \d{{1,12}} has {_SIZE} memory in use",
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}

# Where it happened -> why, and what helps, the most effective first. Words are Hugging Face's.
_BY_STAGE = {
    "load": (
        "the weights alone do not fit",
        [
            "--method qlora: weights in 4 bits",
            "strategy zero3 or fsdp2 on several cards: each holds its part",
            "dtype=bfloat16, or a smaller model",
        ],
    ),
    "optimizer": (
        "the optimizer makes its states in its first step, beside weights and gradients",
        [
            "optim=adamw_8bit: 2 bytes a weight instead of 8",
            "--method lora: states of the adapters alone",
            "optimizer_cpu_offload=true (one card), or strategy zero2 on several",
        ],
    ),
    "eval": (
        "evaluation batches are larger than training's, or their logits are kept until metrics are computed",
        [
            "per_device_eval_batch_size=1",
            "MemoryTrainer: evaluation halves its own batch",
            "reduce_eval_logits=true: MemoryTrainer keeps tokens instead of logits",
            "eval_accumulation_steps=1, or prediction_loss_only=true",
        ],
    ),
    "save": (
        "saving gathers on one device what training had spread out",
        [
            "fsdp_state_dict_type: SHARDED_STATE_DICT, or stage3_gather_16bit_weights_on_model_save: false",
            "save_only_model=true",
            "MemoryTrainer: it saves tensor by tensor where memory is short",
        ],
    ),
    "resume": (
        "a checkpoint's optimizer states were loaded onto the device beside the new ones",
        [
            "MemoryTrainer: it loads them through host memory",
            "optim=adamw_8bit",
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ],
    ),
    "step": (
        "activations and logits of a micro-batch do not fit beside weights, gradients and states",
        [
            "activation_checkpointing=true, activation_checkpointing_kwargs={use_reentrant: false}",
            "loss_chunk_size=1024: logits of so many tokens at once",
            "half the per_device_train_batch_size, twice the gradient_accumulation_steps",
        ],
    ),
}
_LATER = (
    "it fitted for {step} steps, so a longer batch than before came, tensors are kept from step to step (losses "
    "stored without item()), or memory was cut up into pieces"
)
_LONGER = "it fitted for {step} steps, and this batch is larger than all before it: memory is as the data are"
_INTERMITTENT = (
    "it fitted for {step} steps, larger batches among them: memory was cut up into pieces, another process took some, "
    "or tensors are kept from step to step (losses stored without item())"
)
LATER_CHANGES = [
    "probe_worst_batch=true: the largest batch is tried before step 0",
    "MemoryTrainer: a batch that does not fit runs in pieces, and growth is named",
    "PYTORCH_ALLOC_CONF=expandable_segments:True",
]
_FRAGMENTED = (
    "the allocator holds {unused} that no tensor is in: memory is cut up into pieces",
    [
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "train_sampling_strategy=group_by_length: batches of few lengths",
        "torch_empty_cache_steps=50",
    ],
)
_OTHERS = (
    "other processes hold {others} of the device",
    [
        "end them (hf-memopt monitor lists them), or choose another card with CUDA_VISIBLE_DEVICES",
        "--preset auto: plans for what is free",
        "max_memory_gib, where several jobs share a card on purpose",
    ],
)


def parse_figures(text: str) -> dict[str, int]:
    """The last of each figure that a message names, in bytes; of other processes, all of them together."""
    found = {}
    for name, pattern in _FIGURES.items():
        sizes = [_bytes(match.groups()) for match in re.finditer(pattern, text)]
        if sizes:
            found[name] = sum(sizes) if name == "others_bytes" else sizes[-1]
    return found


def _bytes(groups: tuple[str | None, ...]) -> int:
    number, unit = [part for part in groups if part is not None][:2]
    return int(float(number) * _UNITS[unit])


def reason(
    found: Diagnosis,
    stage: str | None,
    step: int | None,
    figures: dict[str, int],
    grown: str | None = None,
    longest: bool | None = None,
) -> tuple[str, list[str]]:
    """The likely cause in a sentence, and what helps, the most effective first.

    Args:
        found: what ran out.
        stage: load, forward, backward, optimizer, eval, save or resume; None where nobody knows.
        step: optimizer steps that were done; None where nobody knows.
        figures: what the message names (parse_figures).
        grown: what the monitor said that memory grows by (monitor.growth.ADVICE).
        longest: whether this batch is the largest so far; None where nobody knows.
    """
    capacity = figures.get("capacity_bytes", 0)
    if found.kind not in (OomKind.DEVICE, OomKind.LIBRARY_WORKSPACE) and "host memory ran out" not in found.cause:
        return found.cause, [found.cause.partition(": ")[2] or found.cause]
    if grown:
        return f"memory grew: {grown}: {ADVICE[grown]}", LATER_CHANGES
    if figures.get("others_bytes", 0) > max(GIB, 0.05 * capacity):
        why, changes = _OTHERS
        return why.format(others=gib(figures["others_bytes"])), changes
    if figures.get("unused_bytes", 0) > max(figures.get("asked_bytes", 0), 0.05 * capacity):
        why, changes = _FRAGMENTED
        return why.format(unused=gib(figures["unused_bytes"])), changes
    if stage in ("eval", "save", "load", "resume") or (stage == "optimizer" and not step):
        return _BY_STAGE[stage]
    why, changes = _BY_STAGE["step"]
    if not step or (step == 1 and longest is None):
        return f"from the first step on: {why}" if step == 0 else why, changes
    later = [*LATER_CHANGES[:2], changes[0]]
    if longest is None:
        return _LATER.format(step=step), later
    return (_LONGER if longest else _INTERMITTENT).format(step=step), later if longest else LATER_CHANGES
