"""Jobs rebuilt from public reports, as their users wrote them, and the answers to them."""

import json
from pathlib import Path

import pytest

GIB = 2**30
_FOLDER = Path(__file__).parents[1] / "foreign_configs"
# Command -> the exit code, the phase of the peak, its GiB from and to, and the first change with which it fits.
ESTIMATES = {
    # Dequantized, the weights are 240 GB on each rank without sharding.
    "llama_factory/lora_gpt_oss_120b.yaml h100_x8": (1, "load", 225, 245, "ds_z3_offload_config.json"),
    "ms_swift/shared_by_4.sh h20_x8": (0, "optimizer", 20, 60, None),
    "trl/open_r1_sft_32b.yaml h100_x8 fsdp2": (1, "backward", 80, 110, "--strategy fsdp2_offload_cpu"),
    "trl/sft_32b_by_default.yaml h100_x8 fsdp2": (1, "backward", 80, 110, "--strategy fsdp2_offload_cpu"),
    "trl/grpo_without_prompt_length.yaml a100_80gb": (1, "backward", 100, 130, "vllm_gpu_memory_utilization: 0.25"),
    "llama_factory/evaluated_zero3.yaml l20_x4": (1, "eval", 140, 175, "per_device_eval_batch_size=1"),
}
# Command -> keys that a plan changes, and the words that it starts with.
PLANS = {
    "llama_factory/lora_gpt_oss_120b.yaml h100_x8": (
        {"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"},
        None,
    ),
    "trl/sft_32b_by_default.yaml h100_x8": ({"per_device_train_batch_size": 2}, "zero3_offload_cpu.json"),
    "trl/grpo_without_prompt_length.yaml a100_80gb": (
        {"vllm_gpu_memory_utilization": 0.25, "optim": "adamw_8bit", "steps_per_generation": 16},
        None,
    ),
}


def _words(line: str) -> list[str]:
    file, hardware, *strategy = line.split()
    return [str(_FOLDER / file), "--hardware", hardware, *(f"--strategy={name}" for name in strategy)]


@pytest.mark.slow
@pytest.mark.parametrize("line", ESTIMATES)
def test_an_estimate_of_a_reported_job(line, command):
    code, phase, low, high, change = ESTIMATES[line]
    answered, output, errors = command("estimate", *_words(line), "--json")
    assert answered == code, errors
    estimate = json.loads(output)
    assert estimate["phase"] == phase and low <= estimate["device_bytes"] / GIB <= high
    if change:
        first = estimate["levers"][0]
        assert first["fits"] and change in first["change"]


@pytest.mark.slow
@pytest.mark.parametrize("line", PLANS)
def test_a_plan_of_a_reported_job(line, command):
    keys, launched = PLANS[line]
    answered, output, errors = command("plan", *_words(line), "--json")
    assert answered == 0, errors
    edits = json.loads(output)["edits"]
    assert keys.items() <= edits["keys"].items()
    assert launched is None or launched in edits["launcher"]
