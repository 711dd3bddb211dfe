"""Whose file a YAML is that is not accelerate's."""

from collections.abc import Mapping
from typing import Any

# A tool, keys that all of its files have, and keys of which they have one.
_TOOLS = (
    ("axolotl", {"base_model"}, {"datasets", "pretraining_dataset", "adapter", "sequence_len", "micro_batch_size"}),
    ("axolotl", {"base_model"}, {"rl", "val_set_size", "learning_rate", "optimizer", "plugins"}),
    ("LLaMA-Factory", {"model_name_or_path"}, {"finetuning_type", "cutoff_len", "template", "dataset_dir"}),
    ("LLaMA-Factory's v1 trainer", {"model"}, {"model_class", "dist_config", "kernel_config"}),
    ("ms-swift", {"model"}, {"train_type", "tuner_type", "rlhf_type", "swift_version", "split_dataset_ratio"}),
    ("TRL", {"model_name_or_path"}, {"dataset_name", "dataset_mixture", "dataset_mixer", "datasets", "output_dir"}),
)


def foreign_tool(content: Mapping[str, Any]) -> str | None:
    """The tool whose file this is; None where it may be accelerate's."""
    if "distributed_type" in content:
        return None
    if any(isinstance(block, Mapping) and "_component_" in block for block in content.values()):
        return "torchtune"
    return next(
        (tool for tool, all_of, one_of in _TOOLS if all_of <= content.keys() and one_of & content.keys()), None
    )
