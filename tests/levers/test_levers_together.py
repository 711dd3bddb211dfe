"""Every lever with every other, in real runs: the same weights as without those that change nothing, and the
estimator within 3 % of the measured peak. Pairs that are refused are listed with their reason."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import refused, slow
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments, default_data_collator

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, estimate
from hf_memopt.engines import engine_named
from hf_memopt.levers import activation_offload, apply, optimizer_cpu_offload, weight_streaming
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.feature import Feature

ROWS, LENGTH, VOCABULARY = 4, 128, 512
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
UNCLIPPED = {"max_grad_norm": 0.0}
# name -> (TrainingArguments fields, MemoryArguments fields)
LEVERS = {
    "checkpointing": (CHECKPOINTED, {}),
    "bf16": ({"bf16": True}, {}),
    "LoRA": ({}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 2}, {}),
    "loss_chunk_size": ({}, {"loss_chunk_size": 64}),
    "mlp_tile_size": ({}, {"mlp_tile_size": 100}),
    "logits_to_keep": ({}, {"logits_to_keep": True}),
    "activation_compression": ({}, {"activation_compression": "int8"}),
    "activation_offload": ({}, {"activation_offload": True}),
    "weight_streaming": ({}, {"weight_streaming": True}),
    "checkpoint_ratio": ({}, {"checkpoint_ratio": 0.5}),
    "checkpoint_keeps": ({}, {"checkpoint_keeps": "attention"}),
    "adam_mini": ({}, {"adam_mini": True}),
    "optimizer_in_backward": (UNCLIPPED, {"optimizer_in_backward": True}),
    "optimizer_cpu_offload": ({}, {"optimizer_cpu_offload": True}),
    "sliding_window": ({}, {"sliding_window": 32}),
    "sparse_block_size": ({}, {"sparse_block_size": 16, "num_local_blocks": 1}),
}
CHANGES_THE_RUN = {
    "bf16",
    "LoRA",
    "adam_mini",
    "sliding_window",
    "sparse_block_size",
}  # what comes out is compared with a run that has them
REFUSED = {
    ("loss_chunk_size", "logits_to_keep"): "already skips tokens without labels",
    ("optimizer_in_backward", "optimizer_cpu_offload"): "both replace the optimizer step",
    ("sliding_window", "sparse_block_size"): "both restrict attention",
    ("accumulation", "optimizer_in_backward"): "updates weights in every backward",
}
PAIRS = [pair for pair in itertools.combinations(LEVERS, 2) if pair not in REFUSED]


def config(layers: int = 3):
    return AutoConfig.for_model(
        "mistral",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        pad_token_id=0,
    )


def lora():
    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def has_adapters(names) -> bool:
    return "LoRA" in names or "weight_streaming" in names  # which is for frozen weights


def trainer_of(names, folder, layers: int = 3, memory=None, **more):
    fields = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
    }
    memory = dict(memory or {})
    for name in names:
        fields |= LEVERS[name][0]
        memory |= LEVERS[name][1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(layers))
    if has_adapters(names):
        model = add_adapters(model, lora())
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2 * ROWS, LENGTH))
    labels = ids.clone()
    labels[:, :40] = -100
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    given = {
        "model": model,
        "args": TrainingArguments(str(folder), **{**fields, **more}),
        "train_dataset": rows,
        "data_collator": default_data_collator,
    }
    return MemoryTrainer(**given, memory_args=MemoryArguments(**memory))


def moved(names, folder, **more) -> torch.Tensor:
    """How far a run moves the weights that it trains."""
    trainer = trainer_of(names, folder, **more)
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    before = torch.cat([weight.detach().flatten().double() for weight in trained])
    trainer.train()
    return torch.cat([weight.detach().flatten().double() for weight in trained]) - before


@pytest.fixture
def apart(monkeypatch):
    """The CPU stands in for a device with memory of its own: what is offloaded is copied, at once."""
    keep = optimizer_cpu_offload.keep_on_host
    monkeypatch.setattr(optimizer_cpu_offload, "keep_on_host", lambda optimizer: keep(optimizer, lambda _: True))
    monkeypatch.setattr(activation_offload, "make_lanes", lambda _: activation_offload.AtOnce())
    monkeypatch.setattr(activation_offload, "_SMALLEST", 4096)
    monkeypatch.setattr(weight_streaming, "make_lanes", lambda _: weight_streaming.LanesAtOnce())


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What a run without the levers that change nothing gives; kept."""
    kept = {}

    def run(names):
        changes = tuple(name for name in LEVERS if name in CHANGES_THE_RUN and name in names)
        if has_adapters(names) and "LoRA" not in changes:
            changes += ("LoRA",)
        if changes not in kept:
            kept[changes] = moved(changes, tmp_path_factory.mktemp("without"))
        return kept[changes]

    return run


# With LoRA every lever is in a pair; the other pairs take minutes.
@pytest.mark.drawn(2)
@pytest.mark.parametrize("pair", [pair if "LoRA" in pair else slow(pair) for pair in PAIRS], ids=" and ".join)
def test_pairs(pair, without, apart, tmp_path):
    wanted, found = without(pair), moved(pair, tmp_path)
    if "activation_compression" in pair or "bf16" in pair:  # 8 bits; 16 bits that are rounded in another order
        # Adam divides small gradients by their own size, and what 8 bits do to them with it.
        least = 0.99 if "adam_mini" in pair else 0.999
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) >= least
    else:
        assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("pair", REFUSED, ids=" and ".join)
def test_pairs_that_are_refused(pair, tmp_path):
    with pytest.raises(InputError, match=REFUSED[pair]):
        trainer_of(pair, tmp_path)


def test_what_is_refused_says_why():
    """Every reason names the setting to leave out or to change."""
    everything = MemoryArguments(**{name: value for _, memory in LEVERS.values() for name, value in memory.items()})
    fields = {
        "use_liger_kernel": True,
        "label_smoothing_factor": 0.1,
        "torch_compile": True,
        "fp16": True,
        "gradient_accumulation_steps": 2,
        "fsdp_config": {"activation_checkpointing": True},
        "activation_checkpointing_kwargs": {"use_reentrant": True, "every_n_layers": 2},
    }
    for engine in map(engine_named, ("none", "ddp", "fsdp2", "zero0")):
        found = list(refused(everything, fields, engine))
        assert len(found) >= 11
        assert all("leave" in reason or "set" in reason or "keep one" in reason or "use" in reason for reason in found)
    assert list(refused(MemoryArguments(), {}, engine_named("none"))) == []
    compressed = MemoryArguments(activation_compression="int8")
    assert "would store the weights that ZeRO-3 gathers" in next(refused(compressed, {}, engine_named("zero3")))
    assert list(refused(compressed, {}, engine_named("zero2"))) == []


ESTIMATED = [
    # Weights stay where they are on a CPU: test_weight_streaming.py has one whose host memory is apart.
    *(slow((name,)) for name in LEVERS if name != "weight_streaming"),
    slow(("activation_compression", "checkpointing")),
    slow(("activation_compression", "bf16")),
    slow(("activation_compression", "LoRA")),
    ("checkpoint_ratio", "checkpoint_keeps"),
    ("adam_mini", "optimizer_in_backward"),
]


@pytest.mark.slow
@pytest.mark.parametrize("names", ESTIMATED, ids=" and ".join)
def test_the_estimator_sees_it(names, tmp_path):
    """On a model that is deep enough to be extended from shallow ones."""
    fields = {"optim": "adamw_torch", "max_steps": 2}
    memory, changed = {}, {"per_device_train_batch_size": ROWS, "max_grad_norm": 0.0, **fields}
    for name in names:
        changed |= LEVERS[name][0]
        memory |= LEVERS[name][1]
    measured = allocator_peak(lambda: trainer_of(names, tmp_path, layers=8, **fields).train())
    predicted = estimate(
        config(layers=8),
        changed,
        LENGTH,
        "cpu",
        peft_config=lora() if "LoRA" in names else None,
        memory_args=MemoryArguments(**memory),
    ).peak_allocated_bytes
    # Which positions carry labels is not known before the data are: all of them are counted.
    above = 0.2 if "logits_to_keep" in names else 0.03
    assert -0.02 <= predicted / measured - 1 <= above


def test_a_model_that_is_made_anew_has_its_levers(tmp_path):
    """As hyperparameter searches make it: train() asks model_init again."""
    args = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        save_strategy="no",
    )
    made = []

    def model_init():
        made.append(AutoModelForCausalLM.from_config(config(1)))
        return made[-1]

    ids = torch.randint(3, VOCABULARY, (2, 16))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = MemoryTrainer(
        model_init=model_init,
        args=args,
        train_dataset=rows,
        data_collator=default_data_collator,
        memory_args=MemoryArguments(loss_chunk_size=8, adam_mini=True),
    )
    trainer.train()
    assert len(made) == 2 and trainer.model is made[-1]
    assert trainer.model.lm_head.forward.of_lever
    head = trainer.optimizer.state[trainer.model.model.layers[0].self_attn.q_proj.weight]["exp_avg_sq"]
    assert head.shape == (4, 1, 1), "a second moment a head"


@dataclass
class Noted(Feature):
    """A feature of a file of its own, which notes what it is put on."""

    noted: bool = False
    of_optimizer: ClassVar = True
    calls: ClassVar = []

    @staticmethod
    def choose_optimizer(trainer):
        Noted.calls.append("chosen")

    @staticmethod
    def put_on_optimizer(optimizer, host):
        Noted.calls.append((optimizer, host))


def test_an_optimizer_is_changed_once(monkeypatch):
    """The Trainer asks for it when it is prepared and again when training begins."""
    monkeypatch.setattr(Noted, "calls", [])
    monkeypatch.setattr(apply, "FEATURES", [*apply.FEATURES, Noted])
    memory_args = MemoryArguments()
    memory_args.noted = True
    trainer = SimpleNamespace(model=None, optimizer=None)

    def create():
        trainer.optimizer = trainer.optimizer or "first"
        return trainer.optimizer

    trainer.create_optimizer = create
    apply.apply_to_trainer(trainer, memory_args, pin=False)
    assert [trainer.create_optimizer() for _ in range(2)] == ["first", "first"]
    assert Noted.calls == ["chosen", ("first", {"pin": False})]
    trainer.optimizer = "second"
    assert trainer.create_optimizer() == "second" and Noted.calls[2:] == [("second", {"pin": False})]
    memory_args.noted = False
    plain = SimpleNamespace(model=None, create_optimizer="its own")
    apply.apply_to_trainer(plain, memory_args)
    assert plain.create_optimizer == "its own"
