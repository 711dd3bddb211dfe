"""The predicted tables of docs/plans.md."""

from levers_docs import results, table
from levers_docs import source as measured

GIB, GB = 2**30, 10**9
KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "workspace", "communication")


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"


def gb(size: float | None) -> str:
    return "" if size is None else f"{size / GB:.1f}"


def rows_of(name: str) -> list[dict]:
    return [row for row in results("plans")["rows"] if row["table"] == name]


def source() -> str:
    data = results("plans")
    return (
        f"Predicted {data['date']} with torch {data['versions']['torch']}, transformers "
        f"{data['versions']['transformers']}: [plans.json](../benchmarks/results/plans.json)."
    )


def practical() -> str:
    """The guides' practical configurations as plans."""
    parts = []
    for title in dict.fromkeys(row["title"] for row in rows_of("plan")):
        parts.append(f"**{title}**")
        lines = []
        for row in (row for row in rows_of("plan") if row["title"] == title):
            if not row["profiles"]:
                lines.append([row["method"], "nothing fits", f"{gib(row['missing_bytes'])} missing", "", ""])
                continue
            seen = {}
            for profile in row["profiles"]:
                seen.setdefault(profile["settings"], []).append(profile["profile"])
            for settings, profiles in seen.items():
                profile = next(profile for profile in row["profiles"] if profile["settings"] == settings)
                held = ", ".join(
                    f"{kind.replace('_', ' ')} {gib(profile['breakdown'][kind])}"
                    for kind in KINDS
                    if profile["breakdown"][kind] > GIB / 20
                )
                lines.append(
                    [
                        f"{row['method']}: {', '.join(profiles)}",
                        settings,
                        gib(profile["device_bytes"]),
                        gib(profile["host_bytes"]),
                        held,
                    ]
                )
        first = next(row for row in rows_of("plan") if row["title"] == title)
        parts.append(
            f"`{first['model']}` on `{first['hardware']}`, {first['effective_batch_size']} samples of "
            f"{first['tokens']} tokens per step:"
        )
        heads = [
            "method: profiles",
            "settings",
            "GiB per device",
            "GiB of host memory per process",
            "at the peak, GiB",
        ]
        parts.append(table(heads, lines))
        rejected = [
            rejection
            for row in rows_of("plan")
            if row["title"] == title
            for rejection in row["rejected"]
            if rejection["settings"] in ("full fine-tuning", "LoRA", "QLoRA")
        ]
        parts += [f"Ruled out: {row['reason']}." for row in rejected]
        changes = [change for row in rows_of("plan") if row["title"] == title for change in row["nearest"]]
        if changes:
            parts.append(f"What would fit: {'; '.join(changes)}.")
    return "\n\n".join([*parts, source()])


def settings() -> str:
    """What the guides' own settings are predicted to need."""
    lines = [
        [
            row["title"],
            row["guide_gb"],
            gb(row["device_bytes"]),
            gb(row["capacity_bytes"]),
            "yes" if row["fits"] else "no",
        ]
        for row in rows_of("settings")
    ]
    split = rows_of("split")[0]
    total = split["weights_bytes"] + split["gradients_bytes"] + split["states_bytes"]
    heads = ["settings", "guide, GB", "predicted, GB", "capacity, GB", "fits"]
    return "\n\n".join(
        [
            table(heads, lines),
            (
                "The guide's own parallelism for 405B (tensor 8 × pipeline 4 × data 4, ZeRO-1) would hold, by "
                f"arithmetic, {gb(split['weights_bytes'])} GB of bf16 weights, {gb(split['gradients_bytes'])} GB of "
                f"bf16 gradients and {gb(split['states_bytes'])} GB of fp32 masters and Adam states per device: "
                f"{gb(total)} GB before activations, more than the card has. fp8 matmuls do not change that, since "
                "masters and states stay in fp32. The Hugging Face Trainer supports neither tensor nor pipeline "
                "parallelism of Megatron's kind."
            ),
            source(),
        ]
    )


def tables() -> str:
    """The guides' tables and predictions."""
    parts = []
    for name, caption in (
        ("small test", "A test with 34,083,904 weights, forward and backward (here a Llama of about that size, SGD):"),
        ("platforms", "Settings by platform, for 0.5 GB of weights (here SmolLM2-135M, AdamW, fp32 weights):"),
        ("512M on 44 GB", "512M weights on four L40S (here Qwen3-0.6B, DDP, checkpointing in all layers):"),
        ("2B video", "A 2B video model before and after (here Qwen2.5-VL-3B, LoRA, frozen tower, 224 × 224):"),
    ):
        lines = [
            [
                row["title"],
                row["guide_gb"],
                gb(row["peak_allocated_bytes"]),
                gb(row["device_bytes"]),
                "yes" if row["fits"] else "no",
            ]
            for row in rows_of(name)
        ]
        heads = ["settings", "guide, GB", "allocated, GB", "device, GB", "fits its card"]
        parts += [caption, table(heads, lines)]
    lines = [
        [
            row["title"],
            row["guide_gb"],
            f"{row['by_the_guides_bytes_gb']:.2f}",
            gb(row["deepspeeds_formula_bytes"]),
            *(gb(row["breakdown"][kind]) for kind in KINDS[:3]),
            gb(row["peak_allocated_bytes"]),
        ]
        for row in rows_of("ZeRO")
    ]
    heads = [
        "engine",
        "guide, GB",
        "2 + 2 + 4 bytes per weight, GB",
        "DeepSpeed's formula, GB",
        "weights",
        "gradients",
        "states",
        "at the peak",
    ]
    parts += [
        "ZeRO, 7B (Llama-2-7B) on 8 devices. The guide counts 4 bytes of states per weight; DeepSpeed keeps 12 (an "
        "fp32 master and two states), and the peak includes activations, logits and buckets:",
        table(heads, lines),
    ]
    return "\n\n".join([*parts, source()])


def truth() -> str:
    """Plans under a memory budget, compared with real runs."""
    data = results("planner_cpu")
    lines = []
    for row in data["rows"]:
        off = max((profile["predicted_bytes"] / profile["measured_bytes"] - 1 for profile in row["profiles"]), key=abs)
        lines.append(
            [
                f"{row['family']}, {row['method']}, {row['tokens']} tokens",
                f"{row['budget_bytes'] / 1e6:.0f}",
                f"{sum(profile['survived'] for profile in row['profiles'])} of {len(row['profiles'])}",
                f"{off:+.2%}",
                "fails" if row["under_the_smallest_fails"] else "runs",
                row["chosen"],
                f"{row['operations_chosen'] / row['operations_best']:.3f}",
            ]
        )
    heads = [
        "model",
        "budget, MB",
        "profiles that ran",
        "largest error of the estimate",
        "with 2 % too little",
        "profile maximum",
        "FLOPs, relative to the best",
    ]
    explanation = (
        "A memory budget stands for the card. With the allocator limited to it, every profile that is predicted to "
        "fit trains, evaluates, saves and resumes. The choice that needs the least memory is also run with 2 % less "
        "than predicted. Finally, every choice is estimated in full: the last column compares the FLOPs per step of "
        "the planner's choice with those of the best choice that fits."
    )
    return f"{explanation}\n\n{table(heads, lines)}\n\n{measured('planner_cpu', data)}"


def lengths() -> str:
    """The longest sequences by card, and what each memory feature adds."""
    data = results("lengths")
    cards = list(dict.fromkeys(row["hardware"] for row in data["rows"]))
    found = {(row["method"], row["settings"], row["hardware"]): row for row in data["rows"]}
    lines = []
    for method, settings in dict.fromkeys((row["method"], row["settings"]) for row in data["rows"]):
        rows = [found.get((method, settings, card)) for card in cards]
        lines.append([f"`{method}`", settings, *(_length(row) for row in rows)])
    made = table(["method", "settings", *(f"`{card}`" for card in cards)], lines)
    source = f"Predicted {data['date']} with torch {data['versions']['torch']}, transformers "
    return f"{made}\n\n{source}{data['versions']['transformers']}: [lengths.json](../benchmarks/results/lengths.json)."


def _length(row: dict | None) -> str:
    if row is None:
        return ""
    limit = "" if row["limited_by"] == "device" else f" ({row['limited_by']})"
    return f"{row['seq_len']:,}{limit}"


TABLES = {"lengths": lengths, "truth": truth, "practical": practical, "settings": settings, "tables": tables}
