"""Another export, or a finished run, is replaced only where the command says so."""

import json

import pytest

from hf_memopt.errors import InputError
from hf_memopt.recipe.resume import keep_finished_run, remove_finished_run


class Recipe:
    overwrite = dry_run = False


def test_an_export_is_not_replaced_unasked(command, tmp_path):
    words = ("export", "rtx_4090", tmp_path / "run")
    assert command(*words)[0] == 0
    written = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    assert command(*words)[0] == 0, "the identical one is already there"
    code, _, errors = command(*words, "--method", "qlora")
    assert code == 2 and "has another" in errors and "--overwrite" in errors
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == written
    assert command(*words, "--method", "qlora", "--overwrite")[0] == 0
    assert "qlora" in (tmp_path / "run" / "launch.sh").read_text()


@pytest.mark.parametrize("target", ["slurm", "skypilot", "kubernetes", "hf-jobs"])
def test_exports_of_jobs_are_not_replaced_unasked(target, command, tmp_path):
    words = ("export", "a100_80gb", tmp_path, "--target", target)
    assert command(*words)[0] == 0
    assert command(*words, "--method", "lora")[0] == 2
    assert command(*words, "--method", "lora", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    "weights", ["model.safetensors", "adapter_model.safetensors", "model-00001-of-00002.safetensors"]
)
def test_a_finished_run_is_not_replaced_unasked(weights, tmp_path):
    training = {"output_dir": str(tmp_path)}
    recipe = Recipe()
    (tmp_path / "checkpoint-2").mkdir()
    assert keep_finished_run(recipe, training) == training, "an interrupted run resumes"
    (tmp_path / "memory_report.json").write_text("{}")
    assert keep_finished_run(recipe, training) == training, "so does one that ended out of memory"
    (tmp_path / weights).touch()
    for fresh in (None, "no"):
        with pytest.raises(InputError, match="holds a finished run: name another folder"):
            keep_finished_run(recipe, training | {"resume_from_checkpoint": fresh})
    for named in ("true", str(tmp_path / "checkpoint-2")):
        asked = training | {"resume_from_checkpoint": named}
        assert keep_finished_run(recipe, asked) == asked
    recipe.dry_run = True
    assert keep_finished_run(recipe, training) == training
    recipe.dry_run, recipe.overwrite = False, True
    assert keep_finished_run(recipe, training)["resume_from_checkpoint"] == "no"
    (tmp_path / "checkpoint-notes").write_text("no folder")
    remove_finished_run(str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["checkpoint-notes", weights])
    (tmp_path / "checkpoint-1").mkdir()
    assert keep_finished_run(recipe, training) == training, "what replaces it resumes, once interrupted"
    remove_finished_run(str(tmp_path))
    assert (tmp_path / "checkpoint-1").is_dir()


@pytest.mark.slow
@pytest.mark.sweep
def test_a_recipe_run_twice(recipe, tmp_path):
    words = ["--preset", "cpu", "--max_steps", "2", "--save_steps", "1", "--save_strategy", "steps", "--held_out", "0"]
    words += ["--samples", "0", "--logging_steps", "1", "--output_dir", str(tmp_path / "out")]
    recipe("sft")(words)
    before = (tmp_path / "out" / "memory_report.json").read_bytes()
    with pytest.raises(InputError, match="holds a finished run"):
        recipe("sft")(words)
    assert (tmp_path / "out" / "memory_report.json").read_bytes() == before
    recipe("sft")([*words, "--overwrite"])
    assert json.loads((tmp_path / "out" / "memory_report.json").read_bytes())["global_step"] == 2
    recipe("sft")([*words, "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert json.loads((tmp_path / "out" / "memory_report.json").read_bytes())["global_step"] == 3
