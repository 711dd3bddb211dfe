"""docs/plans.md and docs/index.md: people's questions, each with the command that answers it."""

from docs_tables.markdown import gib, listed, results, shown, table
from docs_tables.plans import by_settings


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
    speed = "tokens/s, not compared" if error is None else f"tokens/s ±{error:.0%}"
    lines = []
    for names, one in by_settings(row["profiles"]):
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


FIRST_QUESTIONS = ("8B on a 4090", "14B on a 5090", "70B on an MI300X", "70B on 8 x A100", "8B on Colab")
FIRST_QUESTIONS += ("8B on an M2", "cheapest card")
