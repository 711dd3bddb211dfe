"""Every preset × method is genuine, lazy and keeps its effective batch."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.compatibility.setup import refusals
from hf_memopt.errors import InputError
from hf_memopt.hardware import get_hardware, list_hardware
from hf_memopt.presets import METHODS, get_preset, list_presets
from hf_memopt.presets.batch import batch_settings
from hf_memopt.presets.build import build_preset
from hf_memopt.presets.named_presets import _for_device
from hf_memopt.presets.preset import with_strategy

ALL = [(name, method) for name in list_presets() for method in METHODS]


def _on_cpu(preset, tmp_path, **more):
    """TrainingArguments on this machine, which has none of the devices."""
    return preset.training_arguments(str(tmp_path), world_size=preset.processes, use_cpu=True, **more)


def test_the_clusters_have_presets():
    assert {"l40s_x4", "a100_80gb_x8", "h100_80gb_x8"} <= set(list_presets())


@pytest.mark.slow
def test_a_device_without_a_preset_trains_with_its_own_settings(tmp_path, subtests):
    for name in sorted(set(list_hardware()) - set(list_presets())):
        with subtests.test(name=name):
            device = get_hardware(name)
            for method in METHODS:
                preset = get_preset(name, method)
                assert (preset.name, preset.hardware) == (name, device)
                assert not refusals(preset.setup())
                args = _on_cpu(preset, tmp_path)
                assert args.bf16 == device.native_bf16 and args.fp16 != args.bf16
                assert "HSA_OVERRIDE_GFX_VERSION" not in preset.environment or device.architecture == "gfx1031"


def test_every_preset_builds_training_arguments(tmp_path, subtests):
    for name, method in ALL:
        with subtests.test(name=name, method=method):
            from transformers import TrainingArguments

            preset = get_preset(name, method)
            args = _on_cpu(preset, tmp_path)
            assert type(args) is TrainingArguments
            product = args.per_device_train_batch_size * args.gradient_accumulation_steps * preset.processes
            assert product == preset.effective_batch_size
            assert args.activation_checkpointing_kwargs in (
                None,
                {"use_reentrant": False},
                {"use_reentrant": False, "every_n_layers": 2},
            )
            assert bool(args.activation_checkpointing_kwargs) == args.activation_checkpointing
            assert not refusals(preset.setup()), "a preset must not be what the table refuses"
            assert preset.meant_for and preset.reference_model


def test_model_and_adapter_settings(subtests):
    for name, method in ALL:
        with subtests.test(name=name, method=method):
            preset = get_preset(name, method)
            kwargs = preset.model_kwargs()
            assert kwargs["attn_implementation"] == "sdpa"  # no CUDA device in the tests
            assert ("quantization_config" in kwargs) == (method == "qlora")
            assert (preset.peft_config() is None) == (method == "full")
            if method == "full" and preset.strategy in ("none", "ddp"):
                assert kwargs["dtype"] == "float32"
            if method == "qlora":
                assert kwargs["quantization_config"].bnb_4bit_quant_type == "nf4"
                sharded = with_strategy(preset, "fsdp2")  # a whole model need not fit where a shard does
                assert preset.hardware.backend in ("cpu", "mps") or sharded.model_kwargs()["device_map"] == {"": "cpu"}


_BATCHES = [
    ("rtx_3060", 8, 4, 1, 1024),
    ("rx_6750_xt", 2, 16, 1, 512),
    ("apple_m2_8gb", 2, 16, 1, 512),
    ("apple_m2_16gb", 4, 8, 1, 512),
    ("rtx_3090_ti", 12, 4, 1, 256),
    ("l40s_x4", 2, 32, 4, 1024),
    ("a100_40gb", 8, 4, 1, 512),
    ("a100_80gb", 4, 8, 1, 2048),
    ("h100_80gb", 6, 8, 1, 4096),
]


def test_the_batches_that_were_asked_for(subtests):
    for name, micro, accumulation, devices, tokens in _BATCHES:
        with subtests.test(
            name=str(name), micro=str(micro), accumulation=str(accumulation), devices=str(devices), tokens=str(tokens)
        ):
            preset = get_preset(name)
            assert (preset.micro_batch_size, preset.gradient_accumulation_steps) == (micro, accumulation)
            assert (preset.processes, preset.seq_len) == (devices, tokens)


def test_the_reference_model_is_predicted_to_fit(subtests):
    """`make estimates` was run after the table changed."""
    for name, method in ALL:
        with subtests.test(name=name, method=method):
            from hf_memopt.presets.reference import largest_model, reference_estimate

            preset = get_preset(name, method)
            row = reference_estimate(preset)
            assert row and row["fits"], "run make estimates"
            assert row["device_bytes"] <= 0.9 * preset.hardware.memory
            if row["largest"]:
                assert largest_model(preset).rpartition("/")[2] in preset.meant_for
                assert row["largest"]["device_bytes"] <= 0.9 * preset.hardware.memory


@pytest.mark.parametrize(
    ("name", "method", "model"),
    [
        ("rtx_4090", "full", "meta-llama/Llama-3.2-1B"),
        ("rtx_4090", "lora", "Qwen/Qwen3-8B"),
        ("rtx_4090", "qlora", "Qwen/Qwen3-14B"),
        ("a100_80gb", "qlora", "meta-llama/Llama-3.1-70B"),
    ],
)
def test_presets_are_for_models_that_people_train_there(name, method, model, command):
    from hf_memopt.presets.reference import largest_model

    preset = get_preset(name, method)
    assert largest_model(preset) == model
    _, output, _ = command("show", name, "--method", method)
    output = " ".join(output.split())
    assert model in output and f"Predicted to fit: full fine-tuning of {_short(get_preset(name))}" in output


def _short(preset) -> str:
    return preset.reference_model.rpartition("/")[2]


@pytest.mark.parametrize(("fitting", "found"), [("ab", "b"), ("abc", "c"), ("", None)])
def test_the_largest_model_that_fits_is_found(fitting, found, monkeypatch):
    from hf_memopt.estimator import preset_estimates

    def row(preset) -> dict:
        fits = preset.reference_model in fitting
        return {"model": preset.reference_model, "device_bytes": (0.8 if fits else 0.95) * preset.hardware.memory}

    monkeypatch.setattr(preset_estimates, "MODELS", tuple("abc"))
    monkeypatch.setattr(preset_estimates, "_least_bytes", lambda preset: 0)
    monkeypatch.setattr(preset_estimates, "reference_estimate", row)
    if found is None:
        with pytest.raises(InputError, match="smaller micro_batch"):
            preset_estimates.preset_row("l4", "qlora")
    else:
        assert preset_estimates.preset_row("l4", "qlora")["model"] == found


def test_variants_keep_their_effective_batch():
    profiles = [get_preset(name) for name in ("l40s_x4", "l40s_x4_medium", "l40s_x4_aggressive", "l40s_x4_maximum")]
    assert {profile.effective_batch_size for profile in profiles} == {256}
    assert profiles[1].training["activation_checkpointing_kwargs"]["every_n_layers"] == 2
    assert profiles[2].micro_batch_size == 4 and profiles[3].seq_len == 1536


def test_precision_follows_the_hardware():
    assert get_preset("t4").training == get_preset("t4").training | {"fp16": True}
    for name in ("t4", "v100_32gb", "rx_6750_xt", "apple_m2_16gb"):
        preset = get_preset(name)
        assert preset.precision == "fp16" and preset.dtype == "float32"
    assert get_preset("rtx_3060").precision == "bf16"
    assert (
        get_preset("h100_80gb").training["torch_compile"] and "torch_compile" not in get_preset("a100_80gb").training
    )
    assert "tf32" in get_preset("rtx_3060").training and "tf32" not in get_preset("t4").training


def test_allocator_setting_is_for_nvidia_only():
    assert get_preset("rtx_4090").environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("apple_m2_16gb", "cpu", "mi300x"):
        assert "PYTORCH_ALLOC_CONF" not in get_preset(name).environment


def test_overrides_win_and_the_effective_batch_stays(tmp_path):
    args = _on_cpu(get_preset("rtx_3060"), tmp_path, per_device_train_batch_size=2, learning_rate=2e-5)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 16)
    assert args.learning_rate == 2e-5
    args = _on_cpu(get_preset("rtx_3060"), tmp_path, gradient_accumulation_steps=2)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (16, 2)
    args = _on_cpu(get_preset("rtx_3060"), tmp_path, effective_batch_size=64)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 8)


def test_the_launchers_world_size_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    from hf_memopt.presets import training_arguments

    batch = training_arguments._batch(get_preset("l40s_x4"), None, {})
    assert (batch["per_device_train_batch_size"], batch["gradient_accumulation_steps"]) == (2, 64)


def test_a_single_process_for_four_devices_is_announced(tmp_path, caplog):
    args = get_preset("l40s_x4").training_arguments(str(tmp_path), use_cpu=True)
    assert args.gradient_accumulation_steps == 32
    assert "is for 4 processes" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"learning_rat": 1}, "Did you mean 'learning_rate'"),
        ({"per_device_train_batch_size": 5}, "does not divide the 32 samples"),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "effective_batch_size": 32},
            "leave one",
        ),
        ({"effective_batch_size": 0}, "at least 1"),
        ({"optim": "adamw_9bit"}, "adamw_9bit"),
        ({"eval_strategy": "steps", "logging_steps": 0}, "eval_steps"),
    ],
)
def test_bad_overrides_are_one_sentence(overrides, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        _on_cpu(get_preset("rtx_3060"), tmp_path, **overrides)
    assert "\n" not in str(caught.value)


def test_a_missing_device_is_said(tmp_path):
    with pytest.raises(InputError, match="is for NVIDIA GeForce RTX 4090, and this machine has cpu"):
        get_preset("rtx_4090").training_arguments(str(tmp_path))


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    """The second GPU is a stand-in: TrainingArguments is told to count two."""
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 2)
    with pytest.raises(InputError, match="set CUDA_VISIBLE_DEVICES=0"):
        get_preset("cpu").training_arguments(str(tmp_path))


@pytest.mark.parametrize(
    "call",
    [
        lambda: get_preset("rtx_4080_ti"),
        lambda: get_preset("t4", "qlorra"),
        lambda: get_preset("t4", strategy="zero4"),
    ],
)
def test_unknown_names_suggest(call):
    with pytest.raises(InputError, match="Did you mean"):
        call()


def test_old_names_are_translated(tmp_path, recwarn):
    args = _on_cpu(get_preset("rtx_4090"), tmp_path, gradient_checkpointing=True)
    assert args.activation_checkpointing and args.activation_checkpointing_kwargs == {"use_reentrant": False}
    assert not [warning for warning in recwarn if warning.category is FutureWarning]


def test_checkpointing_kwargs_never_select_the_reentrant_variant(tmp_path):
    args = _on_cpu(get_preset("rtx_3060"), tmp_path, activation_checkpointing_kwargs={"preserve_rng_state": False})
    assert args.activation_checkpointing_kwargs == {"use_reentrant": False, "preserve_rng_state": False}


@pytest.mark.parametrize(
    ("strategy", "optim", "checkpointing"),
    [("zero2", "adamw_8bit", True), ("zero2_offload_cpu", "adamw_torch", True), ("fsdp2", "adamw_torch_fused", False)],
)
def test_a_strategy_brings_what_it_needs(strategy, optim, checkpointing):
    preset = get_preset("rtx_3060", strategy=strategy)
    assert preset.training["optim"] == optim
    assert bool(preset.training.get("activation_checkpointing")) == checkpointing
    assert preset.dtype == "bfloat16" and preset.effective_batch_size == 32


def test_quantized_weights_are_not_sharded_by_default():
    assert get_preset("a100_80gb_x8", "qlora").strategy == "zero2"
    with pytest.raises(InputError, match="sharding drops the quantization state"):
        get_preset("a100_80gb_x8", "qlora", strategy="hsdp8")
    fsdp = get_preset("a100_80gb_x8", "qlora", strategy="fsdp2")
    assert fsdp.quantization()["bnb_4bit_quant_storage"] == "bfloat16"


def test_a_device_without_a_preset_gets_the_largest_that_fits():
    from dataclasses import replace

    card = replace(get_hardware("rtx_4080"), name="generic_cuda_16gb", memory=16 * 2**30, label="Some Card")
    preset = _for_device(card, "full")
    assert preset.name == "rtx_4080" and preset.hardware.label == "Some Card"
    slower = replace(get_hardware("h100_80gb"), name="generic_cuda_79gb", label="NVIDIA H100 PCIe")
    assert _for_device(slower, "full").name in ("a100_80gb", "h100_80gb")
    intel = replace(get_hardware("rtx_4080"), name="generic_xpu_12gb", backend="xpu", memory=12 * 2**30)
    assert _for_device(intel, "full").name == "rtx_3060" and "tf32" not in _for_device(intel, "full").training
    mac = replace(get_hardware("apple_m2_16gb"), name="generic_mps_5gb", memory=16 * 2**30 // 3, label="Apple M1 8 GB")
    assert _for_device(mac, "lora").name == "apple_m2_8gb"
    old = replace(get_hardware("t4"), name="generic_cuda_8gb", memory=8 * 2**30)
    assert _for_device(old, "full").name == "t4", "the smallest preset with the same precision"


def test_the_allocator_is_set_before_the_card_is_looked_at(tmp_path, monkeypatch):
    """Both ways in: by name, and by auto, whose look at the card would start CUDA."""
    from hf_memopt.presets import environment, named_presets, training_arguments

    order = []
    for module in (environment, named_presets):
        monkeypatch.setattr(module, "configure_allocator", lambda: order.append("allocator"))
    monkeypatch.setattr(training_arguments, "counterpart", lambda hardware: order.append("card") or hardware)
    monkeypatch.setattr(named_presets, "get_hardware", lambda name: order.append("card") or get_hardware("rtx_4090"))
    with pytest.raises(InputError):  # the stand-in card cannot train
        get_preset("rtx_4090").training_arguments(str(tmp_path))
    get_preset("auto")
    assert order == ["allocator", "card", "allocator", "card"]


def test_auto_is_this_machine():
    assert get_preset("auto").name == "cpu"


@given(
    effective=st.integers(1, 512),
    preferred=st.integers(1, 64),
    world=st.integers(1, 16),
    micro=st.none() | st.integers(1, 64),
)
def test_the_effective_batch_never_changes(effective, preferred, world, micro):
    try:
        chosen, accumulation = batch_settings(effective, preferred, world, micro)
    except InputError:
        assert effective % world or (micro and (effective // world) % micro)
        return
    assert chosen * accumulation * world == effective
    assert chosen == micro if micro else chosen <= preferred


def test_a_card_without_a_preset_is_not_described_as_another(command):
    code, output, errors = command("show", "rtx_4070_laptop", "--json")
    assert code == 0, errors
    described = json.loads(output)
    assert described["meant_for"].startswith(described["hardware"]["label"])
    assert described["meant_for"].endswith("of preset rtx_3070.")


def test_a_row_on_another_device_has_that_devices_settings():
    own, other = build_preset("rtx_4090", "lora"), build_preset("rtx_4090", "lora", get_hardware("t4"))
    assert (own.hardware.name, other.hardware.name) == ("rtx_4090", "t4")
    assert (own.dtype, other.dtype) == ("bfloat16", "float16")
    assert own.micro_batch_size == other.micro_batch_size
