"""Configurations of other tools: what each describes, what a plan answers in its keys, and what it becomes here."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.errors import InputError
from hf_memopt.estimator.training_fields import evaluates
from hf_memopt.foreign.accelerate import launch_file
from hf_memopt.foreign.key_table import EFFECTS, list_tables
from hf_memopt.foreign.launchers import LAUNCHERS
from hf_memopt.foreign.source import read_source
from hf_memopt.foreign.translate import translate
from hf_memopt.foreign.values import AUTO, VIA

FOLDER = Path(__file__).parents[1] / "foreign_configs"
EXPECTED = tomllib.loads((FOLDER / "expected.toml").read_text(encoding="utf-8"))


def test_every_file_has_an_expectation():
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*")}
    assert files == set(EXPECTED) and len(files) >= 40


def test_a_file_is_read_as_the_job_that_it_describes(subtests):
    for name in EXPECTED:
        with subtests.test(name=name):
            expected = EXPECTED[name]
            if "error" in expected:
                with pytest.raises(InputError, match=expected["error"]):
                    read_source(str(FOLDER / name))
                continue
            source = read_source(str(FOLDER / name))
            translation = source.translate()
            for kind in ("refused", "unknown", "approximated"):
                assert sorted(remark.key for remark in getattr(translation, kind)) == sorted(expected.get(kind, [])), (
                    kind
                )
            for key, value in expected.get("has", {}).items():
                assert (key, translation.fields.get(key)) == (key, value)
            assert not translation.fields.keys() & set(expected.get("lacks", []))
            if stage := expected.get("zero_stage"):
                assert translation.fields["training.deepspeed"]["zero_optimization"]["stage"] == stage
            keys = {key.partition(".")[0] for key in source.settings}
            remarks = [*translation.refused, *translation.unknown, *translation.approximated]
            answered = {*translation.translated, *translation.neutral, *(remark.key for remark in remarks)}
            assert keys <= {key.partition(".")[0] for key in answered}  # no key is dropped
            if not translation.refused and not translation.unknown:
                translation.spec(seq_len=128)


@pytest.mark.parametrize(("tool", "table"), list_tables().items())
def test_tables_are_well_formed(tool, table):
    for row in table.rows:
        assert row.effect in EFFECTS and (not row.via or row.via in VIA), row
        assert bool(row.why) == (row.effect in ("refused", "approximated")), row
        group = (row.to or next(iter(row.also), "")).partition(".")[0]
        groups = ("training", "lora", "memory", "quantization", "sizes")
        assert row.effect == "none" or not row.to or "." not in row.to or group in groups, row
    for key in table.defaults:
        assert table.rows_of(key), key


def test_a_shadowed_row_is_never_written():
    """A row without conditions ends the rows of its key."""
    for table in list_tables().values():
        ended = set()
        for row in table.rows:
            assert row.key not in ended, (table.name, row.key)
            if row.values is None and row.only is None and not row.when:
                ended.add(row.key)


EVALUATIONS = {  # a tool's smallest file, what has it evaluate, its batch then, and what has it not
    "llama_factory": (
        {
            **{"model_name_or_path": "m", "do_train": True, "stage": "sft", "finetuning_type": "lora"},
            **{"template": "llama3", "cutoff_len": 64},
        },
        [{"eval_strategy": "steps", "val_size": 0.1}, {"do_eval": True, "val_size": 0.1}],
        ("per_device_eval_batch_size", None),
        [{"eval_strategy": "no"}, {"val_size": 0.1}, {"eval_steps": 5}, {"do_eval": False}],
    ),
    "axolotl": (
        {"base_model": "m", "sequence_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 1},
        [
            {"val_set_size": 0.1, "evals_per_epoch": 2},
            {"val_set_size": 0.1, "eval_steps": 20},
            {"test_datasets": [{"path": "rows.jsonl"}], "eval_strategy": "epoch"},
        ],
        ("eval_batch_size", 2),
        [{"val_set_size": 0.1}, {"val_set_size": 0, "eval_steps": 3}, {"val_set_size": 0.1, "eval_strategy": "no"}],
    ),
    "ms_swift": (
        {"model": "m", "tuner_type": "lora", "max_length": 64},
        [{"split_dataset_ratio": 0.1}, {"val_dataset": ["v.jsonl"], "eval_strategy": "epoch", "save_strategy": "no"}],
        ("per_device_eval_batch_size", 1),
        [{"split_dataset_ratio": 0}, {"split_dataset_ratio": 0.1, "eval_strategy": "no"}, {"eval_strategy": "steps"}],
    ),
    "trl": (
        {"model_name_or_path": "m", "trainer": "sft", "max_length": 64},
        [{"eval_strategy": "steps"}, {"eval_strategy": "epoch", "do_eval": True}],
        ("per_device_eval_batch_size", None),
        [{"eval_strategy": "no"}, {"eval_steps": 5}],
    ),
}


@pytest.mark.parametrize("tool", EVALUATIONS)
def test_what_evaluates_is_a_job_that_does(tool, tmp_path, subtests):
    settings, evaluating, (key, default), without = EVALUATIONS[tool]
    table = list_tables()[tool]

    def fields(more):
        translation = translate(table, settings | more, tmp_path)
        assert not translation.unknown and not translation.refused
        return translation.spec().training

    for more in evaluating:
        with subtests.test(more=str(more)):
            assert evaluates(fields(more))
            assert fields(more).get("per_device_eval_batch_size") == default
            assert fields(more | {key: 24})["per_device_eval_batch_size"] == 24
    for more in without:
        with subtests.test(more=str(more)):
            assert not evaluates(fields(more))


def _axolotl(tmp_path, **changes):
    content = {
        "base_model": str(builtin_model()),
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "sequence_len": 128,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "optimizer": "adamw_torch",
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        **changes,
    }
    file = tmp_path / "lora.yml"
    file.write_text(f"# mine\n{yaml.safe_dump(content, sort_keys=False)}wandb_project:  # none yet\n")
    return file


@pytest.mark.slow
def test_estimate_plan_and_the_edited_file_agree(command, tmp_path):
    file = _axolotl(tmp_path)
    code, output, errors = command("estimate", str(file), "--hardware", "cpu", "--json")
    estimate = json.loads(output)
    assert code == 0 and "lora_mlp_kernel" in errors and "wandb_project" in errors
    assert "checkpointing" in estimate["estimated"]
    code, output, _ = command("plan", str(file), "--hardware", "cpu", "--json")
    plan = json.loads(output)
    assert code == 0 and plan["method"] == "lora" and plan["effective_batch_size"] == 8 and plan["seq_len"] == 128
    profile = next(profile for profile in plan["profiles"] if profile["profile"] == "balanced")
    assert plan["edits"]["keys"]["micro_batch_size"] * plan["edits"]["keys"].get("gradient_accumulation_steps", 4) == 8
    added = [line[1:] for line in plan["edits"]["diff"].splitlines() if line.startswith("+") and "+++" not in line]
    assert all(any(line.startswith(f"{key}:") for line in added) for key in plan["edits"]["keys"])

    content = yaml.safe_load(file.read_text()) | plan["edits"]["keys"]
    file.write_text(yaml.safe_dump(content))
    _, output, _ = command("estimate", str(file), "--hardware", "cpu", "--json")
    assert json.loads(output)["device_bytes"] == profile["estimate"]["device_bytes"]
    _, output, _ = command("plan", str(file), "--hardware", "cpu", "--json")
    assert json.loads(output)["edits"] == {
        "keys": {},
        "diff": "",
        "launcher": None,
    }  # what a plan answers is what it would choose


def test_options_go_over_the_file(command, tmp_path):
    file = _axolotl(tmp_path)
    arguments = ("--hardware", "cpu", "--seq-len", "64", "--method", "full", "--set", "gradient_accumulation_steps=1")
    _, output, _ = command("estimate", str(file), *arguments, "--json")
    estimate = json.loads(output)
    assert "2 × 1 × 1" in estimate["estimated"] and estimate["breakdown"]["gradients"] > 5 * 2**20


def test_doctor_names_lines_and_ends_with_2(command, tmp_path):
    code, output, _ = command("doctor", str(_axolotl(tmp_path)))
    assert code == 0 and "a valid axolotl configuration" in output
    file = _axolotl(tmp_path, optimizer="muon", sequence_lenn=3)
    code, _, errors = command("doctor", str(file))
    assert code == 2 and "line 11: optimizer='muon'" in errors and "sequence_lenn is not known" in errors
    code, _, errors = command("estimate", str(file))
    assert code == 2 and errors.count("\n") == 1 and "(1 more: hf-memopt doctor FILE)" in errors


def test_a_file_without_a_length_asks_for_it(command):
    file = str(FOLDER / "ms_swift" / "without_length.sh")
    code, _, errors = command("estimate", file, "--hardware", "rtx_4090")
    assert code == 2 and "--seq-len" in errors


def test_migrate_writes_what_the_recipe_takes(command, tmp_path):
    from hf_memopt.presets.trl_configs import trl_class
    from hf_memopt.recipe.answers import AnswerArguments
    from hf_memopt.recipe.recipe_arguments import parse

    code, output, _ = command("migrate", str(_axolotl(tmp_path)))
    assert code == 0 and output.startswith("accelerate launch") and "recipes/sft.py" in output
    folder = tmp_path / "run"
    code, output, _ = command("migrate", str(_axolotl(tmp_path)), str(folder))
    assert code == 0 and "launch.sh" in output
    parsed = parse(["--config", str(folder / "recipe.yaml")], own=AnswerArguments, config_class=trl_class("SFTConfig"))
    assert parsed.recipe.method == "lora" and parsed.recipe.max_length == 128 and parsed.lora["r"] == 8
    assert parsed.training["per_device_train_batch_size"] == 2 and parsed.recipe.dataset_name == "rows.jsonl"
    code, _, errors = command("migrate", str(_axolotl(tmp_path, reward_model=True)), str(folder))
    assert code == 2 and "no recipe" in errors


def test_a_command_is_edited_in_place(tmp_path):
    from hf_memopt.foreign.edits import changes, chosen_keys, diff, edit

    source = read_source(str(FOLDER / "ms_swift" / "lora.sh"))
    ours = {"training.per_device_train_batch_size": 4, "training.activation_checkpointing": False, "strategy": "zero2"}
    keys = changes(source, chosen_keys(source.table, ours))
    assert keys == {"per_device_train_batch_size": 4, "gradient_checkpointing": False, "deepspeed": "zero2"}
    text = edit(source, keys)
    changed = tmp_path / "changed.sh"
    changed.write_text(text)
    again = read_source(str(changed))
    assert again.settings == {**source.settings, **keys} and changes(again, keys) == {}
    assert diff(source, text).count("\n+ ") == 4


EDITED = [
    ("a: 1  # why\nb: 2\n", "a", 3, "a: 3  # why\nb: 2\n"),
    ("a:\nb: 2\n", "a", 1e-4, "a: 0.0001\nb: 2\n"),
    ("a: &x 1\nb: *x\n", "a", "1", "a: &x '1'\nb: *x\n"),
    ("a: [1, 2]\n", "a", ["z"], "a: [1, 2, z]\n"),
    ("a:\n  - 1\nb: 2\n", "a", ["y", "z"], "a:\n  - 1\n  - y\n  - z\nb: 2\n"),
    ("s: {a: 1, b: 2}\n", "s.b", ["x", "y"], "s: {a: 1, b: [x, y]}\n"),
    ("a: 1", "b", ["y", "z"], "a: 1\nb:\n- y\n- z\n"),
    ("", "b", 1, "b: 1\n"),
    ("a: 1\n", "s.c", 1, "a: 1\ns.c: 1\n"),
    ("s:\n  a: 1\nb: 2\n", "s.c", True, "s:\n  c: true\n  a: 1\nb: 2\n"),
    ("s: {a: 1}\n", "s.c", 0.5, "s: {c: 0.5, a: 1}\n"),
    ("s: {}\n", "s.c", 0.5, "s: {c: 0.5}\n"),
    ("s: 1\n", "s.c", 0.5, None),
    ("s:\n  a: 1\n", "s.b.c", 1, None),
    ("a: 1\nb: 2\n", "a", None, "b: 2\n"),
    ("a: 1\nb: 2", "b", None, "a: 1\n"),
    ("a: 1\n", "b", None, None),
]


def test_a_key_is_edited_where_it_stands(subtests):
    for text, key, value, edited in EDITED:
        with subtests.test(f"{text} {key} {value} {edited}"):
            from hf_memopt.foreign.edits import _edit_yaml

            assert _edit_yaml(text, key, value) == edited


@pytest.mark.parametrize("name", ["axolotl/cut_cross_entropy.yaml", "axolotl/liger_zero3.yaml"])
def test_edits_keep_comments_and_other_keys(name, tmp_path):
    from hf_memopt.foreign.edits import changes, chosen_keys, edit

    source = read_source(str(FOLDER / name))
    keys = changes(source, chosen_keys(source.table, {"memory.loss_chunk_size": True, "training.optim": "adamw_8bit"}))
    changed = yaml.safe_load(edit(source, keys))
    assert changed["optimizer"] == "adamw_8bit"
    plugin = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    assert changed["plugins"].count(plugin) == 1
    assert {*changed, *source.settings, "plugins"} == {*source.settings, "optimizer"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pip install axolotl", "no command here trains"),
        ("swift sft --model 'open", "not readable as a command"),
        ("axolotl train missing.yml", "missing.yml, which the command names, is not here"),
        ("swift sft --model a --max_length 8; ls", None),
        ("trl sft --config nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_commands_that_cannot_be_answered_are_refused_in_one_sentence(text, words):
    if words is None:
        assert read_source(text).settings["model"] == "a"
        return
    with pytest.raises(InputError, match=words):
        read_source(text)


def test_a_recipes_config_names_the_tool(tmp_path):
    from hf_memopt.recipe.recipe_arguments import parse

    with pytest.raises(InputError, match="is axolotl's: hf-memopt estimate"):
        parse(["--config", str(_axolotl(tmp_path))])


def test_ids_of_the_same_sizes_name_bundled_architectures():
    from hf_memopt.estimator.architectures import _names, is_bundled_id

    assert all(model.path.is_file() for model in _names().values())
    assert is_bundled_id("NousResearch/Llama-3.2-1B") and not is_bundled_id("NousResearch/Hermes-3-Llama-3.1-8B")


_ZERO2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", {"world_size": 2}),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n",
            {"training.fsdp_config": {"version": 2, "cpu_offload": True}},
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_optimizer_device: cpu}\n",
            {"training.deepspeed": {**AUTO, "zero_optimization": _ZERO2, "zero_allow_untested_optimizer": True}},
        ),
        ("distributed_type: TPU\n", "is not modelled"),
        ("a: 1\n", "is no configuration of accelerate"),
    ],
)
def test_the_launchers_file_decides_the_engine(tmp_path, content, expected):
    (tmp_path / "acc.yaml").write_text(content)
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file acc.yaml sft.py --model_name_or_path Qwen/Qwen3-0.6B"
    )
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            read_source(str(tmp_path / "run.sh"))
        return
    fields = read_source(str(tmp_path / "run.sh")).translate().fields
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_an_engine_is_the_same_by_name_file_and_options(name, tmp_path):
    """Of TRL's own files."""
    path = launch_file(name)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    kind = {"DEEPSPEED": ["--use_deepspeed"], "FSDP": ["--use_fsdp"]}.get(content["distributed_type"], [])
    settings = {**content, **content.get("deepspeed_config", {}), **content.get("fsdp_config", {})}
    switches = {
        f"--{key}": value for key, value in settings.items() if f"--{key}" in LAUNCHERS["accelerate"][0].split()
    }
    flags = [f"--{key} {value}" for key, value in settings.items() if not isinstance(value, dict | list)]
    flags = [flag for flag in flags if flag.split()[0] not in switches] + [
        key for key, on in switches.items() if on is True
    ]
    job = "--model_name_or_path Qwen/Qwen3-0.6B"
    (tmp_path / "job.yaml").write_text(
        f"model_name_or_path: Qwen/Qwen3-0.6B\naccelerate_config: {name}\noutput_dir: out\n"
    )
    sources = (
        f"trl sft {job} --accelerate_config {name}",
        f"accelerate launch --config_file {path} sft.py {job}",
        f"accelerate launch {' '.join([*kind, *flags])} trl/scripts/sft.py {job}",
        str(tmp_path / "job.yaml"),
    )
    fields = [dict(read_source(source).translate().fields) for source in sources]
    engines = [{key: own.get(key) for key in _ENGINE} for own in fields]
    assert engines == [engines[0]] * 4
    assert engines[0]["world_size"] == content["num_processes"]
    assert ("training.deepspeed" if "zero" in name else "training.fsdp") in fields[0] or "gpu" in name


_ENGINE = ("world_size", "training.deepspeed", "training.fsdp", "training.fsdp_config")


def test_options_of_the_launcher_that_are_not_modelled_are_refused(subtests):
    for options, named in [
        ("--use_megatron_lm --megatron_lm_tp_degree 2", "use_megatron_lm"),
        ("--mixed_precision fp8", "fp8"),
        ("--dynamo_backend inductor", "dynamo_backend"),
        ("--cpu", "cpu"),
        ("--multi_gpu --parallelism_config_cp_size 2", "parallelism_config_cp_size"),
        ("--use_fsdp --parallelism_config_tp_size 2", "parallelism_config_tp_size"),
        ("--use_fsdp --parallelism_config_cp_size two", "parallelism_config_cp_size='two'"),
        ("--use_fsdp --num_processes 8 --parallelism_config_cp_size 2", "is not num_processes=8"),
        ("--from_the_future 1", "from_the_future"),
    ]:
        with subtests.test(options=str(options)), pytest.raises(InputError, match=named):
            read_source(f"accelerate launch {options} sft.py --model_name_or_path Qwen/Qwen3-0.6B")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("fsdp", "job", "expected"),
    [
        (
            "",
            "--gradient_checkpointing False",
            "checkpointing, sdpa, fused loss, fsdp2, samples shared by 2, 1 × 8 × 2",
        ),
        ("", "", "Trainer raises an error"),
        ("_offload", "--gradient_checkpointing False", "samples shared by 2, 1 × 8 × 2"),
    ],
)
def test_context_parallelism_of_trls_command(fsdp, job, expected, command):
    """FSDP's own checkpointing goes with the Trainer's off alone, which TRL's is not by default."""
    text = (
        "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 --parallelism_config_cp_size 2 "
        "--parallelism_config_dp_shard_size 2 --fsdp_activation_checkpointing true "
        f"{f'--fsdp_activation_checkpointing{fsdp} true' if fsdp else ''} sft.py --model_name_or_path "
        f"{builtin_model()} --max_length 64 --per_device_train_batch_size 1 --gradient_accumulation_steps 8 {job}"
    )
    code, output, errors = command("estimate", text, "--hardware", "h100_80gbx4", "--json")
    assert expected in (json.loads(output)["estimated"] if code == 0 else errors)
    code, _, errors = command("plan", text, "--hardware", "h100_80gbx4")
    assert code == 2 and "sequence_parallel=2: plan chooses how many devices share a sample" in errors


def test_a_long_command_is_no_files_name(command):
    words = "trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name mine " + "--learning_rate 1e-5 " * 20
    assert command("doctor", words)[0] == 0


def test_launchers_processes_and_precision():
    job = "sft.py --model_name_or_path Qwen/Qwen3-0.6B"

    def fields(text):
        return read_source(text).translate().fields

    assert fields(f"torchrun --nnodes 2 --nproc_per_node 8 {job}")["world_size"] == 16
    assert fields(f"accelerate launch --mixed_precision bf16 {job} --bf16 false")["training.bf16"] is True
    assert fields(f"accelerate launch --mixed_precision no {job} --bf16 false")["training.bf16"] is False
    assert fields(f"accelerate launch {job} --no_gradient_checkpointing")["training.activation_checkpointing"] is False


@pytest.mark.slow
def test_torchtunes_adapters_have_the_models_dtype_and_pefts_are_in_fp32(command, tmp_path):
    changes = {"adapter": "lora", "lora_r": 64, "bf16": True}
    estimates = []
    for key in ({}, {"peft_autocast_adapter_dtype": False}):  # as torchtune trains them
        _, output, _ = command("estimate", str(_axolotl(tmp_path, **changes, **key)), "--hardware", "cpu", "--json")
        estimates.append(json.loads(output)["breakdown"])
    in_fp32, as_loaded = estimates
    assert as_loaded["optimizer_states"] == pytest.approx(in_fp32["optimizer_states"] / 2, rel=0.05)
    assert not read_source(str(FOLDER / "torchtune" / "lora.yaml")).translate().spec().tool.autocast_adapter_dtype


def test_torchtunes_4_bit_weights_are_multiplied_in_the_models_dtype():
    """bitsandbytes' default, fp32, is peft's dtype for adapters and for all that passes through them."""
    spec = read_source(str(FOLDER / "torchtune" / "qlora.yaml")).translate().spec()
    assert spec.quantization["bnb_4bit_compute_dtype"] == spec.dtype == "bfloat16"


@pytest.mark.parametrize(("adapter", "masters"), [("", False), ("lora", True)])
def test_axolotls_fsdp2_keeps_no_fp32_masters(adapter, masters, tmp_path):
    file = _axolotl(
        tmp_path, adapter=adapter, fsdp_version=2, fsdp_config={"reshard_after_forward": True}, bf16="auto"
    )
    spec = read_source(str(file)).translate().spec()
    assert spec.dtype == "bfloat16" and spec.training["bf16"] is masters


@pytest.mark.slow
def test_a_plan_keeps_an_optimizer_that_the_file_chose(command, tmp_path):
    file = _axolotl(tmp_path, adapter="", optimizer="paged_adamw_8bit")
    code, output, _ = command("plan", str(file), "--hardware", "rtx_4090", "--json")
    plan = json.loads(output)
    assert code == 0 and plan["method"] == "full" and "optimizer" not in plan["edits"]["keys"]
    assert all(profile["training_arguments"]["optim"] == "paged_adamw_8bit" for profile in plan["profiles"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if "error" not in expected])
def test_odd_values_are_answered_or_refused(name):
    """Whatever stands beside a key: a job, or an InputError."""
    source = read_source(str(FOLDER / name))
    for key in {*source.settings, *source.table.defaults}:
        for value in (None, True, 0, -1, 1.5, "", "x", "1e-4", [], [1], {}, {"a": 1}, [{"a": 1}], float("nan")):
            translation = replace(source, settings={**source.settings, key: value}).translate()
            try:
                translation.check()
                translation.spec(seq_len=64)
            except InputError as error:
                assert str(error).count("\n") == 0


def test_trls_trainer_is_the_one_that_has_the_files_settings(tmp_path, subtests):
    for settings, task, remarks in [
        *(("beta: 0.1", "dpo", 1), ("beta: 0.1\ndesirable_weight: 2", "kto", 0)),
        *(("precompute_ref_log_probs: true\nrpo_alpha: 1", "dpo", 0), ("loss_type: [sigmoid, sft]", "dpo", 0)),
        *(("loss_type: sigmoid", "dpo", 0), ("loss_type: dapo", "grpo", 0), ("loss_type: dft", "sft", 0)),
        *(("packing: true", "sft", 0), ("learning_rate: 1e-5", "sft", 1)),
        ("num_generations: 4\nbeta: 0.04", "grpo", 1),
        ("num_generations: 4\nnormalize_advantages: true", "rloo", 0),
        *(("center_rewards_coefficient: 0.1", "reward", 0), ("packing: true\nbeta: 0.1", None, 0)),
    ]:
        with subtests.test(settings=str(settings)):
            file = tmp_path / "job.yaml"
            file.write_text(f"model_name_or_path: Qwen/Qwen3-0.6B\noutput_dir: out\n{settings}\n")
            translation = read_source(str(file)).translate()
            assert (translation.fields.get("task"), len(translation.approximated)) == (task, remarks)
            if task is None:
                with pytest.raises(InputError, match=r"no trainer has all .* trl dpo --config FILE"):
                    translation.check()
                continue
            translation.check()
            training = translation.spec(seq_len=64).training
            own = {
                key: value
                for key, value in yaml.safe_load(settings).items()
                if key in ("precompute_ref_log_probs", "loss_type")
            }
            assert own.items() <= training.items()
            if task == "grpo" and remarks:
                assert training["beta"] == 0.04


def test_the_keys_by_which_a_trainer_is_known_are_fields_of_its_configuration():
    """But for old names and those of scripts; no other trainer has a key that names one alone."""
    from fnmatch import fnmatch

    from hf_memopt.estimator.trl_tasks import TRL_TASKS

    choices = list_tables()["trl"].implied["trainer"]
    fields = {task: set(row.config_class.__dataclass_fields__) for task, row in TRL_TASKS.items()}
    for words in choices.values():
        plain = [word for word in words.split() if "=" not in word]
        for name in set.union(*fields.values()):
            if any(fnmatch(name, word) for word in plain):
                known = {task for task, keys in choices.items() if any(fnmatch(name, key) for key in keys.split())}
                assert known == {task for task in fields if name in fields[task]}, name


def test_trainers_that_hold_logits_are_refused_with_their_reason(subtests):
    """TRL's own here hold none: a trace of them is no prediction of another's."""
    for text, key, words in [
        ("llamafactory-cli train --stage dpo --pref_loss simpo", "pref_loss", "this loss"),
        ("llamafactory-cli train --stage dpo --enable_liger_kernel true", "enable_liger_kernel", "model/loader.py"),
        ("llamafactory-cli train --stage dpo --ref_model b --finetuning_type lora", "ref_model", "beside adapters"),
        ("llamafactory-cli train --stage dpo --finetuning_type full --deepspeed ds_z3_config", "stage", "reference"),
        ("llamafactory-cli train --stage dpo --packing true --neat_packing true", "neat_packing", "stage: sft"),
        ("llamafactory-cli train --stage kto --per_device_train_batch_size 1", "stage", "train/kto/trainer.py"),
        ("llamafactory-cli train --stage rm", "stage", "value head"),
        ("llamafactory-cli train --stage ppo", "stage", "this trainer is not modelled"),
        ("llamafactory-cli train --use_asft_loss true", "use_asft_loss", "reference model"),
        ("swift rlhf --tuner_type full", "rlhf_type", "default is DPO"),
        ("swift rlhf --rlhf_type dpo --tuner_type full", "rlhf_type", "reference model"),
        ("swift rlhf --use_liger_kernel true", "use_liger_kernel", "ms-swift's DPO"),
        ("swift rlhf --rlhf_type dpo --use_liger_kernel true", "use_liger_kernel", "ms-swift's DPO"),
        ("swift rlhf --ref_model b", "ref_model", "full training"),
        ("swift rlhf --rlhf_type kto", "rlhf_type", "logits of all answers"),
        ("swift rlhf --rlhf_type grpo --max_completion_length 512", "rlhf_type", "logits of all answers"),
        ("swift rlhf --rlhf_type rm --ref_model b", "ref_model", "full training"),
    ]:
        with subtests.test(text=text, key=key, words=words):
            model = "--model a" if text.startswith("swift") else "--do_train true --model_name_or_path a"
            faults = dict(read_source(f"{text} {model}").translate().faults())
            assert list(faults) == [key] and words in faults[key]


@pytest.mark.parametrize("rl", ["dpo", "ipo", "kto", "grpo", "orpo"])
def test_axolotls_preference_trainers_are_refused(rl, tmp_path):
    file = _axolotl(tmp_path, rl=rl, dpo_use_liger_kernel=True, plugins=["axolotl.integrations.liger.LigerPlugin"])
    assert [key for key, _ in read_source(str(file)).translate().faults()] == ["rl"]


def test_torchtunes_dpo_is_refused(tmp_path):
    content = yaml.safe_load((FOLDER / "torchtune" / "lora.yaml").read_text())
    content["loss"] = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(content))
    faults = [key for key, _ in read_source(str(tmp_path / "dpo.yaml")).translate().faults()]
    assert faults == ["loss._component_"]


def test_a_file_of_ms_swifts_preference_training_is_none_of_fine_tuning(tmp_path):
    (tmp_path / "job.yaml").write_text("model: a\nrlhf_type: dpo\n")
    assert read_source(str(tmp_path / "job.yaml")).translate().fields["task"] == "dpo"


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("llamafactory-cli train --stage dpo --do_train true --bf16 true --cutoff_len 256 --model_name_or_path", 4),
        ("swift rlhf --max_length 256 --per_device_train_batch_size 1 --model", 3),
        ("trl dpo --use_peft true --max_length 256 --per_device_train_batch_size 1 --model_name_or_path", 0),
    ],
)
def test_dpo_holds_the_logits_that_the_tools_trainer_holds(text, copies, command):
    """LLaMA-Factory's: the policy's and the reference's, each with its log softmax; ms-swift's: the policy's, and
    their gradient while rows of it are added up."""
    batch = " --per_device_train_batch_size 1" if text.startswith("llama") else ""
    code, output, _ = command("estimate", f"{text} {builtin_model()}{batch}", "--hardware", "rtx_4090", "--json")
    vocabulary = json.loads((Path(builtin_model()) / "config.json").read_text())["vocab_size"]
    logits = json.loads(output)["breakdown"]["logits"] / (2 * 256 * vocabulary * 4)
    assert code == 0 and logits == pytest.approx(copies, rel=0.02, abs=0.01)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("swift sft --max_length 64 --model", ("--task", "kto")),
        ("swift rlhf --max_length 64 --model", ("--method", "full")),
        ("llamafactory-cli train --do_train true --model_name_or_path", ("--task", "grpo")),
    ],
)
def test_options_make_no_trainer_of_a_tool_that_is_not_modelled(text, options, command):
    code, _, errors = command("estimate", f"{text} {builtin_model()}", "--hardware", "rtx_4090", *options)
    assert code == 2 and "trainer holds logits" in errors


@pytest.mark.parametrize("tool", ["LLaMA-Factory", "ms-swift"])
def test_heads_with_all_logits_score_as_trls_head_does(tool):
    import torch
    import trl.trainer.dpo_trainer
    from transformers import AutoModelForCausalLM

    from hf_memopt.estimator.patches.trl_trainers import whole_logits

    ids = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
    labels = ids.masked_fill(torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool(), -100)
    scores = []
    for other in ("", tool):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(builtin_model(), dtype="float32")
        with whole_logits(other):
            trl.trainer.dpo_trainer.add_fused_lm_head(
                model, outputs=("log_probs", "entropy", "mean_logits", "is_top1")
            )
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
        outputs.log_probs.sum().backward()
        scores.append((outputs.log_probs, model.get_input_embeddings().weight.grad))
    for fused, whole in zip(*scores, strict=True):
        torch.testing.assert_close(fused, whole, rtol=1e-3, atol=1e-4)
