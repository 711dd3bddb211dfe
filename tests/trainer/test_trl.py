"""TRL's trainers with MemoryTrainerMixin: pairs are split as pairs, and what cannot be split is said."""

import random
from functools import wraps

import pytest
import torch
import trl
from conftest import slow
from datasets import Dataset
from faults import Strikes, struck
from peft import LoraConfig
from small_runs import OOM, TINY
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hf_memopt import InputError, MemoryArguments, MemoryTrainerMixin, TrainingOutOfMemory

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, 64)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(kind=LlamaForCausalLM, seed=0, **fields):
    torch.manual_seed(seed)
    return kind(LlamaConfig(**TINY, eos_token_id=1, **fields)).double()


def words(generator, least=3, most=12) -> str:
    return " ".join(f"w{generator.randrange(3, 64)}" for _ in range(generator.randrange(least, most)))


def rows(*columns) -> Dataset:
    generator = random.Random(0)
    return Dataset.from_list([{name: words(generator) for name in columns} for _ in range(32)])


def unpaired() -> Dataset:
    generator = random.Random(0)
    return Dataset.from_list(
        [{"prompt": words(generator), "completion": words(generator), "label": at % 3 > 0} for at in range(32)]
    )


def reward_model():
    return llama(LlamaForSequenceClassification, num_labels=1)


PAIRS = ("prompt", "chosen", "rejected")
CASES = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, lambda: rows("text"), llama, {}),
    "SFT packed": (trl.SFTTrainer, trl.SFTConfig, lambda: rows("text"), llama, {"packing": True, "max_length": 24}),
    "SFT dft": (trl.SFTTrainer, trl.SFTConfig, lambda: rows("text"), llama, {"loss_type": "dft"}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, lambda: rows(*PAIRS), llama, {}),
    "DPO, several losses": (
        trl.DPOTrainer,
        trl.DPOConfig,
        lambda: rows(*PAIRS),
        llama,
        {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]},
    ),
    "DPO, reference computed before": (
        trl.DPOTrainer,
        trl.DPOConfig,
        lambda: rows(*PAIRS),
        llama,
        {"precompute_ref_log_probs": True},
    ),
    "DPO, adapters": (trl.DPOTrainer, trl.DPOConfig, lambda: rows(*PAIRS), llama, {"peft_config": LoraConfig(r=4)}),
    "Reward": (trl.RewardTrainer, trl.RewardConfig, lambda: rows(*PAIRS), reward_model, {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, unpaired, llama, {}),
    "KTO without KL": (trl.KTOTrainer, trl.KTOConfig, unpaired, llama, {"loss_type": "apo_zero_unpaired"}),
}


def train(folder, case, memory=True, strikes=None, prepare=None, **more):
    kind, config, data, model, fields = CASES[case]
    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.02,
        "optim": "sgd",  # Adam would amplify the rounding of Llama's norms, which are computed in fp32
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        **fields,
        **more,
    }
    if memory:
        kind = type(f"Memory{kind.__name__}", (MemoryTrainerMixin, kind), {})
    refers = kind.__name__.endswith(("DPOTrainer", "KTOTrainer")) and "peft_config" not in fields
    given = {"ref_model": llama(seed=1)} if refers else {}
    given |= {name: fields.pop(name) for name in ("peft_config",) if name in fields}
    args = config(str(folder), **fields)
    trainer = kind(model=model(), args=args, train_dataset=data(), processing_class=tokenizer(), **given)
    trainer.model.double()  # peft makes adapters in fp32
    if prepare:
        prepare(trainer)
    strikes = strikes or Strikes()
    struck(trainer, strikes)
    with strikes:
        trainer.train()
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    return trainer, weights, strikes


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["SFT", "DPO", *(slow(case) for case in CASES if case not in ("SFT", "DPO"))])
def test_failures_at_random_places_change_nothing(case, tmp_path):
    plain, wanted, counted = train(tmp_path / "plain", case, memory=False)
    choose = random.Random(case)
    for turn in range(2):
        hit = Strikes({phase: {choose.randrange(1, counted.counts[phase])} for phase in ("forward", "backward")})
        trainer, found, _ = train(tmp_path / f"struck{turn}", case, strikes=hit)
        assert hit.hits and trainer.memory_events
        assert torch.allclose(found, wanted, rtol=0, atol=1e-9), (case, hit.hits, (found - wanted).abs().max())
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)
        assert logged(trainer, "num_tokens") == logged(plain, "num_tokens"), "what ran again is counted once"


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("DPO", {"loss_type": "aot"}, "loss_type=aot compares the samples of a batch"),
        ("DPO", {"loss_type": ["sigmoid", "sft"]}, "loss_type=sft"),
    ],
)
def test_losses_over_the_whole_batch_are_not_split(case, fields, reason, tmp_path, caplog):
    def full(trainer):
        forward = trainer.model.forward

        @wraps(forward)
        def too_much(*args, **kwargs):
            if trainer.state.global_step == 2 and trainer.model.training:
                raise torch.OutOfMemoryError(OOM)
            return forward(*args, **kwargs)

        trainer.model.forward = too_much

    with pytest.raises(TrainingOutOfMemory, match=reason) as end:
        train(tmp_path, case, prepare=full, **fields)
    assert end.value.report["checkpoint"].endswith("checkpoint-2")
    assert f"micro-batches run whole: {reason}" in caplog.text


class OwnSFTTrainer(trl.SFTTrainer):
    """A loss that is not TRL's alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = 2 * loss
        return (loss, outputs) if return_outputs else loss


class OwnDPOTrainer(trl.DPOTrainer):
    """A part of TRL's own loss replaced."""

    def _compute_loss(self, model, inputs, return_outputs):
        return super()._compute_loss(model, inputs, return_outputs)


@pytest.mark.parametrize(
    ("case", "kind", "own"), [("SFT", OwnSFTTrainer, "compute_loss"), ("DPO", OwnDPOTrainer, "_compute_loss")]
)
def test_what_is_ones_own_over_trl_is_asked_about(case, kind, own, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, case, (kind, *CASES[case][1:]))
    with pytest.raises(TrainingOutOfMemory, match=f"has its own {own}: .* set loss_reduction"):
        train(tmp_path, case, strikes=Strikes({"backward": {40}}))


@pytest.mark.parametrize("fields", [{"loss_chunk_size": 16}, {"logits_to_keep": True}])
def test_features_of_the_loss_are_refused(fields, tmp_path):
    """TRL's own head takes the place of the model's forward: they would do nothing, or mix up positions."""
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    kind = type("MemorySFT", (MemoryTrainerMixin, trl.SFTTrainer), {})
    with pytest.raises(InputError, match=f"{next(iter(fields))} goes without SFTTrainer"):
        kind(
            model=llama(),
            args=args,
            train_dataset=rows("text"),
            processing_class=tokenizer(),
            memory_args=MemoryArguments(**fields),
        )


def test_grpo_is_refused_to_be_split_at_construction(tmp_path, caplog):
    """It generates within a step: what runs again would be other text."""

    class MemoryGRPO(MemoryTrainerMixin, trl.GRPOTrainer):
        pass

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    args = trl.GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    given = {"args": args, "reward_funcs": length, "train_dataset": rows("prompt"), "processing_class": tokenizer()}
    trainer = MemoryGRPO(model=llama().float(), **given)
    assert "micro-batches run whole: GRPOTrainer generates" in caplog.text
    assert trainer.train().global_step == 1
    with pytest.raises(InputError, match="max_batch_size=8 needs micro-batches that can be split"):
        MemoryGRPO(model=llama().float(), memory_args=MemoryArguments(max_batch_size=8), **given)


class MemoryRLOO(MemoryTrainerMixin, trl.RLOOTrainer):
    pass


class MemoryGRPO(MemoryTrainerMixin, trl.GRPOTrainer):
    pass


def generating(folder, kind, most: int, memory_args=None, **fields):
    """A trainer whose generate() runs out of memory with more prompts than `most`, and the sizes that it was asked
    for."""

    def wide(completions, **_):
        return [float(len(set(text))) for text in completions]

    config = {MemoryGRPO: trl.GRPOConfig, MemoryRLOO: trl.RLOOConfig}[kind]
    usual = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 2}
    usual |= {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "beta": 0.0}
    args = config(str(folder), **usual | fields)
    given = {"reward_funcs": wide, "train_dataset": rows("prompt"), "processing_class": tokenizer()}
    trainer = kind(model=llama().float(), args=args, memory_args=memory_args, **given)
    generate, sizes = trainer.model.generate, []

    def limited(input_ids, **kwargs):
        sizes.append(len(input_ids))
        if len(input_ids) > most:
            raise torch.OutOfMemoryError(OOM)
        return generate(input_ids=input_ids, **kwargs)

    trainer.model.generate = limited
    return trainer, sizes


@pytest.mark.parametrize("kind", [MemoryGRPO, MemoryRLOO])
def test_generation_continues_in_smaller_groups(kind, tmp_path):
    trainer, sizes = generating(tmp_path, kind, most=3)
    assert trainer.train().global_step == 2
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2], "the next step begins with what fitted"
    recovered = [event for event in trainer.memory_events if event["event"] == "oom_recovered"]
    assert [(event["stage"], event["micro_batch_after"]) for event in recovered] == [
        ("generation", 4),
        ("generation", 2),
    ]
    assert all(len(texts) == 8 for texts in (trainer._logs["prompt"], trainer._logs["completion"]))


def test_activation_checkpointing_stays_on_after_generation_ran_out(tmp_path):
    trainer, _ = generating(tmp_path, MemoryGRPO, most=4, activation_checkpointing=True)
    trainer.train()
    assert trainer.memory_events and trainer.model.is_activation_checkpointing


class MemoryDPO(MemoryTrainerMixin, trl.DPOTrainer):
    pass


def on_pairs(folder, memory_args, **fields):
    args = trl.DPOConfig(
        str(folder), max_steps=2, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, **fields
    )
    given = {"train_dataset": rows(*PAIRS), "processing_class": tokenizer(), "memory_args": memory_args}
    return MemoryDPO(model=llama().float(), args=args, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), **given)


def on_prompts(folder, memory_args, **fields):
    trainer, _ = generating(folder, MemoryGRPO, most=4, num_iterations=2, memory_args=memory_args, **fields)
    return trainer


@pytest.mark.parametrize("make", [on_pairs, slow(on_prompts)])
@pytest.mark.parametrize(
    ("memory_args", "kwargs", "checkpointed"),
    [
        (MemoryArguments(), {"every_n_layers": 2}, [True, False]),
        slow(MemoryArguments(checkpoint_ratio=0.5), {}, [False, True]),
    ],
)
def test_the_same_layers_are_checkpointed_after_trl_switched_it_off(make, memory_args, kwargs, checkpointed, tmp_path):
    """TRL 1.16 does so for log-probabilities and generation, and hands what chooses layers to torch's checkpoint()."""
    fields = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False, **kwargs}}
    trainer = make(tmp_path, memory_args, **fields)
    trainer.train()
    layers = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers
    assert [layer.gradient_checkpointing for layer in layers] == checkpointed


def test_generation_of_one_completion_that_does_not_fit_is_explained(tmp_path):
    trainer, sizes = generating(tmp_path, MemoryGRPO, most=0)
    with pytest.raises(TrainingOutOfMemory, match="one completion at a time does not fit") as end:
        trainer.train()
    assert sizes == [8, 4, 2, 1] and end.value.report["stage"] == "generation"
    assert trainer.model.training


def test_other_errors_of_generation_pass(tmp_path):
    trainer, _ = generating(tmp_path, MemoryGRPO, most=8)

    def broken(**_):
        raise RuntimeError("nothing about memory")

    trainer.model.generate = broken
    with pytest.raises(RuntimeError, match="nothing about memory"):
        trainer.train()
