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
    found = results("plans")
    return (
        f"Predicted {found['date']} with torch {found['versions']['torch']}, transformers "
        f"{found['versions']['transformers']}: [plans.json](../benchmarks/results/plans.json)."
    )


def practical() -> str:
    """The guides' practical configurations as plans."""
    parts = []
    for title in dict.fromkeys(row["title"] for row in rows_of("plan")):
        parts.append(f"**{title}**")
        lines = []
        for row in (row for row in rows_of("plan") if row["title"] == title):
            if not row["ladder"]:
                lines.append([row["method"], "nothing fits", f"{gib(row['missing_bytes'])} missing", "", ""])
                continue
            seen = {}
            for rung in row["ladder"]:
                seen.setdefault(rung["settings"], []).append(rung["rung"])
            for settings, rungs in seen.items():
                rung = next(rung for rung in row["ladder"] if rung["settings"] == settings)
                held = ", ".join(
                    f"{kind.replace('_', ' ')} {gib(rung['breakdown'][kind])}"
                    for kind in KINDS
                    if rung["breakdown"][kind] > GIB / 20
                )
                lines.append(
                    [
                        f"{row['method']}: {', '.join(rungs)}",
                        settings,
                        gib(rung["device_bytes"]),
                        gib(rung["host_bytes"]),
                        held,
                    ]
                )
        first = next(row for row in rows_of("plan") if row["title"] == title)
        parts.append(
            f"`{first['model']}` on `{first['hardware']}`, {first['effective_batch_size']} samples a step of "
            f"{first['tokens']} tokens:"
        )
        heads = ["method: rungs", "settings", "GiB a device", "GiB of host a process", "at the peak, GiB"]
        parts.append(table(heads, lines))
        rejected = [
            one
            for row in rows_of("plan")
            if row["title"] == title
            for one in row["rejected"]
            if one["settings"] in ("full fine-tuning", "LoRA", "QLoRA")
        ]
        parts += [f"Left out: {one['reason']}." for one in rejected]
        changes = [change for row in rows_of("plan") if row["title"] == title for change in row["nearest"]]
        if changes:
            parts.append(f"What would fit there: {'; '.join(changes)}.")
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
    heads = ["settings", "guide says, GB", "predicted, GB", "of, GB", "fits"]
    return "\n\n".join(
        [
            table(heads, lines),
            (
                "The guide's own split of 405B (tensor parallelism 8 × pipeline 4 × data 4, ZeRO-1) would hold, by "
                f"arithmetic, {gb(split['weights_bytes'])} GB of bf16 weights, {gb(split['gradients_bytes'])} GB of "
                f"bf16 gradients and {gb(split['states_bytes'])} GB of fp32 masters and Adam states a device: "
                f"{gb(total)} GB before activations, more than the card has. fp8 products do not change that, since "
                "masters and states stay in fp32. Neither tensor nor pipeline parallelism of Megatron's kind can be "
                "reached from the Hugging Face Trainer."
            ),
            source(),
        ]
    )


def tables() -> str:
    """The guides' tables beside predictions."""
    parts = []
    for name, told in (
        ("small test", "A test of 34,083,904 weights, forward and backward (a Llama of about as many here, SGD):"),
        ("platforms", "Settings by platform, for weights of 0.5 GB (SmolLM2-135M here, AdamW over fp32 weights):"),
        ("512M on 44 GB", "512M weights on four L40S (Qwen3-0.6B here, DDP, all layers checkpointed):"),
        ("2B video", "A video model of 2B before and after (Qwen2.5-VL-3B here, LoRA, frozen tower, 224 × 224):"),
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
        heads = ["settings", "guide says, GB", "tensors, GB", "device, GB", "fits its card"]
        parts += [told, table(heads, lines)]
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
        "guide says, GB",
        "2 + 2 + 4 bytes a weight, GB",
        "DeepSpeed's formula, GB",
        "weights",
        "gradients",
        "states",
        "at the peak",
    ]
    parts += [
        "ZeRO, 7B (Llama-2-7B) on 8 devices. The guide counts 4 bytes a weight of states; DeepSpeed keeps 12 (an "
        "fp32 master and two states), and the peak has activations, logits and buckets too:",
        table(heads, lines),
    ]
    return "\n\n".join([*parts, source()])


def truth() -> str:
    """Plans under a budget of bytes, lived through."""
    found = results("planner_cpu")
    lines = []
    for row in found["rows"]:
        off = max((rung["predicted_bytes"] / rung["measured_bytes"] - 1 for rung in row["rungs"]), key=abs)
        lines.append(
            [
                f"{row['family']}, {row['method']}, {row['tokens']} tokens",
                f"{row['budget_bytes'] / 1e6:.0f}",
                f"{sum(rung['survived'] for rung in row['rungs'])} of {len(row['rungs'])}",
                f"{off:+.2%}",
                "fails" if row["under_the_smallest_fails"] else "lives",
                row["chosen"],
                f"{row['operations_chosen'] / row['operations_best']:.3f}",
            ]
        )
    heads = [
        "model",
        "budget, MB",
        "rungs that lived",
        "estimate off by, at most",
        "2 % below the least",
        "maximum",
        "operations of the best",
    ]
    told = (
        "A budget of bytes stands for the card; an allocator that ends there trains, evaluates, saves and resumes "
        "every rung that is said to fit. The choice that needs least is run with 2 % less than it is predicted to "
        "need. Last, every choice was estimated one by one: the floating-point operations of a step of the "
        "planner's against the best that fits."
    )
    return f"{told}\n\n{table(heads, lines)}\n\n{measured('planner_cpu', found)}"


TABLES = {"truth": truth, "practical": practical, "settings": settings, "tables": tables}
