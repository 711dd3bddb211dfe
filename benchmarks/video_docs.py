"""The measured and predicted tables of docs/video.md."""

import math

from levers_docs import results, table

from hf_memopt import get_preset
from hf_memopt.planner.video_tiers import guide_row
from hf_memopt.presets.video_tiers import all_tiers

_MEASURES = {
    "vision out of autograd": "tower outside autograd",
    "answer-only logits": "logits for answers only",
    "both": "both, as the recipe trains",
}
_FAMILIES = {"qwen2_5_vl": "Qwen2.5-VL", "smolvlm": "SmolVLM", "llava_onevision": "LLaVA-OneVision"}
_MODELS = {"qwen2.5-vl-3b": "3B", "qwen2.5-vl-7b": "7B"}
_METHODS = {"qlora": "QLoRA", "lora": "LoRA", "full": "full"}


def memory() -> str:
    """Share of the plain Trainer's peak that remains, per family."""
    families = results("video")["rows"]
    lines = [
        [label, *(f"{100 * family['measures'][measure]['of_plain']:.1f} %" for family in families.values())]
        for measure, label in _MEASURES.items()
    ]
    return table(["share of the plain Trainer's peak", *(_FAMILIES[name] for name in families)], lines)


def tiers() -> str:
    """What is predicted to fit each card, by method and model, and the founding guide's row for its memory."""
    rows = {(row["preset"], row["method"], row["model"]): row for row in all_tiers()}
    kinds = [(method, model) for method in ("qlora", "lora", "full") for model in _MODELS]
    lines = []
    for name in sorted({name for name, _, _ in rows}, key=lambda name: (get_preset(name).hardware.memory, name)):
        frames, micro = guide_row(get_preset(name).hardware.memory)
        guide = f"{_range(frames)}; {_range(micro)}"
        lines.append([f"`{name}`", guide, *(_cell(rows.get((name, *kind))) for kind in kinds)])
    heads = [f"{_METHODS[method]} {_MODELS[model]}" for method, model in kinds]
    return table(["preset", "the guide: frames; micro-batch", *heads], lines)


def _range(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}–{numbers[1]}" if numbers[0] < numbers[1] else f"{numbers[0]} and more"


def _cell(row: dict | None) -> str:
    if not row or "refused" in row:
        return ""
    if not row["max_frames"]:
        return "none"
    side = math.isqrt(row["max_pixels_per_frame"])
    return (
        f"{row['max_frames']} of {side}²; {row['per_device_train_batch_size']} ({row['device_bytes'] / 2**30:.1f} GiB)"
    )


def families() -> str:
    """Every model type that takes videos: those that train, and why the others are refused."""
    result = results("video_families")
    works = [row for row in result["rows"] if row["outcome"] == "works"]
    limited = {"image": "images beside a video", "second_video": "a second video"}
    lines = [f"* {len(works)} of {len(result['rows'])} train: " + ", ".join(f"`{row['model_type']}`" for row in works)]
    for row in works:
        lines += [
            f"* `{row['model_type']}`, {words}: {row[name]}" for name, words in limited.items() if row[name] != "works"
        ]
    refused = [row for row in result["rows"] if row["outcome"] != "works"]
    lines += [f"* refused: {row['reason']}" for row in refused]
    return "\n".join(lines) + (
        f"\n\nMeasured {result['date']} with torch {result['versions']['torch']}, transformers "
        f"{result['versions']['transformers']}: [video_families.json](../benchmarks/results/video_families.json)."
    )


TABLES = {"video memory": memory, "video tiers": tiers, "video families": families}
