"""checkpoint_ratio and checkpoint_keeps (selective_checkpointing.py): some layers, or some of a layer's outputs."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.feature import Feature


@dataclass
class Checkpointing(Feature):
    checkpoint_ratio: float | None = field(
        default=None, metadata={"help": "Share of the layers that are checkpointed, evenly spread."}
    )
    checkpoint_keeps: str | None = field(
        default=None,
        metadata={
            "help": "What checkpointed layers store instead of recomputing it: attention (its outputs), or matmuls "
            "(attention's and every second matmul's outputs)."
        },
    )
    shares: ClassVar = {"checkpoint_ratio": "no layer"}
    choices: ClassVar = {"checkpoint_keeps": ("attention", "matmuls")}
    order: ClassVar = 1

    @staticmethod
    def refused(on, facts):
        if on.checkpoint_ratio is None and on.checkpoint_keeps is None:
            return
        kwargs = facts.fields.get("activation_checkpointing_kwargs") or {}
        name = "checkpoint_ratio" if on.checkpoint_ratio is not None else "checkpoint_keeps"
        if (every := kwargs.get("every_n_layers", 1)) != 1:
            yield f"every_n_layers={every} and {name} both choose what is checkpointed: use one of them"
        if kwargs.get("use_reentrant"):
            yield f"{name} needs activation_checkpointing_kwargs.use_reentrant=False"
        config = facts.fields.get("fsdp_config") or {}
        if isinstance(config, dict) and config.get("activation_checkpointing"):
            yield f"fsdp_config.activation_checkpointing checkpoints every layer: set it to false to use {name}"

    @staticmethod
    def put_on(on, model, label_smoothing):
        from hf_memopt.levers.selective_checkpointing import checkpoint_in_part, keep_chosen_layers

        keep_chosen_layers(model)
        if on.checkpoint_ratio is not None or on.checkpoint_keeps is not None:
            checkpoint_in_part(model, on.checkpoint_ratio, on.checkpoint_keeps)
