"""The ways in by copying, from a folder of one's own: a DeepSpeed JSON, and an accelerate YAML alone."""

import json
import re
import shutil
import socket

import pytest
import yaml
from conftest import ROOT, flags, run, slow, sweep

from hf_memopt.cli.doctor import check_files
from hf_memopt.compatibility import check_config_file
from hf_memopt.compatibility.resolve import cannot_start, resolve_engine
from hf_memopt.engines.deepspeed import decode_inline, deepspeed_config
from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset
from hf_memopt.presets.accelerate_config import inline

CONFIGS = ROOT / "accelerate_configs"
ON_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
# torch leaves gloo's threads to the interpreter's end, also after destroy_process_group(): in one of some hundred
# launches such a thread aborts a process that has done its work (pytorch/pytorch#179291). Recipes end without the
# interpreter's (hf_memopt.program); a script that knows nothing of hf_memopt is started again.
_ABORTED = "terminate called without an active exception"


@pytest.fixture
def project(tmp_path, builtin_model, jsonl):
    """A folder with a script that does not know hf_memopt, and the words that start it for two steps on the CPU."""
    shutil.copy(ROOT / "docs" / "plain_script.py", tmp_path)
    texts = jsonl([{"text": f"line {number} of a text"} for number in range(16)])
    words = [
        "plain_script.py",
        *flags(model_name=builtin_model, texts=texts, output_dir="out", max_steps=2),
        "--use_cpu",
        *flags(per_device_train_batch_size=2, disable_tqdm="true"),
    ]
    return tmp_path, words


def _trains_under_zero(project, *words) -> None:
    """Run it; it says a loss, and two processes must have left their shards of the optimizer."""
    folder, _ = project
    done = run(*words, cwd=folder, env=ON_CPU)
    if _ABORTED in done.stderr:
        done = run(*words, cwd=folder, env=ON_CPU)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    shards = sorted(path.name for path in folder.glob("out/checkpoint-2/global_step2/*optim_states.pt"))
    assert len(shards) == 2 and all(f"zero_pp_rank_{rank}_" in name for rank, name in enumerate(shards))
    assert float(re.search(r"'train_loss': '?([\d.]+)", output)[1]) > 0


# ---- a DeepSpeed JSON


def _free_port() -> int:
    """One that nobody listens at; DeepSpeed's launcher cannot choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ZeRO-3 on a CPU under torchrun needs DeepSpeed's communication before the model, which the recipes start (below).
# torchrun and accelerate start what is below, too.
LAUNCHERS = [
    sweep(["torchrun", "--standalone", "--nproc_per_node", 2], ["--deepspeed", "zero2.json"]),
    slow(["deepspeed", "--num_gpus", 2, "--master_port", _free_port()], ["--deepspeed", "zero2.json"]),
    sweep(
        [
            "accelerate",
            "launch",
            *flags(main_process_port=0, num_processes=2),
            "--use_deepspeed",
            "--deepspeed_config_file",
            "zero3.json",
            "--zero3_init_flag",
            "true",
        ],
        [],
    ),
]


@pytest.mark.parametrize(("launcher", "arguments"), LAUNCHERS, ids=["torchrun", "deepspeed", "accelerate"])
def test_a_copied_json_under_every_launcher(launcher, arguments, project):
    folder, words = project
    for name in ("zero2.json", "zero3.json"):
        shutil.copy(CONFIGS / "deepspeed" / name, folder)
    _trains_under_zero(project, *launcher, *words, *arguments)


@pytest.mark.slow
def test_a_recipe_with_a_copied_json(builtin_model, jsonl, tmp_path):
    shutil.copy(CONFIGS / "deepspeed" / "zero3.json", tmp_path)
    texts = jsonl([{"text": f"line {number} of a text"} for number in range(64)])
    done = run(
        "torchrun",
        "--standalone",
        "--nproc_per_node",
        2,
        ROOT / "recipes" / "pretrain.py",
        *flags(
            preset="cpu",
            model_name_or_path=builtin_model,
            dataset_name=texts,
            held_out=0,
            max_length=32,
            max_steps=2,
            output_dir="out",
            samples=0,
            effective_batch_size=4,
            per_device_train_batch_size=2,
            deepspeed="zero3.json",
        ),
        cwd=tmp_path,
        env=ON_CPU,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert len(list(tmp_path.glob("out/checkpoint-2/global_step2/zero_pp_rank_*_optim_states.pt"))) == 2


def test_without_a_launcher_deepspeed_cannot_start(monkeypatch):
    engine = resolve_engine({"deepspeed": "zero3"})
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert "torchrun --nproc_per_node 1" in cannot_start(engine)
    assert cannot_start(resolve_engine({})) is None
    monkeypatch.setattr("sys.argv", [str(ROOT / "recipes" / "sft.py")])
    monkeypatch.chdir(ROOT)
    assert "torchrun --nproc_per_node 1 recipes/sft.py" in cannot_start(engine)
    with monkeypatch.context() as managed:  # DeepSpeed reads SageMaker's own variables
        managed.setenv("SM_TRAINING_ENV", "{}")
        assert cannot_start(engine) is None
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        assert cannot_start(engine) is not None
        monkeypatch.setenv(name, "1")
    assert cannot_start(engine) is None


@pytest.mark.slow
def test_a_json_without_a_batch_size_is_refused_with_what_to_add(tmp_path, recipe, builtin_model):
    """The founding guide's own: DeepSpeed refuses it after the model was loaded."""
    guides = tmp_path / "guide.json"
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    guides.write_text(json.dumps({"zero_optimization": zero}))
    with pytest.raises(InputError, match="neither train_batch_size nor train_micro_batch_size_per_gpu: add"):
        check_config_file(guides)
    words = ["--preset", "cpu", "--output_dir", str(tmp_path / "out"), "--model_name_or_path", str(builtin_model)]
    with pytest.raises(InputError, match="neither train_batch_size"):
        recipe("pretrain")([*words, "--deepspeed", str(guides), "--optim", "adamw_torch"])
    guides.write_text(json.dumps({"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}))
    assert check_config_file(guides) == "deepspeed"


@pytest.mark.slow
def test_a_recipe_without_a_launcher_names_one(recipe, tmp_path, builtin_model):
    words = ["--preset", "cpu", "--output_dir", str(tmp_path / "out"), "--model_name_or_path", str(builtin_model)]
    with pytest.raises(InputError, match="nothing launched this process: start it with `torchrun"):
        recipe("pretrain")([*words, "--deepspeed", "zero3"])


def test_a_trainer_without_a_launcher_names_one(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from hf_memopt import MemoryTrainer

    tiny = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    args = TrainingArguments(tmp_path, use_cpu=True, deepspeed=str(CONFIGS / "deepspeed" / "zero2.json"))
    trainer = MemoryTrainer(model=LlamaForCausalLM(tiny), args=args)
    with pytest.raises(InputError, match="nothing launched this process"):
        trainer.train()


@pytest.mark.parametrize(
    ("method", "file", "message"),
    [("qlora", "zero2_offload_cpu.json", "optim=paged_adamw_8bit with zero2 with optimizer states offloaded")],
)
def test_a_preset_beside_a_copied_json_is_still_refused(method, file, message, tmp_path, monkeypatch):
    shutil.copy(CONFIGS / "deepspeed" / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    preset = get_preset("rtx_4090", method)
    with pytest.raises(InputError, match=message):
        preset.training_arguments(str(tmp_path), deepspeed=file, use_cpu=True)


# ---- an accelerate YAML


@pytest.mark.slow
def test_a_yaml_copied_alone(project):
    folder, words = project
    shutil.copy(CONFIGS / "cpu_x2_zero3.yaml", folder / "my.yaml")
    launcher = ["accelerate", "launch", "--config_file", "my.yaml", "--main_process_port", 0]
    _trains_under_zero(project, *launcher, *words)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*zero*.yaml")), ids=lambda path: path.name)
def test_a_yaml_holds_its_json(path, tmp_path, monkeypatch):
    """What accelerate's plugin reads of it, in a folder without any other file."""
    from accelerate.utils import DeepSpeedPlugin

    shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert check_config_file(path.name) == "accelerate"
    given = yaml.safe_load(path.read_text())["deepspeed_config"]["deepspeed_config_file"]
    strategy = path.stem[path.stem.index("zero") :]
    shipped = json.loads((CONFIGS / "deepspeed" / f"{strategy}.json").read_text())
    assert decode_inline(given) == deepspeed_config(given) == shipped
    read = DeepSpeedPlugin(hf_ds_config=given).deepspeed_config
    assert read["zero_optimization"] == shipped["zero_optimization"]


def test_what_was_launched_with_a_copied_yaml_is_known(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    config = get_preset("a100_80gb_x8", strategy="zero2_offload_cpu").accelerate_config()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", config["deepspeed_config"]["deepspeed_config_file"])
    assert resolve_engine({}).strategy == "zero2_offload_cpu"


@pytest.mark.parametrize("text", ["", "zero3", "a/path.json", "eyJh", inline([1]), inline({"a": 1})[:-3]])
def test_what_is_no_configuration_in_base64(text):
    assert decode_inline(text) is None


def test_a_misspelt_key_in_base64_is_found(tmp_path, capsys):
    config = get_preset("a100_80gb_x8", strategy="zero3").accelerate_config(
        inline({"zero_optimization": {"stage": 3, "stage3_max_live_params": 1}})
    )
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    assert check_files([str(tmp_path / "my.yaml")], as_json=False) == 2
    assert "did you mean 'stage3_max_live_parameters'" in capsys.readouterr().err


def test_a_yaml_exported_alone(tmp_path):
    options = ["--strategy", "zero3_offload_nvme", "--nvme-path", tmp_path, "--yaml-only"]
    done = run("hf-memopt", "export", "a100_80gb_x8", tmp_path / "here", *options)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["accelerate.yaml"]
    assert "--config_file" in done.stdout
    config = yaml.safe_load((tmp_path / "here" / "accelerate.yaml").read_text())
    held = decode_inline(config["deepspeed_config"]["deepspeed_config_file"])
    assert held["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path)


def test_fsdp_on_a_cpu_is_said(tmp_path, capsys):
    """accelerate would train under DDP: a fault where the file asks for the CPU, a note where this machine is one."""
    shutil.copy(CONFIGS / "a100_80gb_x8_fsdp2.yaml", tmp_path / "gpu.yaml")
    assert check_files([str(tmp_path / "gpu.yaml")], as_json=False) == 0
    assert "trains under DDP without saying so" in capsys.readouterr().err
    text = (tmp_path / "gpu.yaml").read_text().replace("use_cpu: false", "use_cpu: true")
    (tmp_path / "cpu.yaml").write_text(text)
    with pytest.raises(InputError, match="use_cpu=true beside distributed_type=FSDP"):
        check_config_file(tmp_path / "cpu.yaml")
