"""Tables of docs/migration.md: other tools' keys from hf_memopt/foreign/tables, and results/configs.json."""

from functools import partial
from itertools import groupby

from docs_tables.markdown import results, table

from hf_memopt.foreign.key_table import Row, list_tables, read_table

_EFFECTS = {"memory": "", "approximated": "approximated", "refused": "refused"}
_CLOSE = 0.1
_WORDS = {"set": "set", "unset": "unset", "several": "above 1"}  # conditions that are no values


def keys(tool: str) -> str:
    """A tool's keys that memory depends on, and the others in a sentence."""
    read = read_table(tool)
    rows = [
        [_theirs([row.key for row in group], first), _ours(first), first.why or "", _EFFECTS[first.effect]]
        for first, group in _groups(row for row in read.rows if row.effect != "none" and _says(row))
    ]
    neutral = ", ".join(f"`{key}`" for key in dict.fromkeys(row.key for row in read.rows if row.effect == "none"))
    defaults = ", ".join(f"`{key}: {value}`" for key, value in read.defaults.items())
    return (
        f"{read.name} {read.version}; read in {read.source}. Where a file is silent: {defaults}.\n\n"
        f"{table(['theirs', 'ours', 'how, or why not', 'effect'], rows)}\n\n"
        f"Without effect on memory: {neutral}."
    )


def _says(row: Row) -> bool:
    return bool(row.to or row.also or row.why)


def _groups(rows):
    """The rows that differ in their key alone, together."""
    for _, group in groupby(rows, lambda row: repr({**vars(row), "key": ""})):
        found = list(group)
        yield found[0], found


def _theirs(names: list[str], row: Row) -> str:
    values = row.only or tuple(row.values or ())
    text = ", ".join(f"`{name}`" for name in names)
    text += f" = {', '.join(f'`{value}`' if value else 'nothing' for value in values)}" if values else ""
    conditions = [f"`{key}` {_condition(value)}" for key, value in row.when.items()]
    return text + (f", where {' and '.join(conditions)}" if conditions else "")


def _condition(value) -> str:
    values = value if isinstance(value, list) else [value]
    if isinstance(value, str) and value in _WORDS:
        return f"is {_WORDS[value]}"
    return f"is {' or '.join(f'`{one}`' if one else 'nothing' for one in values)}"


def _ours(row: Row) -> str:
    mapped = {str(ours) for ours in (row.values or {}).values()}
    same = row.values is None or mapped <= set(row.values)
    parts = (
        [f"`{row.to}`" + ("" if same else f" = {', '.join(f'`{value}`' for value in sorted(mapped))}")]
        if row.to
        else []
    )
    return ", ".join([*parts, *(f"`{key}` = `{value}`" for key, value in row.also.items())])


def counts() -> str:
    """What became of every configuration that the repositories ship."""
    heads = ["repository", "files", "read", "refused in one sentence", "no training job", "a key not known", "failed"]
    kinds = ("files", "read", "refused", "no job", "not known", "failed")
    return table(
        heads, [[row["repository"], *(str(row[kind]) for kind in kinds)] for row in results("configs")["counts"]]
    )


def stated() -> str:
    """Stated memory beside ours."""
    heads = ["stated in", "model", "method", "tokens", "devices", "stated", "predicted", "difference", "half", "why"]
    rows = [
        [
            f"{row['repository']}, {row['where']}",
            row["model"],
            row["method"],
            str(row["seq_len"]),
            str(row["devices"]),
            f"{row['stated']:g}",
            f"{row['predicted']:.1f} ({row['metric']})",
            f"{row['error']:+.0%}".replace("-", "−"),
            "held out" if row["held_out"] else "seen",
            row["why"] if abs(row["error"]) > _CLOSE else "",
        ]
        for row in results("configs")["rows"]
    ]
    return f"{_summary()}\n\n{table(heads, rows)}"


def _summary() -> str:
    rows, others = results("configs")["rows"], results("configs")["not_compared"]
    parts = []
    for name, half in (("seen", False), ("held out", True)):
        errors = [abs(row["error"]) for row in rows if row["held_out"] is half]
        parts.append(f"{sum(error <= _CLOSE for error in errors)} of {len(errors)} {name}")
    lengths = sum("lengths of its samples" in row["why"] for row in others)
    return (
        f"Within {_CLOSE:.0%}: {' and '.join(parts)}. Not compared: {lengths} figures of samples whose lengths are "
        f"not stated, and {len(others) - lengths} of jobs that are refused or not described."
    )


TABLES = {f"keys of {read.name}": partial(keys, tool) for tool, read in list_tables().items()} | {
    "configurations read": counts,
    "stated memory": stated,
}
