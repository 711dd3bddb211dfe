"""`hf-memopt report`: a run as a page, or several side by side."""

from pathlib import Path

from hf_memopt.cli.output import print_json, print_table
from hf_memopt.errors import InputError
from hf_memopt.files import folder_for, user_path, write_whole
from hf_memopt.packages import require
from hf_memopt.reports.next_steps import suggest_next_steps
from hf_memopt.reports.run import read_run
from hf_memopt.reports.run_report import PAGE, compare_page, differences, figure_texts, figures, run_page
from hf_memopt.terminal import plain

COMPARISON = "memory_comparison.html"


def run_report(directories: list[str], output: str | None, json: bool) -> None:
    """Write the page, and say where; with several folders one page that compares them.

    Raises:
        InputError: a folder holds no run, or the page cannot be written.
    """
    require("matplotlib", "report")
    folders = [user_path(directory).resolve() for directory in directories]
    if twice := [str(folder) for folder in folders if folders.count(folder) > 1]:
        raise InputError(f"{twice[0]} is named more than once: name each run once")
    runs = [read_run(directory) for directory in directories]
    alone = len(runs) == 1
    path = user_path(output) if output else (runs[0].folder / PAGE if alone else Path(COMPARISON))
    if path.suffix not in (".html", ".htm"):
        raise InputError(f"--output {path}: give a name that ends in .html")
    if path.is_dir():
        raise InputError(f"--output {path} is a folder: name a file")
    text = run_page(runs[0]) if alone else compare_page(runs)
    figures_by_run = {str(run.folder): figures(run) | {"next": suggest_next_steps(run)} for run in runs}
    different = {} if alone else differences(runs)
    folder = folder_for(path.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    if json:
        print_json({"page": str(path), "runs": figures_by_run, "differences": different})
        return
    for run in runs:
        print_table(str(run.folder), ["figure", "value"], figure_texts(run))
        for step in suggest_next_steps(run):
            print(f"  next: {step}")
    if different:
        rows = ([name, *values] for name, values in different.items())
        print_table("settings that differ", ["setting", *(run.name for run in runs)], rows)
    print(f"wrote {plain(str(path))}")
