"""Block-sparse attention: a token attends to its own block, some blocks before it, and the sequence's first ones."""

from hf_memopt.levers.attention_pattern import attend_by_pattern


def attend_to_blocks(model, block: int, local: int, first: int) -> None:
    """Restrict every layer of a decoder to its own block, the preceding ones and the first ones, causally.

    A layer with a sliding window attends to the intersection of both. Packed sequences stay separate, and the blocks
    of each are counted from its first token.

    Args:
        block: tokens per block. Flex attention skips blocks of 128 tokens, so multiples of 128 work best.
        local: preceding blocks that a token attends to.
        first: first blocks of a sequence that all its tokens attend to.

    Raises:
        InputError: the model does not use transformers' attention interface, is not causal, or has dropout.
    """
    pattern = {"sparse_block_size": block, "num_local_blocks": local, "num_global_blocks": first}
    attend_by_pattern(model, f"sparse_block_size={block}", pattern)
