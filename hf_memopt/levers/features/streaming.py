"""weight_streaming (levers/weight_streaming.py): frozen weights in host memory."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.errors import InputError
from hf_memopt.levers.feature import Feature


@dataclass
class Streaming(Feature):
    weight_streaming: bool = field(
        default=False,
        metadata={
            "help": "Keep frozen weights in host memory, each process its own, and fetch each layer's while it runs."
        },
    )
    weight_streaming_ratio: float = field(
        default=1.0,
        metadata={"help": "With weight_streaming: share of the layers that are streamed, evenly spread."},
    )
    order: ClassVar = 2

    @staticmethod
    def check(on):
        if not 0 < on.weight_streaming_ratio <= 1:
            raise InputError(
                f"weight_streaming_ratio={on.weight_streaming_ratio} must lie above 0 and up to 1 (all layers)"
            )

    @staticmethod
    def refused(on, facts):
        if not on.weight_streaming:
            if (ratio := on.weight_streaming_ratio) != Streaming.weight_streaming_ratio:
                yield (
                    f"weight_streaming_ratio={ratio} has no effect without weight_streaming: set it too, or leave it "
                    "out"
                )
            return
        if not facts.engine.plain:
            yield (
                f"weight_streaming needs whole weights on every process: leave it out under {facts.setup.strategy}, "
                "or use ddp, or strategy zero3_offload_cpu without it"
            )
        if facts.fields.get("torch_compile"):
            yield "torch_compile would compile weights that are not on the device: leave weight_streaming out"

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.weight_streaming:
            from hf_memopt.levers.weight_streaming import stream_weights

            stream_weights(model, on.weight_streaming_ratio)
