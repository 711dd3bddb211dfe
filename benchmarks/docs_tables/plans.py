"""docs/plans.md: plans beside real runs, longest sequences, and what the founding guides describe."""

from functools import partial

from docs_tables.markdown import GB, GIB, KINDS, gib, listed, measured, predicted, results, shown, table


def plan_rows(kind: str, **wanted) -> list[dict]:
    rows = [row for row in results("plans")["rows"] if row["table"] == kind]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def practical() -> str:
    """The guides' practical configurations as plans."""
    parts = []
    for title in dict.fromkeys(row["title"] for row in plan_rows("plan")):
        plans = plan_rows("plan", title=title)
        first = plans[0]
        heads = ["method: profiles", "settings", "GiB per device"]
        heads += ["GiB of host memory per process", "at the peak, GiB"]
        parts += [
            f"**{title}**",
            f"`{first['model']}` on `{first['hardware']}`, {first['effective_batch_size']} samples of "
            f"{first['tokens']} tokens per step:",
            table(heads, [line for plan in plans for line in _plan_lines(plan)]),
        ]
        rejected = [rejection for plan in plans for rejection in plan["rejected"]]
        methods = ("full fine-tuning", "LoRA", "QLoRA")
        parts += [f"Ruled out: {one['reason']}." for one in rejected if one["settings"] in methods]
        if changes := [change for plan in plans for change in plan["nearest"]]:
            parts.append(f"What would fit: {'; '.join(changes)}.")
    return "\n\n".join([*parts, predicted("plans")])


def _plan_lines(plan: dict) -> list[list[str]]:
    if not plan["profiles"]:
        return [[plan["method"], "nothing fits", f"{gib(plan['missing_bytes'])} missing", "", ""]]
    lines = []
    for names, profile in by_settings(plan["profiles"]):
        held = [(kind, profile["breakdown"][kind]) for kind in KINDS if profile["breakdown"][kind] > GIB / 20]
        peak = ", ".join(f"{kind.replace('_', ' ')} {gib(size)}" for kind, size in held)
        sizes = gib(profile["device_bytes"]), gib(profile["host_bytes"])
        lines.append([f"{plan['method']}: {names}", profile["settings"], *sizes, peak])
    return lines


def by_settings(profiles: list[dict]) -> list[tuple[str, dict]]:
    """Profiles by their settings: the names of those that share them, and the first."""
    named: dict[str, list[dict]] = {}
    for profile in profiles:
        named.setdefault(profile["settings"], []).append(profile)
    return [(", ".join(one["profile"] for one in group), group[0]) for group in named.values()]


def settings() -> str:
    """What the guides' own settings are predicted to need."""
    columns = {
        "settings": "{title}",
        "guide, GB": "{guide_gb}",
        "predicted, GB": shown("device_bytes", scale=GB),
        "capacity, GB": shown("capacity_bytes", scale=GB),
        "fits": _fits,
    }
    (split,) = plan_rows("split")
    weights, gradients, states = (split[f"{kind}_bytes"] / GB for kind in ("weights", "gradients", "states"))
    return (
        f"{listed(plan_rows('settings'), columns)}\n\n"
        "The guide's own parallelism for 405B (tensor 8 × pipeline 4 × data 4, ZeRO-1) would hold, by arithmetic, "
        f"{weights:.1f} GB of bf16 weights, {gradients:.1f} GB of bf16 gradients and {states:.1f} GB of fp32 masters "
        f"and Adam states per device: {weights + gradients + states:.1f} GB before activations, more than the card "
        "has. fp8 matmuls do not change that, since masters and states stay in fp32. The Hugging Face Trainer "
        f"supports neither tensor nor pipeline parallelism of Megatron's kind.\n\n{predicted('plans')}"
    )


def _fits(row: dict) -> str:
    return "yes" if row["fits"] else "no"


GUIDE_TABLES = {
    "small test": "A test with 34,083,904 weights, forward and backward (here a Llama of about that size, SGD):",
    "platforms": "Settings by platform, for 0.5 GB of weights (here SmolLM2-135M, AdamW, fp32 weights):",
    "512M on 44 GB": "512M weights on four L40S (here Qwen3-0.6B, DDP, checkpointing in all layers):",
    "2B video": "A 2B video model before and after (here Qwen2.5-VL-3B, LoRA, frozen tower, 224 × 224):",
    "ZeRO": "ZeRO, 7B (Llama-2-7B) on 8 devices. The guide counts 4 bytes of states per weight; DeepSpeed keeps 12 "
    "(an fp32 master and two states), and the peak includes activations, logits and buckets:",
}


def guide_tables() -> str:
    """The guides' tables and predictions."""
    columns = {
        "settings": "{title}",
        "guide, GB": "{guide_gb}",
        "allocated, GB": shown("peak_allocated_bytes", scale=GB),
        "device, GB": shown("device_bytes", scale=GB),
        "fits its card": _fits,
    }
    zero = {
        "engine": "{title}",
        "guide, GB": "{guide_gb}",
        "2 + 2 + 4 bytes per weight, GB": "{by_the_guides_bytes_gb:.2f}",
        "DeepSpeed's formula, GB": shown("deepspeeds_formula_bytes", scale=GB),
        "weights": lambda row: shown("parameters", scale=GB)(row["breakdown"]),
        "gradients": lambda row: shown("gradients", scale=GB)(row["breakdown"]),
        "states": lambda row: shown("optimizer_states", scale=GB)(row["breakdown"]),
        "at the peak": shown("peak_allocated_bytes", scale=GB),
    }
    parts = []
    for name, caption in GUIDE_TABLES.items():
        parts += [caption, listed(plan_rows(name), zero if name == "ZeRO" else columns)]
    return "\n\n".join([*parts, predicted("plans")])


def truth() -> str:
    """Plans under a memory budget, compared with real runs."""

    def largest_error(row: dict) -> str:
        errors = (profile["predicted_bytes"] / profile["measured_bytes"] - 1 for profile in row["profiles"])
        return f"{max(errors, key=abs):+.2%}"

    columns = {
        "model": "{family}, {method}, {tokens} tokens",
        "budget, MB": shown("budget_bytes", ".0f", 10**6),
        "profiles that ran": lambda row: f"{sum(p['survived'] for p in row['profiles'])} of {len(row['profiles'])}",
        "largest error of the estimate": largest_error,
        "with 2 % too little": lambda row: "fails" if row["under_the_smallest_fails"] else "runs",
        "profile maximum": "{chosen}",
        "FLOPs, relative to the best": lambda row: f"{row['operations_chosen'] / row['operations_best']:.3f}",
    }
    return (
        "A memory budget stands for the card. With the allocator limited to it, every profile that is predicted to "
        "fit trains, evaluates, saves and resumes. The choice that needs the least memory is also run with 2 % less "
        "than predicted. Finally, every choice is estimated in full: the last column compares the FLOPs per step of "
        "the planner's choice with those of the best choice that fits."
        f"\n\n{listed(results('planner_cpu')['rows'], columns)}\n\n{measured('planner_cpu')}"
    )


def lengths() -> str:
    """The longest sequences by card, and what each memory feature adds."""
    rows = results("lengths")["rows"]
    cards = list(dict.fromkeys(row["hardware"] for row in rows))
    lines: dict[tuple, list[str]] = {}
    for row in rows:
        line = lines.setdefault((row["method"], row["settings"]), [""] * len(cards))
        limit = "" if row["limited_by"] == "device" else f" ({row['limited_by']})"
        line[cards.index(row["hardware"])] = f"{row['seq_len']:,}{limit}"
    made = [[f"`{method}`", features, *line] for (method, features), line in lines.items()]
    return f"{table(['method', 'settings', *(f'`{card}`' for card in cards)], made)}\n\n{predicted('lengths')}"


def small_cards() -> str:
    """Mixtures of experts on cards of 12, 16 and 24 GB."""
    columns = {
        "model": "{model}",
        "card": lambda row: f"`{row['card']}`",
        "settings": lambda row: row["settings"] or "nothing fits",
        "GiB of the card": shown("device_bytes"),
        "GiB of host memory": shown("host_bytes"),
        "tokens/s, not compared": shown("tokens_per_second", ",.0f", 1),
        "others state": lambda row: row["stated"] or "",
    }
    return f"{listed(results('small_cards')['rows'], columns)}\n\n{predicted('small_cards')}"


TABLES = {
    "lengths": lengths,
    "small cards": small_cards,
    "truth": truth,
    "practical": practical,
    "settings": settings,
    "tables": guide_tables,
    "questions": partial(predicted, "questions"),
}
