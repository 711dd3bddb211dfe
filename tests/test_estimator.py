"""The estimator against real runs on this CPU, and against itself.

benchmarks/estimator_cpu.py has the wide comparison; here are the kinds of job whose parts could break one by one.
"""

import importlib
import json
import tempfile

import pytest
import torch
from conftest import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate
from hf_memopt.estimator.truth import allocator_peak

depth = importlib.import_module("hf_memopt.estimator.depth")
prediction = importlib.import_module("hf_memopt.estimator.prediction")
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
LENGTH = 128


def _config(layers=4, vocabulary=3000, family="llama", **more):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=2048, **more,
    )  # fmt: skip


def _lora(rank=8):
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _truth(config, fields, peft_config=None, dtype="float32", padded=False) -> int:
    """The allocator's peak of a real run."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hf_memopt.levers.adapters import add_adapters

    row = {"input_ids": [7] * LENGTH, "labels": [7] * LENGTH}
    row |= {"attention_mask": [1] * (LENGTH - 1) + [0]} if padded else {}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}

    def train():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model = add_adapters(model, peft_config) if peft_config else model
        args = TrainingArguments(output_dir=folder, use_cpu=True, max_steps=2, **quiet, **fields)
        Trainer(model=model, args=args, train_dataset=[row] * 16, data_collator=default_data_collator).train()

    with tempfile.TemporaryDirectory() as folder:
        return allocator_peak(train)


@pytest.mark.parametrize(
    ("config", "fields", "lora", "dtype", "padded"),
    [
        (_config(), {}, None, "float32", False),
        (_config(9), {"bf16": True}, None, "float32", False),
        (_config(9), {**CHECKPOINTED, "bf16": True}, None, "bfloat16", False),
        (_config(9), {**CHECKPOINTED, "bf16": True}, _lora(), "bfloat16", False),
        (_config(4), {"optim": "adamw_8bit", "gradient_accumulation_steps": 4}, None, "float32", False),
        (_config(4), {"optim": "adafactor"}, None, "float32", False),
        (_config(4), {}, None, "float32", True),
        (_config(4, family="phi3", pad_token_id=0), {}, None, "float32", False),
        (_config(9, family="gemma3_text", head_dim=16, sliding_window=32), {}, None, "float32", False),
        (_config(4, family="mixtral", num_local_experts=4), {}, None, "float32", False),
    ],
)
def test_within_one_percent_of_a_real_run(config, fields, lora, dtype, padded):
    fields = {"per_device_train_batch_size": 2, **fields}
    found = estimate(config, fields, LENGTH, "cpu", lora, dtype, padded=padded)
    measured = _truth(config, fields, lora, dtype, padded)
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert sum(found.breakdown.values()) == found.peak_allocated_bytes
    assert found.phases[found.phase] == found.peak_allocated_bytes


@pytest.mark.parametrize("fields", [{}, {**CHECKPOINTED, "bf16": True}, {"optim": "adamw_torch"}])
@pytest.mark.parametrize("lora", [None, _lora()])
def test_extending_two_shallow_traces_equals_tracing_all_layers(fields, lora, monkeypatch):
    extended = estimate(_config(14), fields, LENGTH, "rtx_4090", lora)
    monkeypatch.setattr(depth, "_TRACED_WHOLE", 99)
    assert estimate(_config(14), fields, LENGTH, "rtx_4090", lora).breakdown == extended.breakdown


def test_a_repeating_pattern_of_layers_is_extended_by_whole_periods(monkeypatch):
    config = _config(20, family="gemma3_text", head_dim=16, sliding_window=32)
    assert depth.shallow_depths(config) == (8, 14), "two shallow models, whole periods from the deep one"
    extended = estimate(config, {}, LENGTH, "cpu")
    monkeypatch.setattr(depth, "_TRACED_WHOLE", 99)
    assert depth.shallow_depths(config) == (20,)
    assert estimate(config, {}, LENGTH, "cpu").peak_allocated_bytes == extended.peak_allocated_bytes


def test_the_breakdown_names_what_is_known():
    """4 bytes a weight for the weights and as much for the gradients, twice that for AdamW's two states."""
    from transformers import AutoModelForCausalLM

    config = _config()
    weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    breakdown = estimate(config, {"per_device_train_batch_size": 2}, LENGTH, "cpu").breakdown
    assert breakdown["parameters"] == pytest.approx(4 * weights, rel=0.001)
    assert breakdown["optimizer_states"] == pytest.approx(8 * weights, rel=0.001)
    assert breakdown["logits"] >= 2 * LENGTH * config.vocab_size * 4


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(16, 256), micro=st.integers(1, 4), rank=st.integers(2, 32))
def test_more_never_costs_less(length, micro, rank):
    def peak(length, micro, rank, **fields):
        fields |= {"per_device_train_batch_size": micro}
        return estimate(_config(3), fields, length, "a100_80gb", _lora(rank)).peak_allocated_bytes

    base = peak(length, micro, rank)
    assert peak(2 * length, micro, rank) >= base
    assert peak(length, micro + 1, rank) >= base
    assert peak(length, micro, 2 * rank) >= base
    assert peak(length, micro, rank, **CHECKPOINTED) <= base


def test_a_configuration_of_something_else_is_refused():
    from transformers import PretrainedConfig

    with pytest.raises(InputError, match="no num_hidden_layers"):
        estimate(PretrainedConfig(), {}, 32, "cpu")
    with pytest.raises(InputError, match="cannot be traced"):
        estimate(_config(2), {}, 32, "cpu", attn_implementation="no_such")


def test_nothing_of_the_fake_world_stays():
    from transformers.utils import import_utils

    adam = importlib.import_module("torch.optim.adam")
    before = (torch.nn.Module.to, import_utils.is_fake_tensor, adam._default_to_fused_or_foreach)
    estimate(_config(2), {"optim": "adamw_torch"}, 32, "rtx_4090")
    with pytest.raises(InputError):
        estimate(_config(2), {"optim": "no_such"}, 32, "rtx_4090")
    assert before == (torch.nn.Module.to, import_utils.is_fake_tensor, adam._default_to_fused_or_foreach)
    assert type(torch.ones(1) + 1) is torch.Tensor


def test_a_real_trainer_is_not_disturbed(tmp_path):
    """accelerate's state and every random generator are as before, so that an estimate may come before training."""
    import random

    import numpy
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True, gradient_accumulation_steps=4)
    trainer = Trainer(AutoModelForCausalLM.from_config(_config(2)), args)

    def state():
        shared = [dict(kind._shared_state) for kind in (PartialState, AcceleratorState, GradientState)]
        generators = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
        return shared, generators

    before = state()
    estimate(_config(2), {"gradient_accumulation_steps": 2}, 32, "cpu")
    assert state() == before
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.accelerator.gradient_accumulation_steps == before[0][2]["plugin_kwargs"]["num_steps"]


@pytest.fixture
def model_folder(tmp_path):
    _config(8, vocabulary=32000).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_line(model_folder):
    done = run("hf-memopt", "estimate", model_folder, "--preset", "a100_80gb", "--method", "lora", "--seq-len", 256,
               "--set", "per_device_train_batch_size=2", "--set", "lora.r=4", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is True and found["phase"] == "backward"
    assert sum(found["breakdown"].values()) == found["peak_allocated_bytes"]
    assert found["training_arguments"]["gradient_accumulation_steps"] == 16
    shown = run("hf-memopt", "estimate", model_folder, "--preset", "rtx_3070", "--set", "effective_batch_size=4096",
                "--set", "per_device_train_batch_size=2048")  # fmt: skip
    assert shown.returncode == 1 and "does not fit" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/where", "--preset", "cpu"], "model 'no/where'"),
        (["{model}", "--preset", "t5"], "Did you mean 't4'"),
        (["{model}", "--preset", "cpu", "--set", "learning_rat=1"], "Did you mean 'learning_rate'"),
        (["{model}", "--preset", "cpu", "--set", "nonsense"], "KEY=VALUE"),
        (["{model}", "--preset", "cpu", "--set", "dtype=int3"], "unknown dtype"),
        (["{model}", "--preset", "cpu", "--method", "lora", "--set", "lora.rr=1"], "unknown key of lora"),
        (["{model}", "--preset", "cpu", "--set", "lora.r=1"], "method=lora only"),
        (["{model}", "--preset", "cpu", "--seq-len", "4096"], "2048 positions"),
        (["{model}", "--preset", "cpu", "--method", "qlora"], "not modelled yet"),
        (["{model}", "--preset", "l40s_x4"], "not modelled yet"),
    ],
)
def test_bad_input(arguments, message, model_folder):
    done = run("hf-memopt", "estimate", *(word.format(model=model_folder) for word in arguments))
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
