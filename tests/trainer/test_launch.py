"""Real `accelerate launch` runs on the CPU: one and two processes, DDP and every DeepSpeed engine that runs here."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, flags, launch, run, run_forked, slow, sweep

from hf_memopt.data.builtin_model import builtin_model

TOKENS = 32


def _export(tmp_path: Path, strategy: str, *more) -> Path:
    done = run_forked("hf-memopt", "export", "cpu_x2", tmp_path / "exported", "--strategy", strategy, *more)
    assert done.returncode == 0, done.stderr
    return tmp_path / "exported" / "accelerate.yaml"


def _arguments(preset: str, jsonl_rows: str, output: Path) -> list:
    """Of one epoch. Weights come from files: under ZeRO-3 random ones are drawn in another order."""
    return flags(
        preset=preset,
        output_dir=output,
        dataset_name=jsonl_rows,
        held_out=0,
        max_length=TOKENS,
        model_name_or_path=builtin_model(),
        learning_rate=1e-3,
        num_train_epochs=1,
        max_steps=-1,
        effective_batch_size=8,
        per_device_train_batch_size=2,
        save_strategy="epoch",
        include_num_input_tokens_seen="true",
        samples=0,
        logging_steps=1,
    )


def _pretrain(config, tmp_path, preset, jsonl_rows, *more) -> dict:
    """One epoch over known rows; returns the last checkpoint's trainer state."""
    arguments = _arguments(preset, jsonl_rows, tmp_path / "out")
    launch(config, ROOT / "recipes" / "pretrain.py", *arguments, *more)
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["measured"]["peak_host_bytes"] > 0
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    return json.loads((checkpoint / "trainer_state.json").read_text())


def _logged(log: list[dict], what: str = "loss") -> list[float]:
    return [entry[what] for entry in log if "loss" in entry]


_ALONE: list[dict] = []  # the same for every test


@pytest.fixture
def alone(rows, recipe, tmp_path) -> list[dict]:
    """The log of one process without an engine, at the same effective batch."""
    if not _ALONE:
        trainer = recipe("pretrain")([str(word) for word in _arguments("cpu", rows[0], tmp_path / "alone")])
        _ALONE.extend(trainer.state.log_history)
    return _ALONE


@pytest.fixture
def rows(jsonl, builtin_model) -> tuple[str, int]:
    """A data set that packs into a known number of blocks."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from hf_memopt.data.tokens import packed

    texts = [{"text": f"Line {number} of a text about line {number}."} for number in range(80)]
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    return jsonl(texts), len(packed(Dataset.from_list(texts), tokenizer, TOKENS))


# Of one process: fine-tuning below; ZeRO-3: below; ZeRO-2: test_copied_files.py, its losses in test_engines.py.
SHIPPED = [sweep("cpu", "cpu"), slow("cpu_x2", "cpu_x2"), sweep("cpu_x2_zero2", "cpu_x2")]
# Sweeps: test_engines.py trains with states in host memory; to compile DeepSpeed's disk access takes minutes.
EXPORTED = [
    pytest.param("zero2_offload_cpu", marks=pytest.mark.needs_compiler),
    pytest.param("zero3_offload_cpu", marks=pytest.mark.needs_compiler),
    pytest.param("zero3_offload_nvme", marks=[pytest.mark.needs_compiler, pytest.mark.needs_libaio]),
]


def _check_batches(state: dict, blocks: int, alone: list[dict]) -> None:
    """The effective batch, from what really happened: optimizer steps, tokens seen over all processes, and losses."""
    assert state["global_step"] == -(-blocks // 8)
    assert state["global_step"] >= 2
    seen = state["num_input_tokens_seen"] / TOKENS
    # Two processes see the same number of samples: the last block is repeated where the count is odd.
    assert blocks <= seen <= blocks + 1
    # But for the last step, in which two processes may see a block twice.
    losses, wanted = _logged(state["log_history"])[:-1], _logged(alone)[:-1]
    assert len(wanted) >= 3 and losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("config", "preset"), SHIPPED)
def test_shipped_configs_train(config, preset, rows, alone, tmp_path):
    path, blocks = rows
    _check_batches(_pretrain(f"accelerate_configs/{config}.yaml", tmp_path, preset, path), blocks, alone)


@pytest.mark.engines
def test_a_loss_in_chunks_where_weights_are_sharded(rows, alone, command, tmp_path):
    """The shipped ZeRO-3 configuration with a loss in chunks, for which the head is gathered while it is called:
    losses and gradient norms are those of one process that computes the loss at once."""
    state = _pretrain(
        "accelerate_configs/cpu_x2_zero3.yaml", tmp_path, "cpu_x2", rows[0], "--loss_chunk_size", TOKENS // 2
    )
    _check_batches(state, rows[1], alone)
    norms, wanted = (_logged(log, "grad_norm")[:-1] for log in (state["log_history"], alone))
    assert norms == pytest.approx(wanted, rel=1e-3)
    _check_consolidated(command, tmp_path / "out", tmp_path / "model")


def _check_consolidated(command, out: Path, folder: Path) -> None:
    """What two ZeRO-3 processes left in parts is, merged, what they gathered at the end."""
    import torch
    from transformers import AutoModelForCausalLM

    (checkpoint,) = out.glob("checkpoint-*")
    code, _, err = command("consolidate", checkpoint, folder, "--trusted")
    assert code == 0, err
    whole, gathered = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, out))
    assert whole.keys() == gathered.keys() and all(torch.equal(whole[name], gathered[name]) for name in whole)
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.bin"))


@pytest.mark.engines
@pytest.mark.sweep
@pytest.mark.parametrize("strategy", EXPORTED)
def test_exported_offload_configs_train(strategy, rows, alone, tmp_path):
    path, blocks = rows
    more = []
    if strategy.endswith("nvme"):
        (tmp_path / "disk").mkdir()
        more = ["--nvme-path", tmp_path / "disk"]
    config = _export(tmp_path, strategy, *more)
    _check_batches(_pretrain(config, tmp_path, "cpu_x2", path), blocks, alone)
    if strategy.endswith("nvme"):
        assert any((tmp_path / "disk").rglob("*.swp")), "the optimizer states went to disk"


@pytest.mark.parametrize("method", [sweep("full"), slow("lora"), sweep("qlora")])  # test_recipes.py has all three
def test_fine_tuning_trains(method, jsonl, tmp_path):
    data = jsonl([{"prompt": f"What is {n} plus {n}?", "completion": f" It is {2 * n}."} for n in range(40)])
    output = launch(
        "accelerate_configs/cpu.yaml",
        ROOT / "recipes" / "sft.py",
        *flags(
            preset="cpu",
            method=method,
            dataset_name=data,
            output_dir=tmp_path / "out",
            max_steps=3,
            learning_rate=1e-2,
            held_out=8,
        ),
    )
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    losses = {int(step): loss for step, loss in report["held_out_loss"].items()}
    assert losses[3] < losses[0]
    assert "samples a step" in output and "→" in output
    weights = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    assert (tmp_path / "out" / weights).is_file()


@pytest.mark.slow
@pytest.mark.sweep  # test_notebook.py and test_mesh.py run an exported launch.sh, too, and make train does
def test_the_exported_launcher_runs(tmp_path):
    done = run("hf-memopt", "export", "auto", tmp_path / "run", "--recipe", "sft", "--method", "lora")
    assert done.returncode == 0, done.stderr
    done = run("sh", tmp_path / "run" / "launch.sh", "--max_steps", 2, "--samples", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "out" / "memory_report.json").is_file()


@pytest.mark.slow
def test_a_misspelt_nested_key_stops_the_launch(tmp_path):
    """accelerate drops the key without a word; the recipe reads the file that it was launched with."""
    config = tmp_path / "bad.yaml"
    shipped = (ROOT / "accelerate_configs" / "cpu.yaml").read_text()
    config.write_text(shipped + "dynamo_config:\n  bakend: inductor\n")
    recipe = ROOT / "recipes" / "sft.py"
    done = run(
        "accelerate", "launch", "--config_file", config, recipe, "--preset", "cpu", "--output_dir", tmp_path / "out"
    )
    assert done.returncode != 0
    assert "has an unknown key 'bakend', which would be ignored: did you mean 'backend'?" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_bad_pair_stops_every_process(tmp_path):
    config = _export(tmp_path, "zero2_offload_cpu")
    done = run(
        "accelerate",
        "launch",
        *flags(config_file=config, main_process_port=0),
        ROOT / "recipes" / "sft.py",
        *flags(preset="cpu_x2", optim="adamw_8bit", output_dir=tmp_path / "out"),
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: optim=adamw_8bit")]
    assert len(lines) == 1 and "use optim=adamw_torch" in lines[0]
    assert not (tmp_path / "out").exists()
