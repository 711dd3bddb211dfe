"""Trace a process that has a part of every sample's tokens, and in attention all tokens of a part of the heads."""

from collections.abc import Iterator
from contextlib import contextmanager

from hf_memopt.estimator.patches.replacement import all_replaced

_GROUPS = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


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
    groups = ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP")
    with all_replaced({f"{_GROUPS}:{name}": None for name in groups}):
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
