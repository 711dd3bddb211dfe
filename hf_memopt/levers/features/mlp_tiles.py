"""mlp_tile_size (tiled_mlp.py): MLPs over a few tokens at a time."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.change import CHUNK, Change, chunk_tokens, micro_batch_tokens
from hf_memopt.levers.feature import Feature, liger_replaces


def _tile_mlps(job) -> dict[str, int] | None:
    """Of long micro-batches whose layers are checkpointed: one layer's MLP is then the peak beside the logits."""
    if job.memory_args.mlp_tile_size is not None or not job.setup.activation_checkpointing:
        return None
    tokens = micro_batch_tokens(job)
    return {"mlp_tile_size": chunk_tokens(tokens)} if tokens >= 4 * CHUNK else None


MLP_TILES = Change(
    settings={"mlp_tile_size": CHUNK}, compute=_tile_mlps, effect="the MLP's intermediates for so many tokens at once"
)


@dataclass
class MlpTiles(Feature):
    mlp_tile_size: int | None = field(
        default=None,
        metadata={
            "help": "Run MLPs on this many tokens at a time, and compute their intermediates again in backward."
        },
    )
    above_zero: ClassVar = ("mlp_tile_size",)
    proposed: ClassVar = MLP_TILES

    @staticmethod
    def refused(on, facts):
        if on.mlp_tile_size is not None and liger_replaces(facts.fields, "swiglu", "geglu"):
            yield "use_liger_kernel and mlp_tile_size both replace the MLP: use one of them"

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.mlp_tile_size is not None:
            from hf_memopt.levers.tiled_mlp import tile_mlps

            tile_mlps(model, on.mlp_tile_size)
