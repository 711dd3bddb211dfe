"""A plan answers in another tool's keys: the file with them in it is the job whose numbers the plan shows."""

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import flags

from hf_memopt.cli.foreign import read_job
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.engines import engine_named
from hf_memopt.foreign.edits import changes, chosen_keys, edit, launched, planned
from hf_memopt.foreign.key_table import list_tables
from hf_memopt.foreign.source import read_settings, read_source
from hf_memopt.planner.choice_jobs import choice_job
from hf_memopt.planner.choices import list_choices
from hf_memopt.planner.settle import left_open, settle

FOLDER = Path(__file__).parents[1] / "foreign_configs"
_TRL = {"model_name_or_path": str(builtin_model()), "dataset_name": "rows", "torch_dtype": "float32"}
_AXOLOTL = {"base_model": str(builtin_model()), "datasets": [{"path": "rows"}], "sequence_len": 128}
# What a plan knows of by the file alone: an engine's file, a size of chunks, a dtype, a default of the tool.
FILES = {
    "axolotl": (_AXOLOTL | {"micro_batch_size": 2, "gradient_checkpointing": True}, "rtx_4090"),
    "axolotl, FSDP": (
        _AXOLOTL | {"fsdp_version": 2, "fsdp_config": {"offload_params": False}, "micro_batch_size": 2},
        "rtx_4090_x2",
    ),
    "axolotl, chunks": (
        _AXOLOTL | {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "bf16": False},
        "rtx_4090",
    ),
    "LLaMA-Factory, ZeRO-3": (
        {
            "model_name_or_path": str(builtin_model()),
            "template": "default",
            "do_train": True,
            "finetuning_type": "full",
            "cutoff_len": 128,
            "pure_bf16": True,
            "per_device_train_batch_size": 2,
            "deepspeed": "examples/deepspeed/ds_z3_config.json",
        },
        "rtx_4090_x2",
    ),
    "TRL's defaults": (_TRL | {"max_length": 128}, "rtx_4090"),
    "TRL, FSDP2": (_TRL | {"max_length": 128, "accelerate_config": "fsdp2"}, "h100_x8"),
    "TRL, vLLM": (
        _TRL
        | {"max_completion_length": 64, "num_generations": 4, "use_vllm": True, "vllm_mode": "colocate"}
        | {"vllm_gpu_memory_utilization": 0.9, "per_device_train_batch_size": 4, "generation_batch_size": 16},
        "rtx_4090",
    ),
}


def _same_answer(command, file: Path, hardware: str) -> None:
    """The file, changed as its plan says, is estimated as the plan was, and needs no other change."""
    code, output, errors = command("plan", str(file), "--hardware", hardware, "--json")
    if code:
        assert code == 1 or errors.startswith(("note: ", "error: "))
        return
    plan = json.loads(output)
    profile = next((one for one in plan["profiles"] if one["profile"] == "balanced"), plan["profiles"][0])
    source, keys = read_source(str(file)), plan["edits"]["keys"]
    edited = file.with_name(f"edited_{file.name}")
    text, strategy = edit(source, keys), ()
    if launcher := plan["edits"]["launcher"]:
        before, text = text, launched(text, launcher) if source.command else text
        strategy = ("--strategy", profile["strategy"]) if text == before else ()
        assert (f"+{launcher}" in plan["edits"]["diff"]) == (text != before)
    edited.write_text(text)
    code, output, errors = command("estimate", str(edited), "--hardware", hardware, *strategy, "--json")
    assert code == 0, errors
    found, shown = json.loads(output), profile["estimate"]
    for name in ("device_bytes", "host_bytes", "step_seconds", "phases"):
        assert found[name] == shown[name], name
    assert changes(read_source(str(edited)), keys) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_edited_file_is_the_job_that_was_planned(name, command, tmp_path):
    content, hardware = FILES[name]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    code, _, errors = command("plan", str(file), "--hardware", hardware, "--json")
    assert code == 0, errors
    _same_answer(command, file, hardware)


@pytest.mark.sweep
@pytest.mark.parametrize("hardware", ["rtx_4090", "h100_x8"])
@pytest.mark.parametrize("name", sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*")))
def test_every_edited_file_is_the_job_that_was_planned(name, hardware, command, tmp_path):
    for beside in (FOLDER / name).parent.iterdir():
        (tmp_path / beside.name).write_text(beside.read_text())
    _same_answer(command, tmp_path / Path(name).name, hardware)


def test_a_file_of_a_tool_has_the_engine_of_its_strategy(subtests):
    for table in list_tables().values():
        for strategy, file in table.plan.get("strategy", {}).get("values", {}).items():
            with subtests.test(table=table.name, strategy=strategy):
                zero = table.engines[Path(file).stem]["zero_optimization"]
                offloads = {part for part in ("offload_optimizer", "offload_param") if part in zero}
                engine = engine_named(strategy)
                assert zero["stage"] == engine.zero_stage
                assert bool(offloads) == bool(engine.offloads)
                assert ("offload_param" in offloads) == (strategy == "zero3_offload_cpu")


# Settings as files of a tool have them, each left out in a third of the files.
_BATCH = {"gradient_accumulation_steps": [1, 2, 4], "gradient_checkpointing": [True, False]}
_TRAINER = _BATCH | {"per_device_train_batch_size": [1, 2, 4], "bf16": [True, False]}
RANDOM = {
    "axolotl": (
        _AXOLOTL,
        _BATCH
        | {
            "micro_batch_size": [1, 2, 4],
            "adapter": ["lora"],
            "lora_r": [8],
            "lora_target_linear": [True],
            "bf16": [True, False, "auto"],
            "optimizer": ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit"],
            "deepspeed": [
                "deepspeed_configs/zero1.json",
                "deepspeed_configs/zero2.json",
                "deepspeed_configs/zero3_bf16.json",
            ],
            "plugins": [["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]],
            "sample_packing": [True, False],
            "dataloader_num_workers": [2],
        },
    ),
    "LLaMA-Factory": (
        {"model_name_or_path": str(builtin_model()), "template": "default", "do_train": True, "cutoff_len": 128},
        _TRAINER
        | {
            "finetuning_type": ["full", "lora"],
            "pure_bf16": [True],
            "optim": ["adamw_torch", "adamw_8bit"],
            "deepspeed": [f"examples/deepspeed/ds_z{stage}_config.json" for stage in (0, 2, 3)],
            "disable_gradient_checkpointing": [True, False],
            "use_unsloth_gc": [True],
            "enable_liger_kernel": [True],
            "do_eval": [True],
            "per_device_eval_batch_size": [16],
        },
    ),
    "ms-swift": (
        {"model": str(builtin_model()), "dataset": "rows", "max_length": 128, "tuner_type": "full"},
        _TRAINER
        | {
            "torch_dtype": ["float32", "bfloat16"],
            "optim": ["adamw_torch", "adafactor"],
            "deepspeed": ["zero0", "zero2", "zero3", "zero2_offload"],
            "packing": [True],
            "attn_impl": ["sdpa", "eager"],
        },
    ),
    "TRL": (
        _TRL,
        _TRAINER
        | {
            "max_length": [64, 128],
            "bf16": [True],  # another is the launcher's to say
            "use_peft": [True],
            "torch_dtype": ["float32", "bfloat16"],
            "optim": ["adamw_torch", "adamw_8bit"],
            "packing": [True],
            "accelerate_config": ["zero2", "zero3"],
            "do_eval": [True],
            "activation_offloading": [False],
            "loss_type": ["nll"],
        },
    ),
}


def random_file(tool: str, seed: int) -> tuple[dict, str]:
    """A file of a tool, and the hardware that it is planned for."""
    rng = random.Random(f"{tool} {seed}")
    content, settings = RANDOM[tool]
    drawn = {name: rng.choice(values) for name, values in settings.items() if rng.random() < 2 / 3}
    if "adapter" not in drawn:
        drawn = {name: value for name, value in drawn.items() if not name.startswith("lora")}
    return content | drawn, "h100_x8" if "accelerate_config" in drawn else rng.choice(["rtx_4090", "rtx_4090_x2"])


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tool", RANDOM)
def test_any_edited_file_is_the_job_that_was_planned(tool, seed, command, tmp_path):
    content, hardware = random_file(tool, seed)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    _same_answer(command, file, hardware)


_LLAMA = "model_name_or_path: m\ntemplate: t\ndo_train: true\n"
_SFT = "trainer: sft\nmodel_name_or_path: m\ndataset_name: d\n"
_GRPO = "model_name_or_path: m\ndataset_name: d\nreward_funcs: [accuracy]\n"
# File, ours -> the file with a plan's settings, and fields that it then says.
PLANNED = [
    (
        f"{_LLAMA}deepspeed: examples/deepspeed/ds_z3_config.json\noptim: adamw_torch\n",
        {"strategy": "ddp"},
        f"{_LLAMA}optim: adamw_torch\n",
        {"deepspeed": None},
    ),
    (
        f"{_LLAMA}fsdp: full_shard auto_wrap\nfsdp_config:\n  fsdp_version: 2  # theirs\n# mine\noptim: sgd\n",
        {"strategy": "zero2"},
        f"{_LLAMA}# mine\noptim: sgd\ndeepspeed: examples/deepspeed/ds_z2_config.json\n",
        {"fsdp": None, "deepspeed": True},
    ),
    (
        f"{_SFT}accelerate_config: zero3\nmax_length: 8\n",
        {"strategy": "zero2", "training.activation_checkpointing": False},
        f"{_SFT}max_length: 8\ngradient_checkpointing: false\n",
        {"deepspeed": None, "activation_checkpointing": False, "per_device_train_batch_size": 8},
    ),
    (
        f"{_GRPO}generation_batch_size: 8\nuse_vllm: true\n",
        {"training.steps_per_generation": 4, "training.vllm_enable_sleep_mode": True},
        f"{_GRPO}use_vllm: true\nsteps_per_generation: 4\nvllm_enable_sleep_mode: true\n",
        {"generation_batch_size": None, "steps_per_generation": 4, "vllm_enable_sleep_mode": True},
    ),
]


@pytest.mark.parametrize(("text", "ours", "edited", "fields"), PLANNED)
def test_settings_of_a_plan_in_a_file(text, ours, edited, fields):
    source = read_settings(Path("job.yaml"), text)
    assert edit(source, changes(source, chosen_keys(source.table, ours))) == edited
    training = planned(source, ours).training
    for name, value in fields.items():
        assert training.get(name) == value or (value is True and training.get(name))


def test_what_a_search_changes_stays(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(_TRL | {"max_length": 64, "bf16": True}))
    spec = settle(left_open(read_job(str(file), "full", None, hardware="rtx_4090")[0]), "full")
    changed = replace(spec, training=spec.training | {"max_grad_norm": 0})
    for one, norm in ((spec, None), (changed, 0)):
        fields = choice_job(one, list_choices(one)[0]).fields
        assert fields.get("max_grad_norm") == norm and fields["bf16"] is True


def test_a_command_starts_as_its_plan_says(subtests):
    """What its own launcher says of machines stays; where another launcher says that, nothing changes."""
    plans = "accelerate launch --use_deepspeed --zero_stage 3"
    places = '--main_process_port 29501 --machine_rank=$RANK --main_process_ip "$IP" --same_network'
    for before, after in {
        "accelerate launch --mixed_precision bf16 sft.py": f"{plans} --mixed_precision bf16 sft.py",
        f"A=1 nohup accelerate launch --multi_gpu {places} \\\n  --use_fsdp \\\n sft.py &": (
            f"A=1 nohup {plans} {places} \\\n sft.py &"
        ),
        "/bin/accelerate launch --tee 3 sft.py": f"{plans} --tee 3 sft.py",
        "accelerate launch --machine-rank $R sft.py": f"{plans} --machine-rank $R sft.py",
        "torchrun --standalone --nproc_per_node=2 sft.py": f"{plans} sft.py",
        "deepspeed --num_gpus 2 sft.py": f"{plans} sft.py",
        "python sft.py --max_length 2": f"{plans} sft.py --max_length 2",
        "torchrun --nproc-per-node 2 --nnodes 2 sft.py": None,
        "python -u sft.py": None,
        "python -m torch.distributed.run --nproc_per_node 2 sft.py": None,
        "trl sft --max_length 2": None,
    }.items():
        with subtests.test(before):
            words = [line.replace("sft.py", "trl/scripts/sft.py") for line in (before, after or before)]
            assert launched(words[0], plans) == words[1]
    shared, run = "PARALLELISM_CONFIG_SP_SIZE=2 accelerate launch", "accelerate launch trl/scripts/sft.py"
    assert launched(f"cd x\n{run}", shared) == f"cd x\n{shared} trl/scripts/sft.py"
    assert launched(f"nohup {run}", shared) == f"nohup {run}"
    plans = 'accelerate launch --machine_rank "$MACHINE_RANK" --mixed_precision fp8 --tee 1'
    own = "accelerate launch --machine-rank=3 --mixed_precision no trl/scripts/sft.py"
    assert (
        launched(own, plans) == "accelerate launch --mixed_precision fp8 --tee 1 --machine-rank=3 trl/scripts/sft.py"
    )


@pytest.mark.slow
def test_a_file_of_trl_is_started_by_a_launcher(command, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(_TRL | {"max_length": 128, "per_device_train_batch_size": 2}))
    arguments = ("plan", str(file), "--hardware", "h100_x8", "--method", "full")
    _, output, _ = command(*arguments, "--json")
    plan = json.loads(output)
    words = shlex.split(plan["edits"]["launcher"])
    assert words[:2] == ["accelerate", "launch"] and "fsdp_activation_checkpointing true" not in " ".join(words)
    _, output, _ = command(*arguments)
    assert "start  accelerate launch" in output
    launch = "accelerate launch --num_processes 8 trl/scripts/sft.py"
    script = tmp_path / "job.sh"
    script.write_text(" ".join([launch, *flags(**_TRL, max_length=128, per_device_train_batch_size=2)]))
    _, output, _ = command("plan", str(script), *arguments[2:])
    assert f"+{shlex.join(words)} trl/scripts/sft.py" in output and "start  " not in output
    _, output, _ = command("plan", str(file), "--hardware", "rtx_4090", "--json")
    assert json.loads(output)["edits"]["launcher"] is None
