"""Block-sparse attention: a token attends to its own block, some blocks before it, and the sequence's first ones."""

from hf_memopt.levers.attention_pattern import attend_by_pattern


def attend_to_blocks(model, block: int, local: int, first: int) -> None:
    """Have every layer of a decoder attend, causally, to nearby and to the first blocks only.

    A layer with a window of its own keeps it: what it attends to then lies in both. Packed sequences are kept apart,
    and their blocks are counted from where each begins.

    Args:
        block: tokens of a block. flex attention skips whole blocks of 128 tokens: multiples of that skip most.
        local: blocks before a token's own that it attends to.
        first: blocks at a sequence's beginning that all its tokens attend to.

    Raises:
        InputError: the model's attention does not go through the interface, is not causal, or has dropout.
    """
    pattern = {"sparse_block_size": block, "num_local_blocks": local, "num_global_blocks": first}
    attend_by_pattern(model, f"sparse_block_size={block}", pattern)
