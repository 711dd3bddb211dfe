"""MemoryTrainer for video batches, whose media tensors have no batch dimension."""

from typing import Any

import torch

from hf_memopt.trainer.trainer import MemoryTrainer
from hf_memopt.video.collator import check_packing, join, pack
from hf_memopt.video.model_parts import take_videos_of_any_length


class VideoTrainer(MemoryTrainer):
    """A MemoryTrainer for VideoCollator(separate_media=True).

    Media stay with their sample until the batch runs. A micro-batch that does not fit can then be split between
    samples, and only the pixels of the running chunk are on the device.
    """

    def __init__(self, *args, packing: int | None = None, **kwargs) -> None:
        """Args:
            packing: tokens of a packed row, at most. A micro-batch is then per_device_train_batch_size packs of whole
                samples, which run as one row without padding. The data set has to know its samples' `lengths()`, and
                the collator is VideoCollator(separate_media=True, lengths=True). All other arguments are
                MemoryTrainer's.

        Raises:
            InputError: the model's samples would not be kept apart.
        """
        self.packing = packing
        super().__init__(*args, **kwargs)
        take_videos_of_any_length(self.model)
        if packing is not None:
            check_packing(self.model.config)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared = super()._prepare_inputs(self.joined(inputs))
        # With a KV cache no mask keeps packed samples apart. The Trainer turns it off in the model's configuration,
        # but language models within others read their own (transformers 5.23).
        return prepared if self.packing is None else {**prepared, "use_cache": False}

    def joined(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch as the model takes it."""
        if "media" not in inputs:
            return inputs
        fields = ("media", "lengths")
        batch = {name: value for name, value in inputs.items() if name not in fields} | join(inputs["media"])
        return pack(batch, inputs["lengths"], self.model) if "lengths" in inputs else batch

    def _get_train_sampler(self, train_dataset=None) -> torch.utils.data.Sampler | None:
        # Trainer's samplers by length (transformers 5.23) would make every sample to measure it.
        data = self.train_dataset if train_dataset is None else train_dataset
        by_length = self.args.train_sampling_strategy in ("group_by_length", "batch_rebalance")
        if by_length and hasattr(data, "lengths"):
            names = {*(getattr(self.processing_class, "model_input_names", None) or ()), "input_ids"}
            data = [dict.fromkeys(names, range(length)) for length in data.lengths()]
        return super()._get_train_sampler(data)
