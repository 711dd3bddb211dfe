"""Answers as HTML: a verdict, what fills the memory, the timeline and the plan's profiles."""

import re
from html import escape
from pathlib import Path
from typing import Any

from hf_memopt.charts import PARTS
from hf_memopt.estimator.timing.duration import predicted_within, time_text, two_digits
from hf_memopt.foreign.edits import in_words
from hf_memopt.hardware.catalog import catalog
from hf_memopt.units import size


def show_error(sentence: str) -> str:
    """A refused or failed question, which screen readers announce at once."""
    return f'<p class="memopt-no" role="alert">{escape(sentence)}</p>'


def show_estimate(estimate: dict[str, Any], picture: Path) -> str:
    """Show the answer of estimate.

    Args:
        estimate: its JSON.
        picture: the timeline, an HTML file of charts.save(); left out where it is missing.
    """
    needed, capacity = estimate["device_bytes"], estimate["capacity_bytes"]
    verdict = {True: "Yes, it fits", False: "No, it does not fit", None: "Capacity unknown"}[estimate["fits"]]
    job = f"{estimate['model']}, {estimate['method']}, on {_devices(estimate)}"
    of = f" of {size(capacity)}" if capacity else ""
    tone = "no" if estimate["fits"] is False else "yes"
    parts = [
        f'<p class="memopt-{tone}" role="status"><strong>{verdict}</strong>: {escape(job)}: {size(needed)}{of} '
        f"at the peak, in {escape(estimate['phase'])}.</p>",
        _speed(estimate, estimate["duration"]),
        _bars(estimate["breakdown"] | {"context and allocator": needed - sum(estimate["breakdown"].values())}),
        _changes(estimate["levers"]),
    ]
    if picture.is_file():
        parts.append(picture.read_text(encoding="utf-8"))
    return "".join(parts) + _notes(estimate)


def _notes(answer: dict[str, Any]) -> str:
    return "".join(f"<p><small>{escape(note)}</small></p>" for note in answer["notes"])


def _devices(answer: dict[str, Any]) -> str:
    """The card as it was understood, and how many."""
    label = catalog()[answer["hardware"]].label if answer["hardware"] in catalog() else answer["hardware"]
    return f"{answer['devices']} × {label}" if answer["devices"] > 1 else label


def _speed(estimate: dict[str, Any], took: dict[str, Any] | None) -> str:
    """Tokens per second, which cards of unknown speed lack; time and cost where asked."""
    speed, error = estimate["tokens_per_second"], estimate["speed_error"]
    if speed is None:
        return ""
    cost = "" if took is None or took["cost"] is None else f", cost in total {two_digits(took['cost'])}"
    time = "" if took is None else f"; {time_text(took['seconds'])} for {took['tokens']:,} tokens{cost}"
    return f"<p>{speed:,.0f} tokens per second, {predicted_within(error)}{time}</p>"


def _bars(breakdown: dict[str, int]) -> str:
    """A row a kind with a bar as long as its share of the largest."""
    largest = max([*breakdown.values(), 1])
    rows = []
    for kind, count in breakdown.items():
        if count > 0:
            style = f"width:{100 * count / largest:.1f}%;background:{PARTS.get(kind, PARTS['other'])}"
            rows.append(
                f'<tr><th scope="row">{escape(kind.replace("_", " "))}</th><td class="memopt-size">{size(count)}</td>'
                f'<td class="memopt-bar"><div style="{style}"></div></td></tr>'
            )
    return f"<table><caption>What fills the memory at the peak</caption>{''.join(rows)}</table>"


def _changes(levers: list[dict[str, Any]]) -> str:
    """The changes that save most, where estimate proposes any."""
    rows = [[row["change"], size(row["saved_bytes"]), "yes" if row["fits"] else "no"] for row in levers[:8]]
    return _table("Changes that save most", ("change", "saves", "fits"), rows) if rows else ""


def show_plan(plan: dict[str, Any]) -> str:
    """Show the answer of plan, from its JSON."""
    job = f"{plan['model']} on {_devices(plan)}"
    if not plan["profiles"]:
        missing = plan.get("missing_bytes")
        missing_text = f"; {size(missing)} are missing" if missing else ""
        if not plan["nearest"]:
            return show_error(
                f"No: {job}: nothing fits{missing_text}. Try a shorter length, a smaller model or a larger card."
            )
        changes = "".join(f"<li>{escape(change)}</li>" for change in plan["nearest"])
        return show_error(f"No: {job}: nothing fits{missing_text}.") + f"<p>It would with:</p><ul>{changes}</ul>"
    same: dict[str, list[dict[str, Any]]] = {}  # profiles that settled for the same settings share a row
    for profile in plan["profiles"]:
        same.setdefault(profile["settings"], []).append(profile)
    rows = [
        [
            ", ".join(profile["profile"] for profile in profiles),
            settings,
            size(profiles[0]["estimate"]["device_bytes"]),
            f"{profiles[0]['tokens_per_second']:,.0f}" if profiles[0]["tokens_per_second"] else "–",
        ]
        for settings, profiles in same.items()
    ]
    batch = plan["effective_batch_size"]
    title = f"The fastest settings that fit: {plan['seq_len']} tokens, {batch} sample{'s' * (batch != 1)} a step"
    usual = next((one for one in plan["profiles"] if one["profile"] == "balanced"), plan["profiles"][0])
    return (
        f'<p class="memopt-yes" role="status"><strong>Yes, with {escape(plan["method"])}</strong>: {escape(job)}: '
        f"{size(usual['estimate']['device_bytes'])} of {size(plan['usable_bytes'])}, {escape(usual['settings'])}.</p>"
        f"{_speed(usual['estimate'], plan['durations'][usual['profile']])}"
        + (_edits(plan["edits"]) if plan["edits"] else _launch(usual))
        + _table(title, ("profile", "settings", "memory", "tokens/s"), rows)
        + _notes(plan)
    )


def _launch(profile: dict[str, Any]) -> str:
    """The command that starts a profile, where a recipe runs the job."""
    if not profile["launch"]:
        return ""
    data = ", with your data for YOUR_DATA.jsonl" if "YOUR_DATA.jsonl" in profile["launch"] else ""
    words = " ".join(f"<span>{escape(part)}</span>" for part in re.split(r" (?=--)", profile["launch"]))
    return (
        f"<h3>To start it</h3><p>Profile {profile['profile']}, in a clone of hf_memopt{data}:</p>"
        f"<pre><code>{words}</code></pre>"
    )


def _edits(edits: dict[str, Any]) -> str:
    """The plan in the words of another tool's file: a diff, or keys where one cannot say it, and its launcher."""
    text = edits["diff"] or in_words(edits["keys"])
    changes = _code("What to change in the YAML", text) or "<p>The YAML has these settings already.</p>"
    launcher = edits["launcher"]
    return changes + (_code("To start it", f"{launcher} …") if launcher and launcher not in text else "")


def _code(title: str, text: str) -> str:
    return f"<h3>{title}</h3><pre><code>{escape(text)}</code></pre>" if text else ""


def _table(caption: str, columns: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"
