"""What a recipe prints where nobody sees bars move: what is set up, losses in lines, the closing table; no chatter."""

import re
import sys

import pytest
from conftest import ROOT, flags, run

# Python's warnings, bars and their escapes, dicts of figures, and what libraries tell their own developers.
CHATTER = (
    r"Warning\b",
    r"\d+%\|",
    r"it/s",
    r"examples/s",
    r"\r",
    r"\x1b\[",
    r"^\{'",
    "values were not passed",
    "will result in indexing errors",
    "OMP_NUM_THREADS",
    r"process\(es\)",
    "not_parallel",
)


def chatter(text: str) -> list[str]:
    return [pattern for pattern in CHATTER if re.search(pattern, text, re.MULTILINE)]


@pytest.mark.slow
def test_the_exported_run_says_what_is_to_be_read(tmp_path):
    """make train, shortened."""
    done = run("hf-memopt", "export", "cpu", tmp_path / "setup", "--recipe", "pretrain")
    assert done.returncode == 0, done.stderr
    more = flags(max_steps=20, max_length=32, eval_steps=10, held_out=4, output_dir=tmp_path / "out")
    done = run("sh", tmp_path / "setup" / "launch.sh", *more)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not chatter(output), output
    assert len(output.splitlines()) <= 45 and len(output.encode()) < 5000, output
    for wanted in (
        r"preset  cpu",
        r"engine  1 process$",
        r"memory  .*predicted",
        r"^step 10/20: loss \d\.\d{4}, learning rate \S+, [\d,]+ tokens/s$",
        r"^step 10: held-out loss \d\.\d{4} \(perplexity",
        r"^trained 20 steps in \d+ s$",
        r"peak allocated .*MiB",
        r"^held-out loss: .* → ",
        r"^samples",
        r"^next: ",
    ):
        assert re.search(wanted, output, re.MULTILINE), (wanted, output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "video_sft"])
def test_no_recipe_chatters(name, tmp_path):
    more = flags(preset="cpu", max_steps=6, output_dir=tmp_path / "out")
    more += flags(max_completion_length=2) if name == "grpo" else []
    done = run(sys.executable, ROOT / "recipes" / f"{name}.py", *more)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not chatter(output) and len(output.splitlines()) <= 45, output
    assert re.search(r"^step 6/6: loss|^trained 6 steps", output, re.MULTILINE)


@pytest.mark.slow
def test_a_line_for_each_log(recipe, jsonl, tmp_path, capsys):
    """All of them are in the trainer's state. Who sets logging_steps gets a line for each."""
    data = jsonl([{"text": "word " * 20}] * 40)
    arguments = flags(preset="cpu", max_length=2, max_steps=30, held_out=0, eval_strategy="no", dataset_name=data)
    arguments += flags(effective_batch_size=1, report_to="none", disable_tqdm="true")
    lines = []
    for number, more in enumerate((["--logging_steps", "1"], [])):
        trainer = recipe("pretrain")([*arguments, *more, "--output_dir", str(tmp_path / str(number))])
        printed = re.findall(r"^step (\d+)/30: loss", capsys.readouterr().out, re.MULTILINE)
        lines.append(len(printed))
        assert printed[-1] == "30" and "{'" not in printed
        assert sum("loss" in entry for entry in trainer.state.log_history) == (3 if number else 30)
    assert lines == [30, 3]


def test_tokenizers_do_not_warn_of_what_is_cut():
    """Recipes cut or pack every row; the warning says that the model would fail."""
    import logging

    from hf_memopt.noise import _says_more

    name, said = (
        "transformers.tokenization_utils_base",
        "this sequence through the model will result in indexing errors",
    )
    kept = [_says_more(logging.LogRecord(name, 30, "", 0, text, (), None)) for text in (said, "something else")]
    assert kept == [False, True]


@pytest.mark.slow
def test_a_launch_of_two_processes_leaves_nothing_and_says_nothing(tmp_path):
    """launch.sh up to the recipe, in whose place a script stands."""
    done = run("hf-memopt", "export", "cpu_x2", tmp_path / "setup", "--recipe", "pretrain")
    assert done.returncode == 0, done.stderr
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    # One write: two processes that print to the same pipe may come between each other's words.
    script.write_text("import os\nos.write(1, f\"{os.environ['RANK']}\\n\".encode())\n")
    temporary.mkdir()
    launch = (tmp_path / "setup" / "launch.sh").read_text().replace(str(ROOT / "recipes" / "pretrain.py"), str(script))
    (tmp_path / "launch.sh").write_text(launch)
    done = run("sh", tmp_path / "launch.sh", env={"TMPDIR": str(temporary), "MAIN_PROCESS_PORT": "0"})
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["0", "1"], done.stdout + done.stderr
    assert list(temporary.iterdir()) == [] and done.stderr == ""
