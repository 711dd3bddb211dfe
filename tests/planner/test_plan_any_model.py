"""Every bundled model on a few cards: an answer, or one sentence whose advice does not lead back to it."""

import json
import random
import re

import pytest
from conftest import drawn_by

from hf_memopt.estimator.architectures import list_architectures, load_config
from hf_memopt.estimator.tracing.tasks import infer_task

CARDS = ("t4", "rtx_4090", "a100_80gb", "h100_80gbx8", "apple_m2_16gb")
SAMPLE = (
    ("bert-base", "t4", "lora"),
    ("gpt-oss-20b", "a100_80gb", "any"),
    pytest.param("gpt-oss-20b", "cpu", "any", marks=pytest.mark.sweep),
    # A minute and more; small jobs that fit nowhere: test_plan_simple.py, test_nearest_changes.py.
    pytest.param("deepseek-v3", "rtx_4090", "qlora", marks=pytest.mark.sweep),
)


def _planned(command, *argv):
    """Exit code, and what an error says."""
    code, out, errors = command("plan", *argv, "--json")
    assert code in (0, 1, 2) and "Traceback" not in errors
    if code < 2:
        made = json.loads(out)
        assert made["profiles"] or made["rejected"]
        task = infer_task(load_config(argv[0]))
        by_recipes = {"causal-lm": {True}, "image-text-to-text": {True, False}}.get(
            task, {False}
        )  # of videos, if given
        assert {bool(profile["launch"]) for profile in made["profiles"]} <= by_recipes
        return code, ""
    (said,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) < 600
    return code, said


def _check(model, card, method, command):
    code, said = _planned(command, model, "--hardware", card, "--method", method)
    if code < 2:
        return
    assert "please report it" not in said
    for setting in re.findall(
        r"--set ([\w.]+=\w+)", said
    ):  # what the sentence advises, with the command that it names
        if "hf-memopt estimate" in said:
            done = command(
                "estimate", model, "--hardware", card, "--method", "lora", "--seq-len", "64", "--set", setting
            )
            assert done[0] in (0, 1), done[2]
        else:
            assert _planned(command, model, "--hardware", card, "--method", method, "--set", setting)[1] != said
    for other in re.findall(r"--method (\w+)", said):
        assert _planned(command, model, "--hardware", card, "--method", other)[1] != said


@pytest.mark.slow
@pytest.mark.parametrize(("model", "card", "method"), SAMPLE)
def test_a_plan_ends_in_an_answer_or_advice(model, card, method, command):
    _check(model, card, method, command)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("model", list_architectures())
def test_every_plan_ends_in_an_answer_or_advice(model, command):
    """Each commit draws other cards and methods."""
    drawn = random.Random(f"{drawn_by()} {model}")
    _check(model, drawn.choice(CARDS), drawn.choice(["any", "full", "lora", "qlora"]), command)


@pytest.mark.slow
@pytest.mark.sweep
def test_what_no_recipe_trains_is_not_exported(command, tmp_path):
    code, _, errors = command("plan", "bert-base", "--hardware", "t4", "--export", tmp_path / "out")
    assert code == 2 and "task=masked-lm has no recipe to export" in errors


@pytest.mark.slow
def test_a_plan_that_no_recipe_runs_is_printed(command):
    code, out, _ = command("plan", "bert-base", "--hardware", "t4")
    assert code == 0 and "\nscript TrainingArguments(" in out
