"""Plans where nothing fits: offload on one device, bf16 weights, experts in 4 bits; and updates in backward."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import DeepseekV3Config

from hf_memopt import plan
from hf_memopt.engines import engine_named
from hf_memopt.errors import InputError, MethodRefused
from hf_memopt.estimator.accounting.ledger import Peak
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.overheads import paged_on_device
from hf_memopt.estimator.quantized_checkpoints import loading_quantization
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.estimator.timing.step_time import Step, StepTime, host_link
from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner import plan as planning
from hf_memopt.planner.choices import Choice, list_choices
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.launch import launch_command, launcher_command
from hf_memopt.planner.nothing_fits.fallbacks import fallbacks
from hf_memopt.planner.profiles import Plan
from hf_memopt.planner.settle import settle
from hf_memopt.planner.streamed_weights import weights_alone
from hf_memopt.presets import preset_by_name
from hf_memopt.units import GIB


def _settled(model="smollm2-135m", hardware="rtx_4090", method="full", **fields) -> JobSpec:
    return settle(JobSpec(model=model, hardware=hardware, method=method, **fields), method)


@pytest.mark.parametrize(
    ("hardware", "training", "offered"),
    [
        ("rtx_4090", {"max_grad_norm": 0}, True),
        ("rtx_4090", {}, False),  # gradients are clipped by their common norm
        ("rtx_4090", {"max_grad_norm": 0, "gradient_accumulation_steps": 2}, False),
        ("rtx_4090x2", {"max_grad_norm": 0}, False),
    ],
)
def test_weights_are_updated_in_backward_only_where_the_job_lets_it(hardware, training, offered):
    choices = list_choices(_settled(hardware=hardware, training=training, effective_batch_size=4))
    in_backward = [choice for choice in choices if "optimizer_in_backward" in choice.knobs]
    assert bool(in_backward) == offered
    assert {choice.accumulation for choice in in_backward} <= {1}
    assert all(choice.memory_fields()["optimizer_in_backward"] for choice in in_backward)


@pytest.mark.slow
def test_states_are_paged_where_the_driver_can_move_them():
    optimizers = {
        hardware: {choice.optim for choice in list_choices(_settled(hardware=hardware))}
        for hardware in ("rtx_4090", "dgx_spark", "rx_7900_xtx")
    }
    assert [name for name in optimizers if "paged_adamw_8bit" in optimizers[name]] == ["rtx_4090"]


def test_paged_states_fill_what_is_left_and_travel_once_the_device_is_full():
    device = get_hardware("rtx_4090")
    peaks = {"backward": Peak(0, {}, 0, 16 * GIB)}
    assert paged_on_device(20 * GIB, peaks, device) == device.memory - 20 * GIB
    assert paged_on_device(2 * GIB, peaks, device) == 16 * GIB
    times = StepTime(
        device=device, world_size=1, trained=10**9, loaded=2 * 10**9, wide=False, mixed=True, adapters=False, layers=8
    )
    step = Step(
        engine=engine_named("none"), accumulation=1, micro_seconds=1.0, launch_seconds=0.0, optimizer_seconds=0.1
    )
    paging = times.seconds(replace(step, paged_bytes=16 * GIB)) - times.seconds(step)
    assert paging == pytest.approx(16 * GIB / host_link(device))  # both ways at once


def _spec(method="full", gigabytes=200, **fields) -> JobSpec:
    spec = _settled("llama-3.1-8b", "a100_80gb", method, **fields)
    return replace(spec, host_memory=HostMemory(gigabytes * GIB, "a test"))


def test_where_nothing_fits_the_most_exact_fallback_is_first(subtests):
    for spec, first in [
        (_spec(), "zero2_offload_cpu"),
        (_spec(gigabytes=64), "none"),  # no host memory for master weights and states: bf16 weights
        (_spec("lora"), None),
        (replace(_spec(), host_memory=None), "zero2_offload_cpu"),
        (replace(_spec(), hardware=_spec().preset), "none"),  # a process that no launcher started
        (replace(_spec(), strategy="none"), "none"),
    ]:
        with subtests.test(first=first, strategy=spec.strategy, method=spec.method):
            found = [
                *fallbacks(JobSpec(model="llama-3.1-8b", hardware="a100_80gb", method="full"), {spec.method: spec})
            ]
            assert [fallback.spec.preset.strategy for fallback in found[:1]] == ([first] if first else [])
            assert {fallback.spec.preset.dtype for fallback in found} <= {"bfloat16"}


def test_experts_are_quantized_where_adapters_leave_them_out():
    spec = _settled("qwen3-30b-a3b", method="qlora")
    (fallback,) = fallbacks(JobSpec(model="qwen3-30b-a3b"), {"qlora": spec})
    assert fallback.spec.memory_args.quantized_experts
    assert "mlp" not in str(fallback.spec.lora["target_modules"]) and "q_proj" in fallback.change
    own = replace(spec, lora={"target_modules": ["q_proj"]})
    (fallback,) = fallbacks(JobSpec(model="qwen3-30b-a3b"), {"qlora": own})
    assert fallback.spec.lora == own.lora and "q_proj" not in fallback.change
    assert not [*fallbacks(JobSpec(model="qwen3-30b-a3b"), {"qlora": replace(spec, hardware=spec.preset)})]
    assert not [*fallbacks(JobSpec(model="llama-3.1-8b"), {"qlora": _spec("qlora")})]


@pytest.mark.parametrize("alone", [None, (19 * GIB, "weights in 4 bits")], ids=["traced", "far too large"])
@pytest.mark.parametrize("fits", [True, False])
def test_experts_in_4_bits_are_streamed_where_the_device_has_no_room_for_them(fits, alone, monkeypatch):
    """Searches are played: they need 30 GiB with experts in 16 bits, 20 in 4, or more than the card for certain."""
    asked = []

    def start_search(spec, say, **_):
        asked.append((spec.memory_args.quantized_experts, spec.streaming))
        needs = (20 if spec.memory_args.quantized_experts else 30) * GIB
        choice = Choice("none", 1, 1, 1.0, "adamw_torch", "bfloat16")
        return SimpleNamespace(
            smallest=lambda: choice, needs=lambda choice: needs, estimates={choice: None}, spec=spec
        )

    def profiles(spec, search):
        return ["a profile"] if fits and spec.streaming and spec.memory_args.quantized_experts else []

    monkeypatch.setattr(planning, "start_search", start_search)
    monkeypatch.setattr(planning, "_profiles", profiles)
    monkeypatch.setattr(planning, "excessive_weights", lambda spec: alone)
    monkeypatch.setattr(planning, "what_lacks", lambda search, budget: "too little")
    monkeypatch.setattr(planning, "with_host_memory", lambda spec, search: None)
    monkeypatch.setattr(planning, "_make_plan", lambda spec, search, profiles, rejected: Plan(spec, [], rejected))
    monkeypatch.setattr(
        planning, "_nothing_fits", lambda spec, search, rejected, *_: Plan(spec, [], rejected, 18 * GIB)
    )
    moe = {"model": "qwen3-30b-a3b", "config": load_config("qwen3-30b-a3b"), "hardware": "rtx_3060", "seq_len": 64}
    request = JobSpec(**moe, method="qlora", effective_batch_size=4)
    made = planning._answer(request, ("qlora",), lambda text: None, True)
    resident = [] if alone else [(False, False), (True, False)]
    assert asked == [*resident, (False, True), (True, True)]
    reasons = {reason.settings: reason.reason for reason in made.rejected}
    if fits:
        assert made.spec.streaming and "experts are quantized to 4 bits" in made.precision
    else:
        needed = "19.00 GiB for weights in 4 bits alone" if alone else "20.00 GiB (micro-batch 1"
        assert reasons["QLoRA with experts in 4 bits"].startswith(f"needs at least {needed}")
        assert "QLoRA with experts in 4 bits, weights streamed" in reasons
        lacking = (19 if alone else 20) * GIB - made.spec.memory_budget
        assert made.missing_bytes == min(18 * GIB, lacking) == lacking


def test_an_offloading_strategy_may_be_named_on_one_device():
    assert resolve_preset("a100_80gb", "full", "zero3_offload_cpu").processes == 1
    assert {choice.strategy for choice in list_choices(_spec(strategy="zero3_offload_cpu"))} == {"zero3_offload_cpu"}


def test_a_task_without_a_model_is_refused_by_the_name_that_was_given():
    asked = {"model": "qwen2.5-vl-3b", "task": "dpo", "seq_len": 64}
    for refused in (lambda: _settled(**asked), lambda: spec_job(preset_spec(preset_by_name("h100_80gb"), **asked))):
        with pytest.raises(InputError, match=r"^task=dpo: transformers has no AutoModelForCausalLM of model type"):
            refused()


def test_checkpoints_that_only_train_dequantized_are_planned_so():
    spec = _settled("gpt-oss-20b", "h100_80gb", "lora")
    assert spec.quantization == {"dequantize": True}
    assert loading_quantization(spec.config).dequantize
    assert not _spec().quantization and loading_quantization(_spec().config) is None


@pytest.mark.slow
def test_8b_in_full_fits_one_card_with_deepspeed():
    found = plan("llama-3.1-8b", "a100_80gb", method="full", seq_len=2048)
    assert found.usual.preset.engine.offloads and found.usual.preset.dtype == "bfloat16" and found.precision is None
    assert "--use_deepspeed" in launcher_command(found.usual)


@pytest.mark.slow
def test_8b_in_full_fits_a_24_gib_card_where_weights_are_updated_in_backward():
    found = plan(
        "llama-3.1-8b",
        "rtx_4090",
        method="full",
        seq_len=2048,
        effective_batch_size=2,
        memory_args=None,
        training={"max_grad_norm": 0},
    )
    choice = found.profiles[-1].choice
    assert "optimizer_in_backward" in choice.knobs and choice.paged and choice.dtype == "bfloat16"
    estimate = found.profiles[-1].estimate
    assert estimate.device_bytes - estimate.paged_bytes <= found.spec.memory_budget


@pytest.mark.slow
def test_where_nothing_fits_host_memory_for_deepspeed_and_updates_in_backward_are_proposed():
    found = plan("smollm2-1.7b", "rtx_3060", method="full", seq_len=512, memory=6 * GIB)
    assert not found.profiles
    assert any("--strategy zero3_offload_cpu and --host-memory" in change for change in found.nearest)
    assert any("max_grad_norm=0" in change for change in found.nearest)


def test_weights_are_counted_where_only_some_layers_have_the_adapted_modules():
    preset = preset_by_name("a100_80gb", "lora")
    spec = preset_spec(preset, "qwen3.5-35b-a3b")  # three of four layers have linear attention, without q_proj
    job = spec_job(replace(spec, lora={"target_modules": ["q_proj", "o_proj"]}))
    outside, layer = job.elements(trained=True)
    assert outside == 0 and layer > 1


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def _fp8_experts(folder) -> str:
    config = DeepseekV3Config(
        **dict.fromkeys(("hidden_size", "intermediate_size"), 256),
        **{"moe_intermediate_size": 128, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "vocab_size": 1000},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        **{"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
        max_position_embeddings=256,
        num_experts_per_tok=4,
        quantization_config=FP8,
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("hardware", "whole"), [("h100_80gb", True), ("h100_80gbx8", True), ("a100_80gb", False), ("a100_80gbx8", False)]
)
def test_fp8_weights_are_whole_on_every_device_that_has_the_format(hardware, whole, tmp_path):
    spec = _settled(_fp8_experts(tmp_path), hardware, "lora", seq_len=128)
    assert (weights_alone(spec) is not None) == whole
    assert ("target_modules" in spec.lora) == whole
    shards = any(engine_named(choice.strategy).shards_weights for choice in list_choices(spec))
    assert shards == (hardware == "a100_80gbx8")
    own = _settled(_fp8_experts(tmp_path), hardware, "lora", seq_len=128, lora={"target_modules": "all-linear"})
    assert own.lora == {"target_modules": "all-linear"}


@pytest.mark.parametrize(("hardware", "attention"), [("h100_80gb", True), ("a100_80gb", False)])
def test_an_estimate_adapts_what_a_plan_of_the_same_device_does(hardware, attention, tmp_path):
    job = spec_job(preset_spec(resolve_preset(hardware, "lora"), _fp8_experts(tmp_path), seq_len=128))
    names = {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert job.peft_config.target_modules == (names if attention else "all-linear")


@pytest.mark.slow
def test_adapters_leave_experts_in_fp8_alone(tmp_path):
    model = _fp8_experts(tmp_path)
    made = plan(model, hardware="h100_80gbx2", method="lora", seq_len=128)
    assert made.profiles and "experts in FP8" in made.notes[0]
    assert "q_a_proj" in launch_command(made.spec, made.usual)
    with pytest.raises(MethodRefused, match="experts that are quantized with fp8"):
        plan(model, hardware="h100_80gb", method="lora", seq_len=128, lora={"target_modules": "all-linear"})


def test_an_optimizer_of_ones_own_is_paged_where_cuda_pages_it(subtests):
    for hardware, optim, paged in [
        ("rtx_4090", "paged_adamw_8bit", {True}),
        ("rtx_4090", "adamw_8bit", {False}),
        ("mi300x", "paged_adamw_8bit", {False}),
        ("gh200_96gb", "adamw_torch", {False}),
    ]:
        with subtests.test(hardware=hardware, optim=optim):
            choices = list_choices(_settled(hardware=hardware, training={"optim": optim}))
            assert {choice.paged for choice in choices} == paged and {choice.optim for choice in choices} == {optim}
