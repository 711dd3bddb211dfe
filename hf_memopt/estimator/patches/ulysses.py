"""Trace a process that has a part of every sample's tokens, and in attention all tokens of a part of the heads."""

from collections.abc import Iterator
from contextlib import contextmanager

from hf_memopt.estimator.private_names import Part

_GROUPS = Part.DEEPSPEED.replaces(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:_SEQUENCE_PARALLEL_GROUP",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:_SEQUENCE_DATA_PARALLEL_GROUP",
    why="a process has one group of each kind, and the trace's is over the fake process group",
    until="deepspeed can hold two",
)
_USED = Part.DEEPSPEED.relies_on(
    "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.register_with_transformers"
    "(model_name_or_path, core_attn_implementation, sequence_parallel_size, micro_batch_size)",
    why="accelerate calls it while it prepares a model whose batches it divides, which are traced divided",
)


@contextmanager
def shared_samples(model, attention: str, processes: int, micro_batch: int) -> Iterator[None]:
    """Exchange tokens for heads around attention by DeepSpeed's own code, over the fake process group.

    Accelerator._prepare_deepspeed (accelerate 1.15) registers it likewise; there the batch's gathering is part of it,
    whose parts wait on the host (deepspeed 0.19, UlyssesSPDataLoaderAdapter.refill).

    Args:
        attention: the model's `attn_implementation`.
        processes: that share a sample.
    """
    if processes == 1:
        yield
        return
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[attention]
    with _GROUPS.replaced(_SEQUENCE_PARALLEL_GROUP=None, _SEQUENCE_DATA_PARALLEL_GROUP=None):
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=attention,
            sequence_parallel_size=processes,
            micro_batch_size=micro_batch,
            disable_in_eval=True,
        )
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[attention] = before
