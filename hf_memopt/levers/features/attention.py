"""sliding_window and sparse_block_size (attention_pattern.py): which tokens a token attends to."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.errors import InputError
from hf_memopt.levers.feature import Feature


@dataclass
class SlidingWindow(Feature):
    sliding_window: int | None = field(
        default=None, metadata={"help": "Attention window in tokens, the current token included."}
    )
    above_zero: ClassVar = ("sliding_window",)
    order: ClassVar = -1

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.sliding_window is not None:
            from hf_memopt.levers.sliding_window import set_window

            set_window(model, on.sliding_window)


@dataclass
class SparseAttention(Feature):
    sparse_block_size: int | None = field(
        default=None,
        metadata={
            "help": "Block-sparse attention with blocks of this many tokens. Multiples of 128 suit flex attention's "
            "kernels best."
        },
    )
    num_local_blocks: int = field(
        default=4,
        metadata={"help": "With sparse_block_size: preceding blocks that a token attends to."},
    )
    num_global_blocks: int = field(
        default=1,
        metadata={"help": "With sparse_block_size: first blocks of a sequence that all its tokens attend to."},
    )
    above_zero: ClassVar = ("sparse_block_size",)
    order: ClassVar = -1

    @staticmethod
    def check(on):
        for name in ("num_local_blocks", "num_global_blocks"):
            if getattr(on, name) < 0:
                raise InputError(f"{name}={getattr(on, name)} must be 0 or more")

    @staticmethod
    def refused(on, facts):
        if on.sparse_block_size is None:
            for name in ("num_local_blocks", "num_global_blocks"):
                if (value := getattr(on, name)) != getattr(SparseAttention, name):
                    yield f"{name}={value} has no effect without sparse_block_size: set it too, or leave {name} out"
        elif on.sliding_window is not None:
            yield "sparse_block_size and sliding_window both restrict attention: use one of them"

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.sparse_block_size is not None:
            from hf_memopt.levers.attention_pattern import attend_to_blocks

            attend_to_blocks(model, on.sparse_block_size, on.num_local_blocks, on.num_global_blocks)
