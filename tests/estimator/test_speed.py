"""Predicted speed: the same in estimates and plans, off as docs say, and unknown where nothing is known."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import slow
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memopt import MemoryArguments, estimate, estimate_trainer
from hf_memopt.estimator.accounting.work import Kernel, extended
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.estimator.timing.duration import parse_count, predicted_within, run_duration, training_steps
from hf_memopt.estimator.timing.speed_errors import (
    ADAPTERS,
    DENSE,
    ERRORS,
    GENERATED,
    NODES,
    OFFLOADED,
    PCIE,
    describe_error,
    find_error,
)
from hf_memopt.estimator.timing.throughput import Throughput, speed_note, unknown_rates
from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.catalog import catalog
from hf_memopt.planner.plan import plan
from hf_memopt.presets import preset_by_name

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from jobs import CHECKPOINTED, four_bits
from record import RESULTS
from speed_generated import HELD_BACK, OPEN, by_group, stated_error
from speed_published import held_out, ranked_right, stated_errors

from hf_memopt.estimator.accounting.work import _flops, _measure, _visited

BF16 = {"per_device_train_batch_size": 2, "bf16": True}


@pytest.fixture
def config():
    return LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, vocab_size=512
    )


def test_the_errors_are_those_that_published_runs_show():
    rows = json.loads((RESULTS / "speed_published.json").read_text())["rows"]
    assert stated_errors(rows) == {(row.kind, row.architecture): (row.error, row.runs) for row in ERRORS}
    held = held_out(rows)
    assert all(row["within"] == (abs(row["error"]) <= row["stated_error"]) for row in held)
    assert sum(row["within"] for row in held) >= 0.85 * len(held)


def test_the_error_of_steps_that_generate_is_that_of_published_ones():
    rows = json.loads((RESULTS / "speed_generated.json").read_text())["rows"]
    stated = find_error(GENERATED, get_hardware("h100_80gb"))
    assert (stated.error, stated.runs) == stated_error(rows)
    documented = [row for name in (OPEN, HELD_BACK) for row in by_group(rows)[name]]
    assert len(documented) >= 10 and sum(row["within"] for row in documented) >= 0.85 * len(documented)
    assert all(row["within"] == (abs(row["error"]) <= stated.error) for row in rows)
    assert "of GRPO" in describe_error(GENERATED, get_hardware("t4")), "of RLOO there is no run"


def test_published_runs_are_ranked_as_they_were_measured():
    rows = json.loads((RESULTS / "speed_published.json").read_text())["rows"]
    for some in (rows, held_out(rows)):
        right, pairs = ranked_right(some)
        assert pairs > 500 and right >= 0.95 * pairs


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "hardware", "more"),
    [
        (DENSE, "a100_80gb", {}),
        (ADAPTERS, "a100_80gb", {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
        (NODES, "a100_80gb", {"world_size": 16, "strategy": "ddp"}),
        (OFFLOADED, "a100_80gb", {"memory_args": MemoryArguments(activation_offload=True)}),
        slow(PCIE, "rtx_4090", {"world_size": 2, "strategy": "fsdp2"}),
    ],
)
def test_an_error_is_stated_by_kind_of_job(config, kind, hardware, more):
    found = estimate(config, BF16, 128, hardware, **more)
    stated = find_error(kind, get_hardware(hardware))
    assert (found.speed_kind, found.speed_error) == (kind, stated and stated.error)
    assert any(note.startswith("speed: ") and kind in note for note in found.notes)


def test_what_was_not_compared_says_so():
    assert find_error(PCIE, get_hardware("rtx_5090")) is None
    assert "not compared with any run" in describe_error(PCIE, get_hardware("rtx_5090"))
    assert predicted_within(None) == "predicted, not compared with any run"
    assert predicted_within(0.15) == "predicted ±15%"
    assert predicted_within(0.25, SimpleNamespace(counted="2 runs")) == "predicted ±25%, from 2 runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "strategy"), [("rtx_4090", None), slow("a100_80gbx4", "ddp"), slow("a100_80gbx4", "zero2")]
)
def test_estimate_and_plan_predict_the_same_speed(config, hardware, strategy, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as presets do
    made = plan(config, hardware, effective_batch_size=8, seq_len=128, method="full", strategy=strategy)
    profile, spec = made.profiles[0], made.spec
    again = estimate(
        config,
        {**profile.preset.settings(), **({"deepspeed": strategy} if strategy == "zero2" else {})},
        128,
        spec.preset.hardware,
        dtype=profile.preset.dtype,
        memory_args=profile.memory_args,
        world_size=spec.preset.processes,
        strategy=strategy,
    )
    assert again.tokens_per_second == pytest.approx(profile.tokens_per_second)
    assert again.device_bytes == profile.estimate.device_bytes
    # The sketch, by which choices are ranked, is close to what is shown.
    assert 8 * 128 / profile.seconds == pytest.approx(profile.tokens_per_second, rel=0.05)


@pytest.mark.slow
def test_mfu_counts_the_models_own_flops(config):
    """As torch counts them of a forward and a backward pass of the real model; checkpointing adds none, only time."""
    model, ids = LlamaForCausalLM(config), torch.zeros(2, 128, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(input_ids=ids, labels=ids).loss.backward()
    device = get_hardware("a100_80gb")
    plain, checkpointed = (
        estimate(config, {**BF16, "activation_checkpointing": on}, 128, device) for on in (False, True)
    )
    for found in (plain, checkpointed):
        flops = found.mfu * found.step_seconds * device.bf16_flops
        assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)  # causal attention: half of it is masked
    assert checkpointed.step_seconds > 1.1 * plain.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, four_bits()])
def test_mfu_leaves_out_what_is_computed_again_inside_of_autograd_functions(config, bits):
    adapter = LoraConfig(r=4, target_modules="all-linear")
    plain, checkpointed = (
        estimate(config, {**BF16, **more}, 128, "a100_80gb", adapter, "bfloat16", quantization_config=bits)
        for more in ({}, CHECKPOINTED)
    )
    # Checkpointed, the embedding's output has a gradient, too.
    assert checkpointed.mfu * checkpointed.step_seconds == pytest.approx(plain.mfu * plain.step_seconds, rel=0.03)


@pytest.mark.slow
def test_speed_grows_with_devices_and_batches_cost_what_they_hold(config):
    one, four = (
        estimate(config, BF16, 128, "a100_80gb", world_size=ranks, strategy="ddp" if ranks > 1 else None)
        for ranks in (1, 4)
    )
    assert 2 < four.tokens_per_second / one.tokens_per_second < 4
    assert one.tokens_per_second == pytest.approx(2 * 128 / one.step_seconds)
    accumulated = estimate(config, {**BF16, "gradient_accumulation_steps": 8}, 128, "a100_80gb")
    assert 6 < accumulated.step_seconds / one.step_seconds < 8.5


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("hardware", "fields", "reason"),
    [
        *(("cpu", {}, "bf16_flops of CPU"), ("rtx_5090_laptop", {"bf16": True}, "is unknown")),
        *(("arc_b580", {"bf16": True}, "is unknown"), ("apple_m5_16gb", {"bf16": True}, "is unknown")),
        *(("rtx_4090", {}, "32-bit matmuls"), ("t4", {"bf16": True}, "emulates bf16")),
    ],
)
def test_no_figure_is_shown_where_the_speed_is_unknown(config, hardware, fields, reason):
    found = estimate(config, fields, 64, hardware)
    assert (found.step_seconds, found.tokens_per_second, found.mfu) == (None, None, None)
    assert any(note.startswith("speed: ") and reason in note for note in found.notes)


def test_every_device_has_a_speed_or_a_reason():
    for device in catalog().values():
        known = bool(device.bandwidth and (device.bf16_flops or device.fp16_flops))
        assert (unknown_rates(device) is None) == known
        assert known != ("A plan ranks as if" in speed_note(device, SimpleNamespace(speed_kind=DENSE, own_runs=None)))


@pytest.mark.slow
def test_what_is_offloaded_takes_longer(config):
    preset_fields = {"per_device_train_batch_size": 8, "activation_checkpointing": False, "optim": "adamw_torch_fused"}
    preset = preset_by_name("rtx_4090")
    plain, offloaded, optimizer = (
        estimate_job(spec_job(preset_spec(preset, config, memory_args, seq_len=512, training=preset_fields)))
        for memory_args in (
            None,
            MemoryArguments(activation_offload=True),
            MemoryArguments(optimizer_cpu_offload=True),
        )
    )
    assert plain.step_seconds < offloaded.step_seconds
    assert plain.step_seconds < optimizer.step_seconds


@pytest.mark.slow
def test_inputs_that_transformers_offloads_are_counted_on_the_host():
    """activation_checkpointing_kwargs={"offload": True}: a micro-batch's inputs of every layer."""
    layers, tokens = 12, 4096
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}
    config = LlamaConfig(num_hidden_layers=layers, **shape)
    here, there = (
        estimate(
            config,
            {
                **{"per_device_train_batch_size": 4, "bf16": True, "activation_checkpointing": True},
                "activation_checkpointing_kwargs": {"use_reentrant": False, "offload": offload},
            },
            tokens // 4,
            "rtx_3060",
            dtype="bfloat16",
        )
        for offload in (False, True)
    )
    inputs = layers * tokens * config.hidden_size * 2
    assert here.breakdown["activations"] - there.breakdown["activations"] == pytest.approx(inputs, rel=0.1)
    assert there.device_bytes < here.device_bytes and there.host_bytes > here.host_bytes
    assert there.step_seconds > here.step_seconds + 2 * inputs / get_hardware("rtx_3060").host_link


@pytest.mark.slow
def test_streamed_weights_arrive_no_faster_than_the_link():
    """Few tokens: what is fetched twice a micro-batch takes longer than computing with it."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "vocab_size": 512}
    config = LlamaConfig(num_hidden_layers=12, **shape)
    fields = {"per_device_train_batch_size": 1, "bf16": True, "gradient_accumulation_steps": 1}
    adapters = LoraConfig(r=4, target_modules="all-linear")
    here, there = (
        estimate(
            config, fields, 64, "rtx_3060", adapters, "bfloat16", memory_args=MemoryArguments(weight_streaming=on)
        )
        for on in (False, True)
    )
    matrices = 12 * (4 * 512**2 + 3 * 512 * 2048) * 2
    link = get_hardware("rtx_3060").host_link
    assert there.step_seconds > max(here.step_seconds, 2 * matrices / link)
    assert there.step_seconds < here.step_seconds + 4 * matrices / link


@pytest.mark.slow
def test_the_command_line_shows_time_and_cost(config, tmp_path, command):
    config.save_pretrained(tmp_path)
    settings = ("--preset", "a100_80gb", "--method", "lora", "--seq-len", 64)
    code, output, errors = command("estimate", tmp_path, *settings, "--tokens", "10M", "--price", 2, "--json")
    assert code == 0, errors
    found = json.loads(output)
    took = found["duration"]
    assert took["tokens"] == parse_count("10M", "tokens") and took["seconds"] == pytest.approx(
        1e7 / found["tokens_per_second"]
    )
    assert took["cost"] == pytest.approx(2 * took["hours"]) and took["error"] == found["speed_error"]
    code, output, errors = command("estimate", tmp_path, *settings, "--epochs", 2, "--samples", "1k")
    assert code == 0 and " for 2,000 samples, all as" in output, errors
    code, output, errors = command("estimate", tmp_path, *settings, "--epochs", 2, "--samples", "1k", "--verbose")
    assert code == 0 and "tokens/s" in output and "MFU" in output and " for 2,000 samples, all as" in output, errors
    code, output, _ = command("estimate", tmp_path, "--hardware", "cpu", "--seq-len", 64, "--tokens", "1M")
    assert code == 0 and "tokens/s" not in output and "\nspeed  unknown: " in output
    for wrong in (("--tokens", "many"), ("--epochs", 2), ("--price", 2), ("--tokens", 5, "--samples", 5)):
        code, _, errors = command("estimate", tmp_path, *settings, *wrong)
        assert code == 2 and errors.startswith("error: ") and "Traceback" not in errors


@pytest.mark.slow
def test_a_plan_shows_time_and_cost_of_every_profile(config, tmp_path, command):
    config.save_pretrained(tmp_path)
    settings = ("--hardware", "rtx_4090x2", "--method", "lora", "--seq-len", 64, "--effective-batch-size", 4)
    code, output, errors = command("plan", tmp_path, *settings, "--tokens", "10M", "--price", 0.5, "--json")
    assert code == 0, errors
    made = json.loads(output)
    assert made["durations"].keys() == {profile["profile"] for profile in made["profiles"]}
    for profile in made["profiles"]:
        took = made["durations"][profile["profile"]]
        assert took["seconds"] == pytest.approx(1e7 / profile["estimate"]["tokens_per_second"])
        assert took["cost"] == pytest.approx(2 * 0.5 * took["hours"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("fields", [{}, {"max_steps": 7}, {"dataloader_drop_last": True}, {"num_train_epochs": 1.5}])
def test_a_scripts_steps_are_those_that_its_trainer_counts(config, tmp_path, fields):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "bf16": True, **fields}
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", **settings)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 15
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
    counted = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    assert training_steps(trainer, 1) == counted[-1]
    found = estimate_trainer(trainer, "rtx_4090")
    assert found.tokens_per_second == pytest.approx(3 * 2 * 4 / found.step_seconds)
    assert run_duration(training_steps(trainer, 1), found.step_seconds, 3.6).cost == pytest.approx(
        counted[-1] * found.step_seconds / 1000
    )


def test_an_optimizers_kernel_over_all_weights_grows_with_depth():
    low, high = (Counter({Kernel(True, 0, 1000 + 10 * depth): 1, Kernel(False, 7, 5): depth}) for depth in (3, 4))
    kernels = extended(low, high, 29)
    assert sum(count * kernel.bytes for kernel, count in kernels.items() if kernel.optimizer) == 1000 + 10 * 32
    assert kernels[Kernel(False, 7, 5)] == 32


def test_a_causal_mask_skips_half_of_the_blocks(subtests):
    for positional, named, share in [
        *(((True,), {}, 2), ((False,), {"is_causal": True}, 1), ((), {"is_causal": True}, 2), ((), {}, 1)),
    ]:
        with subtests.test(f"{positional} {named} {share}"):
            assert _visited(1000, positional, named) == 1000 // share


def test_every_row_is_multiplied_with_one_experts_weight():
    rows, weights = torch.empty(6, 4), torch.empty(3, 4, 5)
    assert _flops(torch.ops.aten._grouped_mm.default, (rows, weights), {}, None) == 2 * 6 * 4 * 5
    assert _flops(torch.ops.aten._int_mm.default, (rows, weights[0]), {}, None) == 2 * 6 * 4 * 5


def test_a_kernel_moves_all_its_tensors_and_has_the_rate_of_its_matmuls_type():
    a, b = torch.empty(6, 4, dtype=torch.bfloat16), torch.empty(4, 5, dtype=torch.bfloat16)
    moved = 2 * (6 * 4 + 4 * 5 + 6 * 5)
    assert _measure(torch.ops.aten.mm.default, (a, b), {}, a @ b) == (2 * 6 * 4 * 5, moved, 2, None)
    assert _measure(torch.ops.aten.mul.Tensor, (a, 2), {}, a) == (0, 2 * 2 * 6 * 4, 0, None)
    assert _measure(torch.ops.aten.t.default, (a,), {}, a.t()) is None
    assert _measure(torch.ops.aten.empty_like.default, (a,), {}, a) is None


@pytest.mark.parametrize(("tokens", "rate"), [(100, 100 * 3 * 2 / 4.0), (None, None)])
def test_a_step_has_the_tokens_of_all_its_micro_batches_and_devices(tokens, rate, monkeypatch):
    monkeypatch.setattr("hf_memopt.estimator.timing.throughput.job_kind", lambda job: DENSE)
    monkeypatch.setattr("hf_memopt.estimator.timing.throughput.speed_setup", lambda job, kind: kind)
    device, fields = get_hardware("a100_80gb"), {"gradient_accumulation_steps": 3}
    job = SimpleNamespace(micro_batch_tokens=tokens, fields=fields, world_size=2, device=device)
    found = Throughput.of(job, 4.0, 0.5, 1.0)
    assert (found.step_seconds, found.tokens_per_second, found.mfu, found.generation_share) == (4.0, rate, 0.5, 0.25)
    assert Throughput.of(job, 4.0, 0.5).generation_share is None


def test_flash_attention_multiplies_every_query_with_the_longest_sequences_keys(subtests):
    for causal in [True, False]:
        with subtests.test(f"{causal}"):
            query = torch.empty(
                2, 6, 3, 4
            )  # two matmuls forward and five backward, of 2 × queries × keys × head size each
            matmul = 2 * 2 * 6 * 3 * 4 * 10 // (2 if causal else 1)
            forward = (query, query, query, None, None, 6, 10, 0.0, causal, False)
            backward = (query, query, query, query, query, query, None, None, 6, 10, 0.0, causal)
            assert _flops(torch.ops.aten._flash_attention_forward.default, forward, {}, None) == 2 * matmul
            assert _flops(torch.ops.aten._flash_attention_backward.default, backward, {}, None) == 5 * matmul
