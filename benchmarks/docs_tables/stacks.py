"""The table of docs/versions.md: what works with which versions, from results/stacks.json."""

from docs_tables.markdown import results, table

COLUMNS = ("environment", "versions", "installs", "presets, doctor", "recipe", "OOM recovered", "dry-runs", "CPU jobs")


def stacks() -> str:
    rows = [[row["name"], _versions(row), *_cells(row["checks"])] for row in results("stacks")["rows"]]
    return table(COLUMNS, rows)


def _versions(row: dict) -> str:
    return ", ".join(f"{package} {version}" for package, version in row["versions"].items())


def _cells(checks: list[dict]) -> list[str]:
    found = {check["check"]: check for check in checks}
    dry = [check for name, check in found.items() if name.startswith("dry-run")]
    jobs = [check for name, check in found.items() if " tokens" in name]
    presets = [found["doctor"], found["cards"], found["preset_script"]]
    return [
        found["install"]["result"],
        _all(presets),
        _recipe(found["recipe"]),
        found["injected_oom"]["result"],
        _all(dry),
        _jobs(jobs),
    ]


def _all(checks: list[dict]) -> str:
    """works, or how many do and what the others end in."""
    works = [check for check in checks if check["result"] == "works"]
    others = sorted({check["result"] for check in checks} - {"works"})
    if not others:
        return "works"
    return f"{len(works)} of {len(checks)}, others {' and '.join(others)}" if works else " and ".join(others)


def _recipe(check: dict) -> str:
    if check["result"] == "works" and "predicted" not in check:
        return "works, not predicted"
    return check["result"]


def _jobs(checks: list[dict]) -> str:
    errors = [abs(check["predicted"] / check["measured"] - 1) for check in checks if "predicted" in check]
    refused = sum(check["result"] == "refused" for check in checks)
    text = f"{len(errors)} within {max(errors):.2%}" if errors else "none predicted"
    return f"{text}, {refused} refused" if refused else text
