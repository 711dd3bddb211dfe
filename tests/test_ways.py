"""The pages of five people: every command runs, and the answers are those that the page shows."""

import json
import shlex
import sys

import pytest
import video_models
import videos
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_picture
import ways

PAGES = pytest.mark.parametrize("page", ways.pages(), ids=lambda page: page.stem)
# What a machine without the page's card, network and hours has its own of.
_OWN = ("--config_file", "--preset", "--model_name_or_path", "--max_length", "--per_device_train_batch_size")
_SMALL = ["--preset", "cpu", "--max_steps", "2", "--held_out", "0", "--effective_batch_size", "8", "--samples", "0"]


@PAGES
def test_answers_fit_a_terminal(page):
    rows = json.loads((ROOT / "benchmarks" / "results" / "ways.json").read_text(encoding="utf-8"))["rows"]
    plans = {row["command"]: row for row in rows if row["page"] == page.name}
    assert list(plans) == [line for line in ways.commands(page) if line.startswith("hf-memopt plan")] and plans
    for command, row in plans.items():
        lines = row["output"].splitlines()
        assert row["exit"] == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80, command


def test_the_picture_is_of_these_answers():
    assert plan_picture.draw() == plan_picture.PICTURE.read_text(encoding="utf-8"), "run make picture"


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", *ways.pages()], ids=lambda page: page.stem)
def test_answers_are_those_of_the_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ways.write_chats(tmp_path)
    rows = json.loads((ROOT / "benchmarks" / "results" / "ways.json").read_text(encoding="utf-8"))["rows"]
    recorded = [row for row in rows if row["page"] == page.name]
    assert ways.answered(page) == recorded, "run benchmarks/ways.py, make docs"


@pytest.mark.slow
@PAGES
def test_what_follows_the_answer_trains_and_reports(page, tmp_path, builtin_model):
    """On a small model and a CPU, two steps."""
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    ways.write_chats(tmp_path, 16)
    if page.stem == "on_videos":
        builtin_model = video_models.make("qwen2_5_vl", tmp_path / "model")
        _write_clips(tmp_path / "clips")
    following = [shlex.split(line) for line in ways.commands(page)]
    following = [words for words in following if words[0] == "accelerate" or words[1:2] in (["export"], ["report"])]
    assert len(following) == 2
    training, report = following
    if training[1] == "export":
        done = run(*training, cwd=tmp_path)
        assert done.returncode == 0 and run("bash", "-n", "my-run/slurm.sbatch", cwd=tmp_path).returncode == 0
        for named in ("meta-llama/Llama-3.1-8B-Instruct", "my_chats.jsonl"):
            assert named in (tmp_path / "my-run" / "slurm.sbatch").read_text(encoding="utf-8")
        here = ("hf-memopt", "export", "cpu", "my-run", "--recipe", "sft", "--overwrite", "--", "--dataset_name")
        assert run(*here, "my_chats.jsonl", "--model_name_or_path", builtin_model, cwd=tmp_path).returncode == 0
        done = run("sh", "my-run/launch.sh", *_SMALL[2:], cwd=tmp_path)
    else:
        done = run(*_without(training, _OWN), "--model_name_or_path", builtin_model, *_SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "predicted" in done.stdout and "\nnext: " in done.stdout and "transformers chat" in done.stdout
    done = run(*report, cwd=tmp_path)
    assert done.returncode == 0 and "memory_report.html" in done.stdout, done.stderr


def _without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """A command without some options and their values."""
    left_out = {place for place, word in enumerate(words) if word in options}
    return [word for place, word in enumerate(words) if not {place, place - 1} & left_out]


def _write_clips(folder) -> None:
    folder.mkdir()
    for number, frames in enumerate((4, 9, 12, 7)):
        videos.write(folder / f"{number}.mp4", videos.numbered(frames, 56, 56))
        (folder / f"{number}.txt").write_text("first red then blue", encoding="utf-8")
