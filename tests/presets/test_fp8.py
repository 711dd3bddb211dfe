"""fp8 as a preset choice. No card is here: products run on the CPU, which stands in for one that has fast ones."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import yaml
from test_levers_together import config
from transformers import AutoModelForCausalLM, default_data_collator

from hf_memopt import InputError, MemoryTrainer, estimate_trainer, get_preset
from hf_memopt.cli.export import ExportOptions, export_preset
from hf_memopt.compatibility.config_files import check_config_file
from hf_memopt.presets import fp8

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="fp8 is torchao's: make test installs it")


@pytest.fixture
def environment(monkeypatch):
    """What a preset sets is gone afterwards; a launcher has set another precision before."""
    for name in fp8.ENVIRONMENT:
        monkeypatch.setenv(name, "bf16")
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND")


def trained(preset, folder):
    import torch

    torch.manual_seed(0)
    fields = {"max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "effective_batch_size": 2}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = preset.training_arguments(folder, use_cpu=True, **fields, **quiet)
    ids = torch.arange(4 * 16).view(4, 16) % 97  # products in fp8 are slow on a CPU
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = MemoryTrainer(
        model=AutoModelForCausalLM.from_config(config(1)),
        args=args,
        train_dataset=rows,
        data_collator=default_data_collator,
    )
    predicted = estimate_trainer(trainer, "cpu").peak_allocated_bytes
    trainer.train()
    return trainer, trainer.state.log_history[-1]["train_loss"], predicted


@pytest.mark.slow
@NEEDS_TORCHAO
def test_it_trains_in_fp8(environment, tmp_path):
    """Linear layers but the head are converted, though a launcher said bf16; the loss is nearly bf16's."""
    cpu = get_preset("cpu")
    bf16 = replace(cpu, training={**cpu.training, "bf16": True})
    preset = fp8.in_fp8(replace(bf16, hardware=replace(cpu.hardware, fp8=True)))
    assert preset.precision == "fp8"
    _, usual, as_bf16 = trained(bf16, tmp_path / "bf16")
    trainer, loss, predicted = trained(preset, tmp_path / "fp8")
    assert trainer.accelerator.mixed_precision == "fp8"
    kinds = {name: type(module).__name__ for name, module in trainer.model.named_modules()}
    assert kinds["model.layers.0.mlp.down_proj"] == "Float8Linear" and kinds["lm_head"] == "Linear"
    assert loss == pytest.approx(usual, rel=0.02) and loss != usual
    assert predicted == as_bf16, "what is kept is what bf16 keeps"


@NEEDS_TORCHAO
@pytest.mark.parametrize("strategy", [None, "fsdp2"])
def test_exported_files_say_so(strategy, tmp_path):
    name = "h100_80gb_x8" if strategy else "h100_80gb"
    options = ExportOptions(
        preset=name, directory=str(tmp_path), strategy=strategy, precision="fp8", recipe="pretrain"
    )
    export_preset(options, False)
    settings = json.loads((tmp_path / "training_arguments.json").read_text())
    assert "bf16" not in settings and "fp16" not in settings, "they would go over the launcher's fp8"
    assert check_config_file(tmp_path / "accelerate.yaml") == "accelerate"
    written = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert written["mixed_precision"] == "fp8" and written["fp8_config"] == {"backend": "AO"}
    if strategy:
        assert written["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False


@NEEDS_TORCHAO
def test_a_process_that_was_launched_so_takes_it(environment, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert get_preset("h100_80gb").precision == "fp8"


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("rtx_3090", {}, "has no fast fp8 matmuls"),
        ("h100_80gb", {"method": "lora"}, "use method=full"),
        ("h100_80gb_x8", {"strategy": "zero3"}, "always computes in bf16 under DeepSpeed; use fsdp2"),
        ("h100_80gb", {"precision": "fp4"}, "unknown precision 'fp4'"),
    ],
)
def test_refused(name, more, why):
    with pytest.raises(InputError, match=why):
        get_preset(name, **{"precision": "fp8", **more})
