"""docs/trl.md and docs/grpo.md: TRL's trainers, predicted and measured."""

from docs_tables.markdown import KINDS, Cell, gib, listed, predicted, results, shown, table


def grpo_phases() -> str:
    """Every case trained on a CPU: the error of each phase's peak."""
    names = ["peak", "generation", "log_probs", "rewards", "forward", "backward", "optimizer"]
    cases: dict[str, dict[str, float]] = {}
    for row in results("grpo")["rows"]:
        cases.setdefault(row["case"], {})[row["phase"]] = row["error"]
    rows = [[case, *(shown(name, "+.2%", 1)(errors) for name in names)] for case, errors in cases.items()]
    return table(["case", *(name.replace("_", " ") for name in names)], rows)


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


TABLES = {"trl trainers": trl_trainers}
