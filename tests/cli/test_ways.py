"""The pages that begin in an empty folder: every block runs, in the page's order, and plans print what the page shows.

Where a command needs a card, the hub, a cluster or an installation, STANDS_IN has what runs in its place and why.
"""

import configparser
import json
import re
import shlex
import shutil
import sys

import pytest
import video_models
from conftest import ROOT, run, run_forked

sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_picture
import ways

PAGES = pytest.mark.parametrize("page", ways.pages(), ids=lambda page: page.stem)


def recorded(page) -> list[dict]:
    rows = json.loads((ROOT / "benchmarks" / "results" / "ways.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["page"] == page.name]


@PAGES
def test_answers_fit_a_terminal(page):
    plans = {row["command"]: row for row in recorded(page)}
    assert list(plans) == list(filter(ways.is_plan, ways.commands(page))) and plans
    for command, row in plans.items():
        lines = row["output"].splitlines()
        assert row["exit"] == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80, command


def test_the_picture_is_of_these_answers():
    assert plan_picture.draw() == plan_picture.PICTURE.read_text(encoding="utf-8"), "run make picture"


@pytest.mark.slow
def test_answers_of_the_picture_are_those_of_today(tmp_path):
    page = ROOT / "README.md"
    assert ways.answered(page, tmp_path) == recorded(page), "run benchmarks/ways.py, make docs, make picture"


# ---- what stands in: (folder, words, what the last plan printed) -> None


def _nothing(folder, words, planned) -> None:
    pass


def _extras_exist(folder, words, planned) -> None:
    known = configparser.ConfigParser()
    known.read(folder / "setup.cfg", encoding="utf-8")
    name, extras = re.fullmatch(r"(\S+?)(?:\[([\w,]+)\])?", words[-1]).groups()
    assert name == "." and words[:2] == ["pip", "install"]
    assert set(filter(None, (extras or "").split(","))) <= set(known["options.extras_require"])


def _on_a_cpu(folder, words, planned) -> None:
    """Train what the last plan planned: its command, to the word, with a folder for the model behind it."""
    if "cpu" not in words:
        assert words[:-2] == planned and words[-2] == "--output_dir"
        words = _small(folder, words)
    _ends_well(run(*words, cwd=folder, env=_of_clone(folder)), "\nnext: ")


def _as_a_batch_job(folder, words, planned) -> None:
    """The shell reads the script; the job in it, and in launch.sh beside it, is the last plan's."""
    script = folder / words[1]
    assert run("bash", "-n", script, cwd=folder).returncode == 0
    exported = _words((script.parent / "launch.sh").read_text(encoding="utf-8").partition("exec ")[2])
    _, job = _split(exported)
    job = job[: job.index("--output_dir")]
    _, expected = _split(planned)
    assert [*job[:-1], expected[-1]] == expected and job[-1] == str(folder / expected[-1])  # data: an absolute path
    assert shlex.join(job) in script.read_text(encoding="utf-8")
    command = ["accelerate", "launch", *exported[exported.index("--config_file") :]]
    _ends_well(run(*_small(folder, [word for word in command if word != "$@"]), cwd=folder, env=_of_clone(folder)))


def _with_own_model(folder, words, planned) -> None:
    _ends_well(run(*[str(folder / "model") if "/Qwen" in f"/{word}" else word for word in words], cwd=folder))


STANDS_IN = (
    # a command begins with -> what runs in its place, because
    ("python3 -m venv", _nothing, "the tests' environment is one"),
    ("pip install", _extras_exist, "an installation takes minutes"),
    ("accelerate launch", _on_a_cpu, "needs the card, the hub and hours: two steps of a small model on a CPU"),
    ("sbatch", _as_a_batch_job, "needs a cluster: the same"),
    ("hf-memopt dry-run", _with_own_model, "needs the hub for the tokenizer: that of a small model"),
)
MAY_SAY_NO = ("advise", "estimate")  # with exit code 1: nothing to explain, does not fit


@pytest.mark.slow
@PAGES
def test_every_block_runs_in_order_from_an_empty_folder(page, tmp_path, builtin_model):
    folder = tmp_path / "clone"
    folder.mkdir()
    ways.clone(folder)
    if page.stem == "on_videos":
        video_models.make("qwen2_5_vl", folder / "model")
    else:
        _with_long_samples(builtin_model, folder / "model")
    answers, planned = iter(recorded(page)), []
    for kind, command in ways.steps(page):
        stands_in = next((run_it for begin, run_it, _ in STANDS_IN if command.startswith(begin)), None)
        if ways.makes_data(kind, command):
            ways.make_data(kind, command, folder)
        elif stands_in:
            stands_in(folder, shlex.split(command), planned)
        else:
            assert command.startswith("hf-memopt "), command
            words = shlex.split(command)
            done = run_forked(*words, cwd=folder, env=_of_clone(folder))
            if not (done.returncode == 1 and words[1] in MAY_SAY_NO and "Traceback" not in done.stderr):
                _ends_well(done)
            if ways.is_plan(command):
                assert done.stdout == next(answers)["output"], "run benchmarks/ways.py, make docs"
                planned = _words(ways.planned_command(done.stdout))
    assert not list(answers)


def _of_clone(folder) -> dict[str, str]:
    """The environment of commands there: the clone's own package, and a terminal of 80 columns."""
    return {"PYTHONPATH": str(folder), "COLUMNS": "80"}


def _with_long_samples(model, copy) -> None:
    """The built-in model, without its limit of positions."""
    shutil.copytree(model, copy)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        values = json.loads((copy / name).read_text(encoding="utf-8"))
        (copy / name).write_text(json.dumps({**values, key: 2**17}), encoding="utf-8")


def _words(command: str) -> list[str]:
    """Of a command in several lines."""
    return shlex.split(command.replace("\\\n", " "))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """A launcher's words, and the recipe's arguments."""
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return words[: script + 1], words[script + 1 :]


def _small(folder, words: list[str]) -> list[str]:
    """The same command for this machine: its launcher's settings, preset, model and steps; all else stays."""
    launcher, arguments = _split(words)
    here = {"--preset": "cpu", "--model_name_or_path": str(folder / "model")}
    arguments = [here.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
    launch = ["accelerate", "launch", "--config_file", str(folder / "accelerate_configs" / "cpu.yaml"), launcher[-1]]
    return [*launch, *arguments, "--max_steps", "2", "--held_out", "0", "--samples", "0"]


def _ends_well(done, *said: str) -> None:
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert all(text in done.stdout for text in said), done.stdout
