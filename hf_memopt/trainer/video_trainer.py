"""MemoryTrainer for video batches, whose media tensors have no batch dimension."""

from typing import Any

from hf_memopt.trainer.trainer import MemoryTrainer
from hf_memopt.video.collator import join
from hf_memopt.video.model_parts import take_videos_of_any_length


class VideoTrainer(MemoryTrainer):
    """A MemoryTrainer for VideoCollator(separate_media=True).

    Media stay with their sample until the batch runs. A micro-batch that does not fit can then be split between
    samples, and only the pixels of the running chunk are on the device.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        take_videos_of_any_length(self.model)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return super()._prepare_inputs(self.joined(inputs))

    def joined(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch as the model takes it."""
        if "media" not in inputs:
            return inputs
        return {name: value for name, value in inputs.items() if name != "media"} | join(inputs["media"])
