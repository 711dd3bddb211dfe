"""TRL's trainers with MemoryTrainerMixin: pairs are split as pairs, and what cannot be split is said."""

import random

import pytest
import torch
import trl
from conftest import slow
from datasets import Dataset
from faults import Strikes, struck
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hf_memopt import InputError, MemoryTrainerMixin, TrainingOutOfMemory

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, 64)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(kind=LlamaForCausalLM, seed=0, **fields):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        **fields,
    )
    return kind(config).double()


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
    given = {"ref_model": llama(seed=1)} if kind.__name__.endswith(("DPOTrainer", "KTOTrainer")) else {}
    args = config(str(folder), **fields)
    trainer = kind(model=model(), args=args, train_dataset=data(), processing_class=tokenizer(), **given)
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

        def too_much(*args, **kwargs):
            if trainer.state.global_step == 2 and trainer.model.training:
                raise torch.OutOfMemoryError(OOM)
            return forward(*args, **kwargs)

        trainer.model.forward = too_much

    with pytest.raises(TrainingOutOfMemory, match=reason) as end:
        train(tmp_path, case, prepare=full, **fields)
    assert end.value.report["checkpoint"].endswith("checkpoint-2")
    assert f"micro-batches run whole: {reason}" in caplog.text


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
    from hf_memopt import MemoryArguments

    with pytest.raises(InputError, match="max_batch_size=8 needs micro-batches that can be split"):
        MemoryGRPO(model=llama().float(), memory_args=MemoryArguments(max_batch_size=8), **given)
