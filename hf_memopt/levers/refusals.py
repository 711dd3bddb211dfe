"""Memory features that are incompatible with other settings; the trainer and the estimator both ask here."""

from collections.abc import Iterator
from typing import Any

from hf_memopt.compatibility.rules import CUDA_GRAPHS
from hf_memopt.compatibility.setup import compile_mode
from hf_memopt.engines import Engine
from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import FEATURES, MemoryArguments
from hf_memopt.levers.feature import Around

# Fields of MemoryArguments that need all tokens of a sample, which sequence parallelism divides.
WHOLE_SAMPLES = ("loss_chunk_size", "logits_to_keep", "max_tokens_per_batch", "sparse_block_size")


def check_levers(memory_args: MemoryArguments, fields: dict[str, Any], engine: Engine, device: str = "cuda") -> None:
    """Raise for the first incompatible pair of settings (Around).

    Raises:
        InputError: the reason, and which setting to leave out.
    """
    for reason in refusals(memory_args, fields, engine, device):
        raise InputError(reason)


def refusals(
    memory_args: MemoryArguments, fields: dict[str, Any], engine: Engine, device: str = "cuda"
) -> Iterator[str]:
    """One sentence for each incompatibility of a job's settings."""
    mode = compile_mode(fields.get)
    if memory_args.oom_recovery and mode in CUDA_GRAPHS and device in ("cuda", "rocm"):
        # torch._inductor.cudagraph_trees (2.13): can_start_new_generation() is False as long as a forward waits for
        # its backward, which after running out of memory never comes.
        yield (
            f"torch_compile_mode={mode} records CUDA graphs, which do not free the memory of a step that failed: use "
            "max-autotune-no-cudagraphs, or set oom_recovery=False"
        )
    around = Around(fields=fields, engine=engine, device=device)
    for feature in FEATURES:
        yield from feature.refused(memory_args, around)


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
