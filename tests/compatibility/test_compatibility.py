"""The table of what does not work, checked where that can be done against the libraries themselves."""

import importlib.util
import sys

import pytest

from hf_memopt.compatibility import RULES, Setup, check, launched_strategy, refusals
from hf_memopt.compatibility.resolve import cannot_start, resolve_engine
from hf_memopt.compatibility.rules import BITSANDBYTES, BNB_8BIT, COMPILE_MODES, CUDA_GRAPHS, LAYERWISE, PACKAGES
from hf_memopt.engines import DeepSpeed
from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset

REFUSED = [
    (Setup(optim="adamw_8bit", strategy="zero2", offload="cpu"), "DeepSpeedCPUAdam", "adamw_torch"),
    (Setup(optim="paged_adamw_8bit", strategy="zero3", offload="nvme"), "DeepSpeedCPUAdam", "adamw_torch"),
    (Setup(optim="lion_8bit", strategy="zero2", offload="cpu"), "L2 mode", "lion_32bit"),
    (Setup(optim="adafactor", strategy="zero2", offload="cpu"), "TypeError", "adamw_torch"),
    (Setup(optim="adamw_8bit", strategy="fsdp2"), "DTensor", "adamw_torch_8bit"),
    (Setup(optim="adafactor", strategy="fsdp2"), "DTensor", "adamw_torch"),
    (Setup(optim="adamw_torch_4bit", strategy="fsdp2"), "DTensor", "adamw_torch_8bit"),
    (Setup(optim="adamw_8bit", device="mps"), "no optimizer kernel", "adafactor"),
    (Setup(optim="galore_adamw_layerwise", accumulates=True), "cannot accumulate", "without _layerwise"),
    (Setup(optim="galore_adamw_layerwise", strategy="ddp"), "distributed training", "without _layerwise"),
    (Setup(method="qlora", strategy="hsdp"), "quantization state", "zero2"),
    (Setup(method="qlora", strategy="fsdp2"), "uint8", "bnb_4bit_quant_storage"),
    (Setup(precision="bf16", native_bf16=False, label="NVIDIA T4"), "NVIDIA T4 only emulates", "fp16=True"),
    (Setup(precision="fp16", dtype="float16"), "unscale", "dtype=float32"),
    (Setup(device="mps", strategy="zero2"), "MPS", "one process"),
    (Setup(device="cpu", strategy="fsdp2"), "does not support FSDP", "ddp"),
    (
        Setup(strategy="fsdp2", activation_checkpointing=True, engine_checkpointing=True),
        "both checkpoint activations",
        "fsdp_activation_checkpointing",
    ),
    (Setup(strategy="zero3", auto_find_batch_size=True), "ZeRO-3", "fixed"),
    (Setup(strategy="zero2", optim="adagrad"), "one group of weights", "adamw_torch"),
    (Setup(strategy="zero3", optim="adagrad"), "one group of weights", "adamw_torch"),
    (Setup(strategy="fsdp2", optim="adagrad"), "for whole weights", "adamw_torch"),
    (Setup(strategy="zero2", offload="cpu", optim="adagrad"), "adamw_mode", "adamw_torch"),
    (Setup(compile_mode="max-autotunes"), "torch_compile_mode", "Did you mean 'max-autotune'"),
]


def test_refusals(subtests):
    for setup, says, instead in REFUSED:
        with subtests.test(f"{setup} {says} {instead}"):
            with pytest.raises(InputError, match=says) as caught:
                check(setup)
            assert instead in str(caught.value) and "\n" not in str(caught.value)


def test_what_works_is_let_through(subtests):
    for setup in [
        Setup(),
        Setup(optim="adamw_8bit"),
        Setup(optim="adamw_8bit", strategy="zero2"),
        Setup(optim="adamw_torch", strategy="zero3", offload="cpu"),
        Setup(method="qlora", strategy="fsdp2", quant_storage="bfloat16"),
        Setup(precision="fp16", native_bf16=False),
        Setup(precision="bf16", native_bf16=False, device="cpu"),
    ]:
        with subtests.test(setup=str(setup)):
            assert refusals(setup) == []


def test_every_rule_names_known_fields_and_its_source():
    for rule in RULES:
        assert set(rule.when) <= set(Setup.__dataclass_fields__)
        assert rule.reason and rule.instead and rule.source


def test_compile_modes_are_those_of_torch():
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    assert set(modes) == COMPILE_MODES
    assert {mode for mode, options in modes.items() if options.get("triton.cudagraphs")} == CUDA_GRAPHS


def test_optimizer_names_are_those_of_transformers():
    from transformers.training_args import OptimizerNames

    known = {name.value for name in OptimizerNames}
    assert known >= BITSANDBYTES | LAYERWISE | PACKAGES.keys()
    missed = {name for name in known if "8bit" in name and "torch" not in name and "galore" not in name} - BITSANDBYTES
    assert not missed, "a new 8-bit optimizer belongs into the table"


def test_packages_are_looked_for_by_the_name_that_transformers_imports(subtests):
    for module in sorted(set(PACKAGES.values())):
        with subtests.test(module=str(module)):
            import inspect

            from transformers import trainer_optimizer

            assert f"from {module}" in inspect.getsource(trainer_optimizer)


ON_PYPI = {"optimi": "torch-optimi", "torchao": "'torchao[^']*'"}


@pytest.mark.drawn(10)
@pytest.mark.parametrize(("optim", "module"), sorted(PACKAGES.items()))
def test_a_missing_package_is_named_and_an_installed_one_is_found(optim, module, monkeypatch, tmp_path):
    """The real search for modules: without any folder of packages, and with a package of the module's name."""
    setup = Setup(optim=optim)
    if optim == "galore_adafactor_layerwise":
        pytest.skip("refused whatever is installed")
    pytest.importorskip("packaging.requirements")  # loaded before there is no folder of packages
    asked = importlib.metadata.requires("hf_memopt")
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: asked)  # a wheel beside no other package
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=f"pip install {ON_PYPI.get(module, module.replace('_', '-'))}, or use"):
        check(setup)
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    check(setup)


def test_a_missing_bitsandbytes_is_named_for_qlora(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(InputError, match="method=qlora needs bitsandbytes"):
        check(Setup(method="qlora"))


def test_bfloat16_on_a_card_without_it(tmp_path, monkeypatch):
    """The T4 is a stand-in: its catalog entry, and torch reports a CUDA device."""
    from hf_memopt.presets import training_arguments

    preset = get_preset("t4")
    monkeypatch.setattr(training_arguments, "_present", lambda preset: preset.hardware)
    with pytest.raises(InputError, match=r"NVIDIA T4 only emulates bfloat16.*use fp16=True"):
        preset.training_arguments(str(tmp_path), bf16=True)


@pytest.mark.parametrize("optim", sorted(BNB_8BIT & {"adamw_8bit", "ademamix_8bit"}))
def test_accelerate_still_replaces_8bit_optimizers_under_offload(optim, monkeypatch):
    """The reason for the first rule, seen in accelerate itself: should this fail, the rule can go."""
    import bitsandbytes
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    kinds = {"adamw_8bit": bitsandbytes.optim.AdamW8bit, "ademamix_8bit": bitsandbytes.optim.AdEMAMix8bit}
    built = {}

    class Recorder:  # stands in for DeepSpeedCPUAdam, whose construction compiles C++
        def __init__(self, groups, **defaults):
            built.update(defaults)

    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", Recorder)
    replaced = map_pytorch_optim_to_deepspeed(kinds[optim]([torch.nn.Parameter(torch.zeros(8))], lr=1e-3))
    assert isinstance(replaced, Recorder) and built["adamw_mode"] is False


@pytest.mark.parametrize(
    ("environment", "strategy"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2"}, "ddp"),
        ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "8"}, "fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp2_offload_cpu"),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
            },
            "zero3_offload_cpu",
        ),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": "accelerate_configs/deepspeed/zero3_plus_plus.json",
            },
            "zero3_plus_plus",
        ),
    ],
)
def test_what_was_launched_is_read_from_the_environment(environment, strategy, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_strategy() == strategy


def test_fsdp_clips_on_the_host_where_its_launcher_started_gloo(monkeypatch):
    """accelerate reads the environment alone (1.15, PartialState)."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    engine = resolve_engine({"fsdp": True, "fsdp_config": {"cpu_offload": True}})
    assert engine.strategy == "fsdp2_offload_cpu" and "--fsdp_offload_params true" in cannot_start(engine)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert cannot_start(engine) is None


def test_strategy_of_a_deepspeed_config():
    assert DeepSpeed.of_config({"zero_optimization": {"stage": 2}}).strategy == "zero2"
    offloaded = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    assert DeepSpeed.of_config(offloaded).strategy == "zero3_offload_nvme"


def test_a_bad_pair_is_refused_with_what_was_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "accelerate_configs/deepspeed/zero2_offload_cpu.json")
    with pytest.raises(InputError, match="use optim=adamw_torch"):
        get_preset("cpu", strategy="zero2_offload_cpu").training_arguments(str(tmp_path), optim="adamw_8bit")
