"""The measured and predicted tables of docs/video.md."""

from levers_docs import results, table

_MEASURES = {
    "vision out of autograd": "tower out of autograd",
    "answer-only logits": "logits of answers alone",
    "both": "both, as the recipe trains",
}
_FAMILIES = {"qwen2_5_vl": "Qwen2.5-VL", "smolvlm": "SmolVLM", "llava_onevision": "LLaVA-OneVision"}
_CARDS = {"rtx_3070": "8 GB", "rtx_4080": "16 GB", "rtx_4090": "24 GB"}


def memory() -> str:
    """What is left of a plain Trainer's peak, of each family."""
    families = results("video")["rows"]
    lines = [
        [told, *(f"{100 * family['measures'][measure]['of_plain']:.1f} %" for family in families.values())]
        for measure, told in _MEASURES.items()
    ]
    return table(["of the plain Trainer's peak", *(_FAMILIES[name] for name in families)], lines)


def frames() -> str:
    """The most frames by card, model and micro-batch."""
    rows = results("video_tiers")["rows"]
    lines = [
        [f"{size} (`{card}`)", *(str(row["max_frames"] or "none") for row in rows if row["card"] == card)]
        for card, size in _CARDS.items()
    ]
    heads = ["Qwen2.5-VL-3B, micro-batch 1", "micro-batch 4", "Qwen2.5-VL-7B, micro-batch 1", "micro-batch 4"]
    return table(["card", *heads], lines)


TABLES = {"video memory": memory, "video frames": frames}
