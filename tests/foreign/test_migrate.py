"""hf-memopt migrate: what it writes is what a recipe's parser takes, and what it leaves out is said."""

import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from test_foreign_keys import MODEL

from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.errors import InputError
from hf_memopt.foreign.key_table import list_tables, read_table
from hf_memopt.foreign.migrate import accelerate_words, migrated_files, recipe_arguments, recipe_of
from hf_memopt.foreign.source import read_source
from hf_memopt.foreign.translate import translate
from hf_memopt.job.spec import JobSpec
from hf_memopt.presets.trl_configs import trl_class
from hf_memopt.recipe.answers import AnswerArguments
from hf_memopt.recipe.preference import PreferenceArguments
from hf_memopt.recipe.prompts import RolloutArguments
from hf_memopt.recipe.recipe_arguments import parse

FOLDER = Path(__file__).parents[1] / "foreign_configs"
OF_RECIPE = {
    "sft": (AnswerArguments, "SFTConfig"),
    "dpo": (PreferenceArguments, "DPOConfig"),
    "grpo": (RolloutArguments, "GRPOConfig"),
}


def _launches(script: str) -> Namespace:
    """What accelerate's own parser makes of a written command."""
    words = shlex.split(script.rpartition("exec ")[2].replace('"$@"', ""))
    return launch_command_parser().parse_args(words[2:])


def _parsed(folder, recipe):
    own, config = OF_RECIPE[recipe]
    return parse(["--config", str(folder / "recipe.yaml")], own=own, config_class=trl_class(config))


@pytest.mark.slow
def test_every_file_becomes_a_recipe_that_its_parser_takes(tmp_path, subtests):
    for path in sorted(FOLDER.glob("*/*")):
        with subtests.test(path=path):
            try:
                translation = read_source(str(path)).translate()
                translation.check()
                spec = translation.spec()
                files = migrated_files(spec, translation, tmp_path)
            except InputError as error:
                assert "\n" not in str(error)
                continue
            (tmp_path / "recipe.yaml").write_text(files["recipe.yaml"])
            _launches(files["launch.sh"])
            parsed = _parsed(tmp_path, recipe_of(spec).stem)
            assert parsed.recipe.model_name_or_path == spec.model and parsed.lora == spec.lora
            for name, value in translation.run.items():
                assert name in parsed.given or value is None, name


@pytest.mark.parametrize(("tool", "table"), list_tables().items())
def test_what_a_run_takes_is_an_argument_of_the_recipes(tool, table, tmp_path):
    names = {name.replace("*", row.key) for row in table.rows if row.effect == "none" for name in (row.to, *row.also)}
    values = {"lr_scheduler_type": "cosine", "output_dir": "out", "dataset_name": "rows.jsonl", "save_strategy": "no"}
    content = {name: values.get(name, {} if name.endswith("kwargs") else 1) for name in names if name}
    for recipe in OF_RECIPE:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
        assert _parsed(tmp_path, recipe).given == {"config", *content}


def test_settings_of_a_run_are_written_or_named(tmp_path, subtests):
    for tool, settings, written, unwritten in [
        ("axolotl", {"eval_batch_size": 3}, {"per_device_eval_batch_size": 3}, []),
        ("axolotl", {"warmup_ratio": 0.1, "adam_beta2": 0.95}, {"warmup_steps": 0.1, "adam_beta2": 0.95}, []),
        ("axolotl", {"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0}, ["warmup_ratio"]),
        ("axolotl", {"lr_scheduler": "rex"}, {"lr_scheduler_type": None}, ["lr_scheduler"]),
        ("axolotl", {"datasets": [{"path": "a"}, {"path": "b"}]}, {"dataset_name": "a"}, ["datasets"]),
        ("axolotl", {}, {"lr_scheduler_type": "cosine", "warmup_steps": 0.03, "weight_decay": 0.0}, []),
        ("llama_factory", {"dataset": "identity"}, {"dataset_name": None}, ["dataset"]),
        ("llama_factory", {"dataset": "a/b", "dataset_dir": "ONLINE"}, {"dataset_name": "a/b"}, ["dataset_dir"]),
        ("llama_factory", {"lora_rank": 16}, {"lora": 32, "learning_rate": 5e-5}, []),
        ("llama_factory", {"lora_rank": 16, "lora_alpha": 16}, {"lora": 16}, []),
        ("llama_factory", {"stage": "dpo", "pref_beta": 0.3}, {}, ["pref_beta"]),
        ("ms_swift", {"tuner_type": "full", "dataset": "a#500"}, {"learning_rate": 1e-5, "dataset_name": "a"}, None),
        ("ms_swift", {"dataset": "a b", "reward_funcs": ["x"]}, {"learning_rate": 1e-4}, ["dataset", "reward_funcs"]),
        ("trl", {"warmup_ratio": 0.1, "adam_beta1": 0.8}, {"warmup_steps": 0.1, "adam_beta1": 0.8}, []),
        ("torchtune", {"lr_scheduler.num_warmup_steps": 100}, {}, ["lr_scheduler.num_warmup_steps"]),
    ]:
        with subtests.test(tool=str(tool)):
            translation = translate(read_table(tool), {**MODEL[tool], **settings}, tmp_path)
            translation.check()
            arguments = recipe_arguments(translation.spec(seq_len=64), translation)
            for name, value in written.items():
                found = arguments.get(name)
                assert (found["lora_alpha"] if name == "lora" else found) == value, name
            assert unwritten is None or sorted(translation.unwritten) == unwritten


def _accelerate(options, folder):
    """The files of a command of accelerate and TRL."""
    job = "sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name mine --max_length 64"
    translation = read_source(f"accelerate launch {options} {job}").translate()
    return migrated_files(translation.spec(), translation, folder)


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ("--fsdp_offload_params true", {"fsdp_offload_params": "true"}),
        ("--fsdp_reshard_after_forward false", {"fsdp_reshard_after_forward": "false"}),
        ("--fsdp_state_dict_type FULL_STATE_DICT", {"fsdp_state_dict_type": "FULL_STATE_DICT"}),
        ("--fsdp_activation_checkpointing true", {"fsdp_activation_checkpointing": "true"}),
    ],
)
def test_the_engine_is_written_as_the_launcher_takes_it(options, written, tmp_path):
    files = _accelerate(f"--use_fsdp --fsdp_version 2 --num_processes 2 {options}", tmp_path)
    found = vars(_launches(files["launch.sh"]))
    assert {name: found[name] for name in written} == written and found["fsdp_version"] == "2"


def test_samples_that_devices_share_are_not_migrated(tmp_path):
    with pytest.raises(InputError, match="sequence_parallel=2 is not written"):
        _accelerate("--use_fsdp --fsdp_version 2 --num_processes 2 --parallelism_config_cp_size 2", tmp_path)


def test_migrate_says_what_no_recipe_takes(command, tmp_path):
    file = tmp_path / "full.yml"
    content = {
        "base_model": str(builtin_model()),
        "sequence_len": 64,
        "datasets": [{"path": "a", "type": "alpaca"}, {"path": "b", "type": "alpaca"}],
        "loss_watchdog_threshold": 5.0,
    }
    file.write_text(yaml.safe_dump(content))
    code, output, errors = command("migrate", str(file))
    assert code == 0 and "--dataset_name a" in output
    assert any("datasets, loss_watchdog_threshold" in line for line in errors.splitlines())
    del content["loss_watchdog_threshold"], content["datasets"]
    file.write_text(yaml.safe_dump(content))
    code, output, errors = command("migrate", str(file))
    assert code == 0 and "--dataset_name" not in output and "no recipe takes" not in errors


def test_packing_and_fsdps_version_are_migrated(command, tmp_path):
    file = tmp_path / "full.yml"
    content = {"base_model": "qwen3-0.6b", "sequence_len": 64}
    for more, words in (
        ({}, ()),
        ({"sample_packing": True, "flash_attention": True}, ("--packing true",)),
        ({"fsdp_config": {"cpu_ram_efficient_loading": True}}, ("--use_fsdp --fsdp_version 1 ",)),
        ({"fsdp_config": {"offload_params": True}, "fsdp_version": 2}, ("--use_fsdp --fsdp_version 2 ",)),
    ):
        file.write_text(yaml.safe_dump(content | more))
        code, output, _ = command("migrate", str(file))
        assert code == 0 and all(word in output for word in words), more
        assert ("--packing" in output) == ("sample_packing" in more) and ("--use_fsdp" in output) == (
            "fsdp_config" in more
        )


def test_launchers_words_of_a_job():
    for training, processes, words in (
        ({}, 1, []),
        ({}, 2, ["--multi_gpu"]),
        ({"fsdp": True}, 2, ["--use_fsdp", "--fsdp_version", "2"]),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, 2, ["--use_fsdp", "--fsdp_version", "1"]),
    ):
        launched = accelerate_words(JobSpec(model="a", world_size=processes, training=training))
        assert launched[:4] == ["accelerate", "launch", "--num_processes", str(processes)], launched
        assert launched[6:] == words, launched
