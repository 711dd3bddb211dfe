"""docs/video.md: what video models take, which frames fit which card, which model types train."""

import math

from docs_tables.markdown import METHOD_NAMES, gib, listed, predicted, results, shown, table

from hf_memopt import get_preset
from hf_memopt.planner.samples.video_tiers import guide_row
from hf_memopt.presets.tier_file import all_tiers

VIDEO_MEASURES = {
    "vision out of autograd": "tower outside autograd",
    "answer-only logits": "logits for answers only",
    "both": "both, as the recipe trains",
}
VIDEO_FAMILIES = {"qwen2_5_vl": "Qwen2.5-VL", "smolvlm": "SmolVLM", "llava_onevision": "LLaVA-OneVision"}


def video_memory() -> str:
    """Share of the plain Trainer's peak that remains, per family."""
    families = results("video")["rows"]
    lines = [
        [label, *(f"{100 * family['measures'][measure]['of_plain']:.1f} %" for family in families.values())]
        for measure, label in VIDEO_MEASURES.items()
    ]
    return table(["share of the plain Trainer's peak", *(VIDEO_FAMILIES[name] for name in families)], lines)


def video_tiers() -> str:
    """What is predicted to fit each card, by method and model, and the founding guide's row for its memory."""
    rows = {(row["preset"], row["method"], row["model"]): row for row in all_tiers()}
    models = {"qwen2.5-vl-3b": "3B", "qwen2.5-vl-7b": "7B"}
    kinds = [(method, model) for method in ("qlora", "lora", "full") for model in models]
    lines = []
    for name in sorted({name for name, _, _ in rows}, key=lambda name: (get_preset(name).hardware.memory, name)):
        ranges = guide_row(get_preset(name).hardware.memory)
        guide = "; ".join(f"{low}–{high}" if low < high else f"{low} and more" for low, high in ranges)
        lines.append([f"`{name}`", guide, *(_tier(rows.get((name, *kind))) for kind in kinds)])
    heads = [f"{METHOD_NAMES[method]} {models[model]}" for method, model in kinds]
    return table(["preset", "the guide: frames; micro-batch", *heads], lines)


def _tier(row: dict | None) -> str:
    if not row or "refused" in row:
        return ""
    if not row["max_frames"]:
        return "none"
    frames = f"{row['max_frames']} of {math.isqrt(row['max_pixels_per_frame'])}²"
    return f"{frames}; {row['per_device_train_batch_size']} ({gib(row['device_bytes'])} GiB)"


def video_families() -> str:
    """Every model type that takes videos: those that train, and why the others are refused."""
    rows = results("video_families")["rows"]
    works = [row for row in rows if row["outcome"] == "works"]
    limited = {"image": "images beside a video", "second_video": "a second video"}
    lines = [f"* {len(works)} of {len(rows)} train: " + ", ".join(f"`{row['model_type']}`" for row in works)]
    for row in works:
        limits = [(label, row[name]) for name, label in limited.items() if row[name] != "works"]
        lines += [f"* `{row['model_type']}`, {label}: {reason}" for label, reason in limits]
    lines += [f"* refused: {row['reason']}" for row in rows if row["outcome"] != "works"]
    return "\n".join(lines) + f"\n\n{predicted('video_families', verb='Measured')}"


def vlm_plans() -> str:
    """The balanced profiles of pictures, and how much faster the fastest settings made by hand are."""
    rows = [
        {**row, **row["planned"]["balanced"], "faster": row["by_hand"]["balanced"]["faster"]}
        for row in results("vlm_plans")["rows"]
        if "balanced" in row["planned"]
    ]
    columns = {
        "model": "{model}",
        "card": "`{card}`",
        "picture": "{size}",
        "planned": "{settings}",
        "GiB": shown("device_bytes"),
        "tokens/s, not compared": shown("tokens_per_second", ",.0f", 1),
        "fastest by hand": lambda row: f"{row['faster']:+.1%}",
    }
    return f"{listed(rows, columns)}\n\n{predicted('vlm_plans')}"


TABLES = {
    "video memory": video_memory,
    "video tiers": video_tiers,
    "video families": video_families,
    "plans of pictures": vlm_plans,
}
