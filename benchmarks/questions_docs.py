"""The answers in docs/plans.md: under each question its command and what the command says."""

from levers_docs import results, table

GIB = 2**30
_CARDS = 6  # rows of a comparison of cards


def rows() -> dict[str, dict]:
    return {row["question"]: row for row in results("questions")["rows"]}


def answer(name: str) -> str:
    """A question's command and tables."""
    row = rows()[name]
    make = _cards if "cards" in row else _frames if "frames" in row else _plan if row["profiles"] else _nothing
    return f"```bash\n{row['command']}\n```\n\n{make(row)}"


def _plan(row: dict) -> str:
    heads = ["", "settings", "GiB of each device", "tokens/s", "hours for 10M tokens", "GiB of host memory"]
    error = row["profiles"][0]["speed_error"]
    heads[3] += "" if error is None else f" ±{error:.0%}"
    lines = [_profile(row, names, one) for names, one in _profiles(row)]
    if plain := row["plain"]:
        fits = "" if plain["fits"] else ", does not fit"
        lines.append(["plain alternative", plain["settings"] + fits, *_figures(plain), ""])
    for method in row["methods"]:
        if method["method"] != row["method"]:
            lines.append([f"`{method['method']}`", method["settings"], *_figures(method), ""])
    cost = "" if row["cost"] is None else f"\n\nCost of {row['profile']}: {row['cost']:.2f}."
    return table(heads, lines) + cost


def _profiles(row: dict) -> list[tuple[str, dict]]:
    """The usual profile, and others with other settings; all names of the same settings together."""
    named: dict[str, list[dict]] = {}
    for one in row["profiles"]:
        named.setdefault(one["settings"], []).append(one)
    return [(", ".join(one["profile"] for one in group), group[0]) for group in named.values()]


def _profile(row: dict, names: str, one: dict) -> list[str]:
    name = f"**`{row['method']}`**: {names}" if row["profile"] in names.split(", ") else f"`{row['method']}`: {names}"
    return [name, one["settings"], *_figures({"estimated": True, **one}), f"{one['host_bytes'] / GIB:.1f}"]


def _figures(one: dict) -> list[str]:
    """GiB, tokens/s and hours; about, where only a sketch says so."""
    about, speed = "" if one["estimated"] else "about ", one["tokens_per_second"]
    hours = "" if speed is None else _hours(1e7 / speed / 3600)
    return [f"{about}{one['device_bytes'] / GIB:.1f}", "unknown" if speed is None else f"{speed:,.0f}", hours]


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours < 100 else f"{hours:,.0f}"


def _nothing(row: dict) -> str:
    lines = [[one["settings"], one["reason"]] for one in row["rejected"]]
    lines += [["what would fit", change] for change in row["nearest"]]
    return f"Nothing fits: {row['missing_bytes'] / GIB:.1f} GiB missing.\n\n{table(['', ''], lines)}"


def _cards(row: dict) -> str:
    money = row["currency"]
    heads = ["card", "price of an hour", "settings", "GiB of each device", "tokens/s", "hours", "cost"]
    lines = [
        [
            f"`{card['hardware']}`",
            f"{money}{card['price_per_hour']:.2f}",
            card["settings"],
            f"{'' if card['source'] == 'estimate' else 'about '}{card['device_bytes'] / GIB:.1f}",
            f"{card['tokens_per_second']:,.0f}",
            _hours(card["hours"]),
            f"{money}{card['cost']:.2f}",
        ]
        for card in row["cards"][:_CARDS]
    ]
    return table(heads, lines)


def _frames(row: dict) -> str:
    heads = ["pixels of a frame, at most", "frames", "tokens per sample", "GiB"]
    lines = [
        [
            f"{fit['max_pixels_per_frame'] or 'the model’s own'}",
            f"{fit['max_frames']}",
            f"{fit['seq_len']:,}",
            f"{fit['device_bytes'] / GIB:.1f}",
        ]
        for fit in row["frames"]
    ]
    return table(heads, lines)


def source() -> str:
    data = results("questions")
    versions = data["versions"]
    return (
        f"Predicted {data['date']} with torch {versions['torch']}, transformers {versions['transformers']}: "
        "[questions.json](../benchmarks/results/questions.json)."
    )


def first_answer(name: str) -> str:
    """A question's command and the usual profile alone, or the first cards."""
    row = rows()[name]
    made = _cards(row) if "cards" in row else _usual(row)
    return f"```bash\n{row['command']}\n```\n\n{made}"


def _usual(row: dict) -> str:
    if not row["profiles"]:
        return _nothing(row)
    one = next((one for one in row["profiles"] if one["profile"] == row["profile"]), row["profiles"][0])
    heads = ["method", "settings", "GiB of each device", "tokens/s", "hours for 10M tokens"]
    return table(heads, [[f"`{row['method']}`", one["settings"], *_figures({"estimated": True, **one})]])


def own_script() -> str:
    """A script in the shape of transformers' run_clm.py: predicted without its weights, then really trained."""
    row = next(row for row in results("estimator_scripts")["rows"] if row["script"] == "run_clm")
    lines = [[f"{row['predicted_bytes']:,}", f"{row['measured_bytes']:,}", f"{row['error']:+.2%}"]]
    heads = ["predicted peak of run_clm.py (bytes)", "measured on a CPU (bytes)", "error"]
    return f"{table(heads, lines)}\n\n[All scripts](estimate.md#a-script-of-your-own)."


_FIRST = (
    "8B on a 4090",
    "14B on a 5090",
    "70B on an MI300X",
    "70B on 8 x A100",
    "8B on Colab",
    "8B on an M2",
    "cheapest card",
)
FIRST_PAGE = {f"first {name}": (lambda name=name: first_answer(name)) for name in _FIRST} | {
    "first own script": own_script
}
TABLES = {**{name: (lambda name=name: answer(name)) for name in rows()}, "questions": source}
