"""Every table of README.md and docs/, by page and marker, from results/*.json, the package and docs/guides.toml."""

import json
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache, partial
from pathlib import Path
from typing import get_type_hints

from speed_published import GROUPS, summary

from hf_memopt import MemoryArguments, get_preset, list_presets
from hf_memopt.hardware.constants import MEASURABLE, TABLE, Constant, show_value
from hf_memopt.hardware.measured import DeviceFile, read_device_file
from hf_memopt.levers.arguments import PLAN_PROFILES, PROFILES
from hf_memopt.planner.video_tiers import guide_row
from hf_memopt.presets.preset import METHODS, Preset
from hf_memopt.presets.reference import largest_model
from hf_memopt.presets.video_tiers import all_tiers
from hf_memopt.recipe.arguments import RecipeArguments

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GIB, GB = 2**30, 10**9
KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "workspace", "communication")
METHOD_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}

# ---- what the tables have in common

# A column's text: a format string that is filled from the row, or a function of the row.
Cell = str | Callable[[dict], str]


@cache
def results(name: str) -> dict:
    """A benchmark's file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(rows: list[dict], columns: dict[str, Cell]) -> str:
    """A table of one line per row, with columns by their heads."""
    cells = [cell.format_map if isinstance(cell, str) else cell for cell in columns.values()]
    return table(list(columns), [[cell(row) for cell in cells] for row in rows])


def shown(name: str, form: str = ".1f", scale: int = GIB) -> Callable[[dict], str]:
    """A column of a number, in GiB unless said otherwise; empty where a row has none."""
    return lambda row: "" if row.get(name) is None else format(row[name] / scale, form)


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def link(data: dict, up: str = "../") -> str:
    file = f"{data['benchmark']}.json"
    return f"[{file}]({up}benchmarks/results/{file})"


def versions(data: dict) -> str:
    return f"torch {data['versions']['torch']}, transformers {data['versions']['transformers']}"


def predicted(name: str, up: str = "../", verb: str = "Predicted") -> str:
    """Where a table of predictions comes from."""
    data = results(name)
    return f"{verb} {data['date']} with {versions(data)}: {link(data, up)}."


def measured(name: str) -> str:
    """Where a table of measurements comes from."""
    data = results(name)
    machine = f"{data['hardware']['device']}, {data['hardware']['cores']} cores"
    return f"Measured {data['date']} on {machine}, {versions(data)}: {link(data)}."


# ---- docs/levers.md

# What guides say, beside what was measured: lever -> claim.
CLAIMS = {
    "activation_checkpointing (checkpoint_ratio=1)": "60–80 % of activations, 30–40 % more compute",
    "checkpoint_ratio=0.5": "40–50 % of activations, 15–20 % more compute",
    "activation_compression=int8": "50 % of activations",
    "activation_compression=int8, activation_checkpointing": "70–80 % of activations",
    "bf16": "50 % of weights and activations",
    "optim=adamw_8bit": "8 instead of 12 bytes per weight",
    "adam_mini": "6 instead of 12 bytes per weight",
}


def levers() -> str:
    rows = results("levers")["rows"]
    columns = {
        "lever": lambda row: row["lever"] + (" †" if "date" in row else ""),
        "peak": "{peak_ratio:.1%}",
        "step time": shown("step_time_ratio", ".2f", 1),
        "gradient error": shown("gradient_error", ".1e", 1),
        "held-out loss ×": shown("held_out_loss_ratio", ".4f", 1),
        "estimate error": "{predicted_error:+.2%}",
        "guides say": lambda row: CLAIMS.get(row["lever"], ""),
    }
    older = sorted({(row["date"], row["device"]) for row in rows if "date" in row})
    sources = [measured("levers"), *(f"Rows marked †: {date} on {device}." for date, device in older)]
    return f"{listed(rows, columns)}\n\n{' '.join(sources)}"


def optimizers() -> str:
    rows = results("optimizers")["rows"]
    columns = {
        "optimizer": "{optim}",
        "state bytes per weight": "{state_bytes_per_weight:.2f}",
        "step time ×": "{step_time_ratio:.2f}",
        "held-out loss": "{held_out_loss:.3f}",
        "learning rate": "{learning_rate:.1e}",
    }
    failed = "\n".join(f"* `{row['optim']}`: {row['why']}" for row in rows if not row["works"])
    made = listed([row for row in rows if row["works"]], columns)
    return f"{made}\n\nThese did not run:\n\n{failed}\n\n{measured('optimizers')}"


def preset_peaks() -> str:
    columns = {
        "preset": lambda row: row["job"].removeprefix("preset "),
        "plus": lambda row: ", ".join(f"{name}={value}" for name, value in row["levers"].items()),
        "micro-batch of effective batch": "{micro_batch} of {effective_batch}",
        "peak, relative to a plain Trainer": "{of_plain:.1%}",
    }
    return f"{listed(results('preset_peak')['rows'], columns)}\n\n{measured('preset_peak')}"


# ---- docs/memory.md

# Why a row is far off: read in the sources; what is only inferred says "probably".
ADAPTER_CAUSES = {
    "full-finetuning-lr_0.00001": "Adam's states are made at the end of the first step, among cached activations, "
    "whose segments they split; the estimator makes them first",
    "prefixtuning-lr_0.001": "the published peak probably is that of generation for 50 samples: prefixes alone make "
    "its KV cache grow token by token, beside what training has cached, and the 99th percentile over training steps "
    "is lower against the peak than in any other row",
    "frod-sparse0.02-lr_0.001": "probably: projections stay in host memory, and each forward copies them",
}


def adapters() -> str:
    """PEFT's adapters: measured, predicted, error, and what is known about the largest errors."""
    data = results("estimator_peft")
    columns = {
        "adapter": lambda row: f"`{row['name']}`" + (" (fitted)" if row["fitted"] else ""),
        "measured (GB)": shown("measured_bytes", ".2f", GB),
        "predicted (GB)": shown("predicted_bytes", ".2f", GB),
        "error": "{error:+.1%}",
        "tokens/s (measured)": "{tokens_per_second:,.0f}",
        "known cause": lambda row: ADAPTER_CAUSES.get(row["name"], ""),
    }
    first = data["rows"][0]
    return (
        f"{listed(sorted(data['rows'], key=lambda row: row['name']), columns)}\n\n"
        f"Fitted: the tokens of the longest batch, {first['seq_len']}, on the row marked so. Repeated: PEFT's loop, "
        "which holds the model's outputs through backward with its KV cache on, and AdaLoRA as peft had it then (peft "
        "0.21 trains its `ranknum`, and keeps every adapter's output for backward). Predicted with "
        f"peft {first['versions']['peft']}, transformers {data['versions']['transformers']}; "
        f"measured by PEFT on an L40S with {first['published_versions']} or later: {link(data)}."
    )


def optimizer_states() -> str:
    """Every `optim`: states and errors of the peak, or why there are none."""
    columns = {
        "optimizer": "`{optim}`",
        "states (MiB)": shown("state_bytes", ".2f", 2**20),
        "measured": shown("measured_state_bytes", ".2f", 2**20),
        "peak": shown("traced_error", "+.2%", 1),
        "refused, or not measured": lambda row: row.get("refused") or row.get("unmeasured") or "",
    }
    return f"{listed(results('estimator_optimizers')['rows'], columns)}\n\n{measured('estimator_optimizers')}"


def assumptions() -> str:
    """A line a row of the table of constants."""
    columns = {
        "constant": "`{name}`",
        "value": lambda row: f"{row['value']:,.0f}" if row["value"] >= 1000 else f"{row['value']:g}",
        "unit": "{unit}",
        "where": "{where}",
        "source": "{source}",
    }
    return listed([{**vars(row), "where": _where(row)} for row in TABLE], columns)


def _where(row: Constant) -> str:
    """Of rows with one name the first that applies counts."""
    backends = ", ".join(row.backends or ())
    if row.architectures is not None:
        return f"{backends}, {', '.join(row.architectures)}"
    if row.capability is None:
        several = sum(other.name == row.name for other in TABLE) > 1
        return backends or ("elsewhere" if several else "everywhere")
    lowest, highest = row.capability
    return f"{backends}, compute capability {lowest:g} {'and later' if highest > 90 else f'to {highest:g}'}"


def measured_cards(folder: Path = RESULTS) -> str:
    """Constants by device (devices/*.json), then errors by device (gpu/*/tables.json); else that there are none.

    Args:
        folder: of the results.
    """
    files = [read_device_file(path) for path in sorted((folder / "devices").glob("*.json"))]
    runs = [(path.parent, json.loads(path.read_text())) for path in sorted((folder / "gpu").glob("*/results.json"))]
    runs = [(path, run) for path, run in runs if not run["rehearsal"]]
    parts = ([_constants(files)] if files else []) + ([_card_errors(runs)] if runs else [])
    return "\n\n".join(parts) or "Measured on these cards: nothing yet."


def _constants(files: list[DeviceFile]) -> str:
    names = [name for name in MEASURABLE if any(name in file.constants for file in files)]
    heads = ["device", *(MEASURABLE[name].label for name in names), "reserved bytes off by", "measured"]
    rows = [
        [
            file.device["label"],
            *(show_value(name, file.constants[name]) if name in file.constants else "" for name in names),
            _range(list(file.reserved_errors)),
            file.source.partition("(")[2].rstrip(")"),
        ]
        for file in files
    ]
    return table(heads, rows)


def _card_errors(runs: list[tuple[Path, dict]]) -> str:
    rows = []
    for folder, content in runs:
        path = folder / "tables.json"
        tables = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        jobs = tables.get("Memory, predicted beside measured", [])
        columns = [f"error of {kind}_bytes" for kind in ("allocated", "reserved", "device")]
        errors = [[job[name] for job in jobs if name in job] for name in columns]
        date = max((row["date"] for row in content["rows"]), default="")
        rows.append(
            [
                content["hardware"]["label"],
                str(len(content["rows"])),
                *(f"{statistics.median(map(abs, off)):.1%} ({_range(off)})" if off else "" for off in errors),
                f"{date}, torch {content['versions'].get('torch')}, driver {content['driver']}",
            ]
        )
    made = table(["device", "cases", "allocated", "reserved", "device", "measured"], rows)
    return f"{made}\n\nErrors of predictions: the median, and the range."


def _range(values: list[float]) -> str:
    return f"{min(values):+.1%} to {max(values):+.1%}".replace("-", "−") if values else ""


# ---- docs/estimate.md

# Why a script is more than 1 % off: read in the sources.
SCRIPT_CAUSES = {
    "run_translation": "label smoothing uses the logits twice: autograd adds the second gradient to the first in "
    "place on real tensors, and makes a third on traced ones",
}


def scripts() -> str:
    """Every script: measured, predicted, error, what the dry-run took."""
    data = results("estimator_scripts")
    columns = {
        "script": "[{script}](../tests/scripts/{script}.py)",
        "kind": lambda row: escaped(row["kind"].rstrip(".")),
        "measured (bytes)": "{measured_bytes:,}",
        "predicted (bytes)": "{predicted_bytes:,}",
        "error": "{error:+.2%}",
        "dry-run (CPU s)": "{cpu_seconds:.0f}",
        "known cause": lambda row: SCRIPT_CAUSES.get(row["script"], ""),
    }
    rows = sorted(data["rows"], key=lambda row: row["script"])
    errors = [abs(row["error"]) for row in rows]
    return (
        f"{listed(rows, columns)}\n\n{len(rows)} scripts: median {statistics.median(errors):.4%}, largest "
        f"{max(errors):.2%}; files that the dry-runs left: {sum(len(row['written']) for row in rows)}. "
        f"Measured with {versions(data)}: {link(data)}."
    )


def model_types() -> str:
    """Per task: answers, refusals and failures, and how far off the measured ones are; then every refusal's reason."""
    data = results("estimator_model_types")
    outcomes = ("answered", "refused", "failed", "no model")
    lines = []
    for task in [*dict.fromkeys(row["task"] for row in data["rows"]), None]:
        rows = [row for row in data["rows"] if task in (row["task"], None)]
        errors = [abs(row["error"]) for row in rows if "error" in row]
        counts = [len(rows), *(sum(row["outcome"] == outcome for row in rows) for outcome in outcomes), len(errors)]
        off = [f"{statistics.median(errors):.3%}", f"{max(errors):.2%}"] if errors else ["", ""]
        lines.append([f"`{task}`" if task else "all", *map(str, counts), *off])
    reasons = [
        f"* `{row['model_type']}`, {row['task']}: {row['reason'].replace('|', '/')}"
        for row in data["rows"]
        if row["outcome"] not in ("answered", "no model")
    ]
    heads = ["task", "model types", *outcomes, "measured", "median error", "largest error"]
    return "\n".join(
        [
            f"{table(heads, lines)}\n",
            "No model: transformers itself makes none from the defaults of the configuration's class (a package is "
            f"missing, or a size has no default). transformers {data['versions']['transformers']}; every row: "
            f"{link(data)}.\n\nRefused, and why:\n",
            *reasons,
        ]
    )


# ---- docs/plans.md, docs/index.md


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
    for names, profile in _by_settings(plan["profiles"]):
        held = [(kind, profile["breakdown"][kind]) for kind in KINDS if profile["breakdown"][kind] > GIB / 20]
        peak = ", ".join(f"{kind.replace('_', ' ')} {gib(size)}" for kind, size in held)
        sizes = gib(profile["device_bytes"]), gib(profile["host_bytes"])
        lines.append([f"{plan['method']}: {names}", profile["settings"], *sizes, peak])
    return lines


def _by_settings(profiles: list[dict]) -> list[tuple[str, dict]]:
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


def question_rows() -> dict[str, dict]:
    return {row["question"]: row for row in results("questions")["rows"]}


def answer(name: str, short: bool = False) -> str:
    """A question's command and tables; in short, the usual profile alone."""
    row = question_rows()[name]
    make = _cards if "cards" in row else _frames if "frames" in row else _plan if row["profiles"] else _nothing
    made = _usual(row) if short and make is _plan else make(row)
    return f"```bash\n{row['command']}\n```\n\n{made}"


def _plan(row: dict) -> str:
    error = row["profiles"][0]["speed_error"]
    speed = "tokens/s" if error is None else f"tokens/s ±{error:.0%}"
    lines = []
    for names, one in _by_settings(row["profiles"]):
        bold = "**" if row["profile"] in names.split(", ") else ""
        name = f"{bold}`{row['method']}`{bold}: {names}"
        lines.append([name, one["settings"], *_figures({"estimated": True, **one}), gib(one["host_bytes"])])
    if plain := row["plain"]:
        fits = "" if plain["fits"] else ", does not fit"
        lines.append(["plain alternative", plain["settings"] + fits, *_figures(plain), ""])
    for method in row["methods"]:
        if method["method"] != row["method"]:
            lines.append([f"`{method['method']}`", method["settings"], *_figures(method), ""])
    cost = "" if row["cost"] is None else f"\n\nCost of {row['profile']}: {row['cost']:.2f}."
    heads = ["", "settings", "GiB of each device", speed, "hours for 10M tokens", "GiB of host memory"]
    return table(heads, lines) + cost


def _figures(one: dict) -> list[str]:
    """GiB, tokens/s and hours; about, where only a sketch says so."""
    about, speed = "" if one["estimated"] else "about ", one["tokens_per_second"]
    hours = "" if speed is None else _hours(1e7 / speed / 3600)
    return [about + gib(one["device_bytes"]), "unknown" if speed is None else f"{speed:,.0f}", hours]


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours < 100 else f"{hours:,.0f}"


def _usual(row: dict) -> str:
    one = next((one for one in row["profiles"] if one["profile"] == row["profile"]), row["profiles"][0])
    heads = ["method", "settings", "GiB of each device", "tokens/s", "hours for 10M tokens"]
    return table(heads, [[f"`{row['method']}`", one["settings"], *_figures({"estimated": True, **one})]])


def _nothing(row: dict) -> str:
    lines = [[one["settings"], one["reason"]] for one in row["rejected"]]
    lines += [["what would fit", change] for change in row["nearest"]]
    return f"Nothing fits: {gib(row['missing_bytes'])} GiB missing.\n\n{table(['', ''], lines)}"


def _cards(row: dict) -> str:
    money = row["currency"]
    columns = {
        "card": "`{hardware}`",
        "price of an hour": f"{money}{{price_per_hour:.2f}}",
        "settings": "{settings}",
        "GiB of each device": lambda card: (
            f"{'' if card['source'] == 'estimate' else 'about '}{gib(card['device_bytes'])}"
        ),
        "tokens/s": "{tokens_per_second:,.0f}",
        "hours": lambda card: _hours(card["hours"]),
        "cost": f"{money}{{cost:.2f}}",
    }
    return listed(row["cards"][:6], columns)  # the cheapest


def _frames(row: dict) -> str:
    columns = {
        "pixels of a frame, at most": lambda fit: f"{fit['max_pixels_per_frame'] or 'the model’s own'}",
        "frames": "{max_frames}",
        "tokens per sample": "{seq_len:,}",
        "GiB": shown("device_bytes"),
    }
    return listed(row["frames"], columns)


def own_script() -> str:
    """A script in the shape of transformers' run_clm.py: predicted without its weights, then really trained."""
    columns = {
        "predicted peak of run_clm.py (bytes)": "{predicted_bytes:,}",
        "measured on a CPU (bytes)": "{measured_bytes:,}",
        "error": "{error:+.2%}",
    }
    rows = [row for row in results("estimator_scripts")["rows"] if row["script"] == "run_clm"]
    return f"{listed(rows, columns)}\n\n[All scripts](estimate.md#a-script-of-your-own)."


SPEED_GROUPS = {
    "A100, fitted": "Mistral-7B, SantaCoder: full, LoRA, QLoRA on 1 and 2 A100s; five constants were fitted to these",
    "A100": "PowerLM-3B, Mixtral-8x7B: likewise",
    "A100, fused kernels": "all four, with fused kernels that a trace does not have: predictions should be too slow",
    "L40S": "Llama-3.2-3B, full and 33 adapters in batches of 4 short samples, on an L40S",
}


def published_speeds() -> str:
    """A row for every group of published runs."""
    lines = [
        "| published runs | rows | median error | worst | within 25% | pairs ranked right | worst regret |",
        "|---|---|---|---|---|---|---|",
    ]
    data = results("speed_published")
    for name, is_member in GROUPS.items():
        rows = list(filter(is_member, data["rows"]))
        ids = {row["id"] for row in rows}
        # What the worst choice among a group's settings loses against the fastest of them.
        regret = max((loss["regret"] for loss in data["regrets"] if loss["chosen"] in ids), default=0.0)
        cells = "{rows} | {median:.1%} | {worst:.0%} | {near:.0%} | {pairs}".format(**summary(rows))
        lines.append(f"| {SPEED_GROUPS[name]} | {cells} | {regret:.1%} |")
    return "\n".join(lines).replace("%", " %")


# ---- docs/clusters.md


def engines() -> str:
    """Real processes of every engine, compared with one process and with the estimate."""
    columns = {
        "strategy": "{strategy}",
        "processes": "{processes}",
        "MB on the peak rank": lambda row: f"{max(row['measured_bytes']) / 1e6:.2f}",
        "largest error of the estimate, any rank": lambda row: f"{100 * row['largest_error']:+.3f} %",
        "largest loss difference from one process": "{largest_loss_difference:g}",
    }
    return f"{listed(results('engines')['rows'], columns)}\n\n{measured('engines')}"


def clusters() -> str:
    """Cluster presets under every engine."""

    def need(row: dict) -> str:
        if "refused" in row:
            return "refused"
        fits = "" if row["device_bytes"] <= row["capacity_bytes"] else ", does not fit"
        return f"{gib(row['device_bytes'])} of {gib(row['capacity_bytes'])}{fits}"

    columns = {
        "strategy": "{strategy}",
        "GiB per device": need,
        "GiB of host memory per process": lambda row: row.get("refused") or f"{row['host_bytes'] / GIB:.0f}",
    }
    jobs: dict[str, list[dict]] = {}
    for row in results("clusters")["rows"]:
        jobs.setdefault(f"`{row['preset']}`, {row['method']}, `{row['model']}`:", []).append(row)
    parts = [f"{job}\n\n{listed(rows, columns)}" for job, rows in jobs.items()]
    return "\n\n".join([*parts, predicted("clusters")])


def offloading() -> str:
    """The predicted cost of offloading, and what guides say."""
    rows = results("offloading")["rows"]
    places = list(dict.fromkeys(place for row in rows for place in row["times_as_long"]))
    lines = [
        [
            f"`{row['model']}` on `{row['hardware']}`",
            row["strategy"].replace("none", "one device"),
            f"{row['tokens_of_a_device']:,}",
            *(shown(place, ".2f", 1)(row["times_as_long"]) for place in places),
        ]
        for row in rows
    ]
    lines = [line[:3] + [f"{factor} ×" if factor else "" for factor in line[3:]] for line in lines]
    lines.append(["guides say", "", "", "2–3 ×, 10–20 ×", "5–10 ×", "5–10 ×"])
    heads = ["job", "without offloading", "tokens per device and step", *places]
    return f"{table(heads, lines)}\n\n{predicted('offloading')}"


# ---- docs/grpo.md, docs/trl.md


def grpo_phases() -> str:
    """Every case trained on a CPU: the error of each phase's peak."""
    names = ["peak", "generation", "log_probs", "rewards", "forward", "backward", "optimizer"]
    cases: dict[str, dict[str, float]] = {}
    for row in results("grpo")["rows"]:
        if row["part"] == "cpu":
            cases.setdefault(row["case"], {})[row["phase"]] = row["error"]
    rows = [[case, *(shown(name, "+.2%", 1)(errors) for name in names)] for case, errors in cases.items()]
    return table(["case", *(name.replace("_", " ") for name in names)], rows)


def grpo_published() -> str:
    """Published peaks of other versions of TRL beside predictions for the installed one."""
    columns = {
        "model": "{model}",
        "card": lambda row: row["card"].removeprefix("NVIDIA ").removeprefix("GeForce "),
        "group × completion": "{num_generations} × {max_completion_length}",
        "published (GiB)": shown("peak_allocated_bytes", ".2f"),
        "predicted (GiB)": shown("predicted_bytes", ".2f"),
        "of it, generation (GiB)": lambda row: f"{row['phases']['generation'] / GIB:.2f}",
        "published above predicted (bytes a logit)": "{above_bytes_per_logit:.1f}",
    }
    return listed([row for row in results("grpo")["rows"] if row["part"] == "published"], columns)


def trl_trainers() -> str:
    """Every job: what it takes, at the peak, and on which cards it fits."""
    rows = results("trl")["rows"]
    jobs = [row for row in rows if "task" in row]
    columns: dict[str, Cell] = {
        "task": "{task}",
        "method": "{method}",
        "samples": "{samples}",
        "tokens": "{tokens:,}",
        "settings": lambda job: ", ".join(f"`{name}={value}`" for name, value in job["fields"].items()),
        "device (GiB)": lambda job: f"**{gib(job['device_bytes'])}**",
    }
    for kind in KINDS[:5]:
        columns[kind.replace("_", " ")] = lambda job, kind=kind: gib(job["breakdown"][kind])
    for card in (row for row in rows if "card" in row):
        size = card["capacity_bytes"]
        head = f"{card['card']} ({gib(size)} GiB)"
        columns[head] = lambda job, size=size: "yes" if job["device_bytes"] <= size else "no"
    return f"{listed(jobs, columns)}\n\n{jobs[0]['model']}, {predicted('trl', verb='predicted')}"


def trl_published() -> str:
    """Peaks that TRL's pull requests and notebooks state, beside predictions for the installed version."""
    columns = {
        "job": "{task}: {model}, {gpu}",
        "measured with": "{versions}",
        "inferred": "{inferred}",
        "published (GiB)": lambda row: f"{gib(row['peak_bytes'])} {row['metric'].split('_')[1]}",
        "predicted (GiB)": shown("predicted_bytes"),
        "published above predicted (bytes a logit)": "{above_bytes_per_logit:.1f}",
    }
    return listed(results("trl_published")["rows"], columns)


# ---- docs/video.md

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


# ---- README.md, docs/quickstart.md


def cards(up: str) -> str:
    """One row per card, one column per model: the largest method that fits, and what the next larger one would need.

    Args:
        up: relative path from the page to the repository root.
    """
    rows = results("cards")["rows"]
    needs = {(row["kind"], row["model"], row["method"]): row.get("device_bytes") for row in rows if "model" in row}
    models = list(dict.fromkeys(model for _, model, _ in needs))
    lines = []
    for card in (row for row in rows if "card" in row):
        sizes = ({method: needs.get((card["kind"], model, method)) for method in METHOD_NAMES} for model in models)
        label = f"{card['label']} ({gib(card['capacity_bytes'])} GiB)"
        lines.append([label, *(largest_method(size, card["capacity_bytes"]) for size in sizes)])
    return f"{table(['card', *(f'`{model}`' for model in models)], lines)}\n\n{predicted('cards', up)}"


def largest_method(sizes: dict[str, int | None], capacity: int) -> str:
    """The largest method that fits, in bold, and the next larger one, struck through; only the latter if none fits."""
    too_large = ""
    for method, size in sizes.items():
        if size is None:
            continue
        need = f"{METHOD_NAMES[method]} {gib(size)}"
        if size <= capacity:
            tight = " (tight)" if size > PLAN_PROFILES["maximum"][1] * capacity else ""  # more than plans fill
            return f"**{need}**{tight} {too_large}".strip()
        too_large = f"~~{need}~~"
    return f"{too_large} out of memory"


# ---- docs/api.md, docs/training.md, docs/presets.md: from the package


def arguments(kind: type) -> str:
    """One row per field of a class of arguments."""
    types = get_type_hints(kind)  # HfArgumentParser rewrites the types on the fields themselves
    lines = []
    for item in fields(kind):
        of_type = types[item.name]
        name = (of_type.__name__ if isinstance(of_type, type) else str(of_type)).replace(" | ", " or ")
        default = "" if item.default is MISSING else f"`{item.default!r}`"
        lines.append([f"`{item.name}`", f"`{name}`", default, item.metadata.get("help", "")])
    return table(["field", "type", "default", "what it does"], lines)


def profiles() -> str:
    """One row per memory profile."""
    lines = [
        [f"{name} (default)" if name == "balanced" else name, *(f"{share:.2f}" for share in shares)]
        for name, shares in PROFILES.items()
    ]
    return table(["`memory_profile`", "target", "warning", "critical", "emergency"], lines)


def presets() -> str:
    """One row per preset: hardware, batch of full fine-tuning, the model of each method, command."""
    lines = []
    for name in list_presets():
        preset = get_preset(name)
        batches = preset.batches(preset.processes)
        micro, accumulation = preset.micro_batch_size, preset.gradient_accumulation_steps
        launch = f"accelerate launch --config_file accelerate_configs/{_config(preset)} recipes/sft.py --preset {name}"
        if preset.machines > 1:
            launch = f"sbatch accelerate_configs/slurm/{name}.sbatch"
        many = f"{preset.processes} × " if preset.processes > 1 else ""
        lines.append(
            [
                f"`{name}`",
                f"{many}{preset.hardware.label}",
                f"{micro} × {accumulation} × {batches} = {micro * accumulation * batches}",
                str(preset.seq_len),
                *(_models(get_preset(name, method)) for method in METHODS),
                f"`{launch}`",
            ]
        )
    return table(["preset", "hardware", "batch (full)", "tokens (full)", "full", "LoRA", "QLoRA", "command"], lines)


def _models(preset: Preset) -> str:
    """The model that a preset is for; in brackets a larger one that fits at micro-batch 1."""
    model, largest = preset.reference_model, largest_model(preset) or preset.reference_model
    short = [one.rpartition("/")[2] for one in dict.fromkeys([model, largest])]
    return f"{short[0]} ({short[1]})" if len(short) > 1 else short[0]


def _config(preset: Preset) -> str:
    """The shipped YAML of a preset: its own, or that of its engine."""
    folder = ROOT / "accelerate_configs"
    names = [f"{preset.name}.yaml", f"{preset.name}_{preset.strategy}.yaml", f"{preset.name.rpartition('_')[0]}.yaml"]
    return next(name for name in names if (folder / name).is_file())


# ---- docs/guides.md: what the founding guides say, item by item

GUIDE_STATES = ("works", "differs", "needs a card", "left out")


def guides() -> list[dict]:
    """The guides of docs/guides.toml: `name`, and `section`s of `name` and `rows`."""
    return tomllib.loads((ROOT / "docs/guides.toml").read_text(encoding="utf-8"))["guide"]


def guide_rows() -> list[dict]:
    """Every row of every guide."""
    return [row for guide in guides() for section in guide["section"] for row in section["rows"]]


def guide_items() -> str:
    """How many items are in each state; then one heading per guide and section, one row per item."""
    states = Counter(row["state"] for row in guide_rows())
    counts = ", ".join(f"{states[state]} {state}" for state in GUIDE_STATES if states[state])
    parts = [f"{sum(states.values())} items: {counts}."]
    columns = {
        "the guide says": lambda row: escaped(row["item"]),
        "here": lambda row: escaped(row["here"]),
        "state": lambda row: escaped(_state(row)),
    }
    for guide in guides():
        parts.append(f"## {guide['name']}")
        for section in guide["section"]:
            parts += [f"### {section['name']}", listed(section["rows"], columns)]
    return "\n\n".join(parts)


def _state(row: dict) -> str:
    """State of a row, why, and the tests or command that show it."""
    evidence = []
    for test in row.get("tested_by", ()):
        file, _, name = test.partition("::")
        evidence.append(f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})")
    if "command" in row:
        evidence.append(f"`{row['command']}`")
    state = f"{row['state']}: {row['why']}" if "why" in row else row["state"]
    return ("; " if "why" in row else ": ").join(filter(None, (state, ", ".join(evidence))))


# ---- page -> marker -> table

FIRST_QUESTIONS = ("8B on a 4090", "14B on a 5090", "70B on an MI300X", "70B on 8 x A100", "8B on Colab")
FIRST_QUESTIONS += ("8B on an M2", "cheapest card")
API = {
    "memory arguments": partial(arguments, MemoryArguments),
    "recipe arguments": partial(arguments, RecipeArguments),
    "profiles": profiles,
}
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"cards": partial(cards, ""), "published speeds": published_speeds},
    "docs/api.md": API,
    "docs/clusters.md": {"engines": engines, "predicted": clusters, "offloading": offloading},
    "docs/estimate.md": {"model types": model_types, "scripts": scripts},
    "docs/grpo.md": {"phases of GRPO": grpo_phases, "published GRPO": grpo_published},
    "docs/guides.md": {"guides": guide_items},
    "docs/index.md": {f"first {name}": partial(answer, name, short=True) for name in FIRST_QUESTIONS}
    | {"first own script": own_script},
    "docs/levers.md": {"levers": levers, "optimizers": optimizers, "presets": preset_peaks},
    "docs/memory.md": {
        "assumptions": assumptions,
        "measured cards": measured_cards,
        "optimizer_states": optimizer_states,
        "adapters": adapters,
    },
    "docs/plans.md": {
        "lengths": lengths,
        "truth": truth,
        "practical": practical,
        "settings": settings,
        "tables": guide_tables,
        "questions": partial(predicted, "questions"),
        "published speeds": published_speeds,
    }
    | {name: partial(answer, name) for name in question_rows()},
    "docs/presets.md": {"presets": presets},
    "docs/quickstart.md": {"cards of docs": partial(cards, "../")},
    "docs/training.md": API,
    "docs/trl.md": {"trl trainers": trl_trainers, "trl published": trl_published},
    "docs/video.md": {"video memory": video_memory, "video tiers": video_tiers, "video families": video_families},
}
