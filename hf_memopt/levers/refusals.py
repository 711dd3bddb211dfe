"""Memory features that go without TRL's trainers, or without samples that devices share."""

from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import MemoryArguments

# Fields of MemoryArguments that need all tokens of a sample, which sequence parallelism divides.
WHOLE_SAMPLES = ("logits_to_keep", "max_tokens_per_batch", "sparse_block_size")


def check_with_trl(memory_args: MemoryArguments, what: str) -> None:
    """Refuse what works on logits: TRL's own head (trl 1.16, add_fused_lm_head) takes the model's forward.

    Args:
        what: the trainer or task.

    Raises:
        InputError: a memory feature of the loss is on.
    """
    for name in ("loss_chunk_size", "logits_to_keep"):
        if getattr(memory_args, name):
            raise InputError(f"{name} goes without {what}: TRL's trainers compute their loss in tiles themselves")
    if memory_args.weight_streaming:
        raise InputError(f"weight_streaming goes without {what}: TRL's trainers read the head outside of the model")
