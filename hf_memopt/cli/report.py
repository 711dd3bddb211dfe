"""`hf-memopt report`: a run as a page, or several side by side."""

from pathlib import Path

from hf_memopt.cli.output import print_json, print_table
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import folder_for, write_whole
from hf_memopt.reports.next_steps import next_steps
from hf_memopt.reports.page import size
from hf_memopt.reports.run import Run, read_run
from hf_memopt.reports.run_report import PAGE, compare_page, differences, figures, run_page

COMPARISON = "memory_comparison.html"


def run_report(directories: list[str], output: str | None, json: bool) -> None:
    """Write the page, and say where; with several folders one page that compares them.

    Raises:
        InputError: a folder holds no run, or the page cannot be written.
    """
    runs = [read_run(directory) for directory in directories]
    with as_input_error("a file of the run is damaged", TypeError, KeyError, AttributeError, ValueError, IndexError):
        _report(runs, output, json)


def _report(runs: list[Run], output: str | None, json: bool) -> None:
    alone = len(runs) == 1
    path = Path(output).expanduser() if output else (runs[0].folder / PAGE if alone else Path(COMPARISON))
    if path.suffix not in (".html", ".htm"):
        raise InputError(f"--output {path}: give a name that ends in .html")
    folder_for(path.parent).mkdir(parents=True, exist_ok=True)
    try:
        write_whole(path, run_page(runs[0]) if alone else compare_page(runs))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    told = {str(run.folder): figures(run) | {"next": next_steps(run)} for run in runs}
    apart = {} if alone else differences(runs)
    if json:
        print_json({"page": str(path), "runs": told, "differences": apart})
        return
    for run in runs:
        _print(run)
    if apart:
        print_table("Settings that differ", ["setting", *(run.name for run in runs)],
                    ([name, *values] for name, values in apart.items()))  # fmt: skip
    print(f"for a browser: {path}")


def _print(run) -> None:
    rows = [(name.removesuffix("_bytes").replace("_", " "), size(value) if name.endswith("_bytes") else value)
            for name, value in figures(run).items() if value is not None]  # fmt: skip
    print_table(str(run.folder), ["", ""], rows)
    for one in next_steps(run):
        print(f"  next: {one}")
