"""The table of optimizers in docs/memory.md."""

from levers_docs import results, source, table


def optimizer_states() -> str:
    """Every `optim`: states and errors of the peak, or why there are none."""
    found = results("estimator_optimizers")
    rows = [
        [
            f"`{row['optim']}`",
            _mebibytes(row.get("state_bytes")),
            _mebibytes(row.get("measured_state_bytes")),
            _percent(row.get("traced_error")),
            row.get("refused") or row.get("unmeasured") or "",
        ]
        for row in found["rows"]
    ]
    heads = ["optimizer", "states (MiB)", "measured", "peak", "refused, or not measured"]
    return f"{table(heads, rows)}\n\n{source('estimator_optimizers', found)}"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.2f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


TABLES = {"optimizer_states": optimizer_states}
