"""Runs of a small Llama on samples of unlike lengths, to the end or until memory runs out at a chosen allocation."""

import random

import torch
from faults import Strikes, struck
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_memopt import MemoryArguments, MemoryTrainer

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
# Of most language models' configurations: the smallest that has every kind of layer.
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


class Rows(torch.utils.data.Dataset):
    """Samples of 4 to 29 tokens, each of another length and content."""

    def __init__(self, count: int = 40, first: int = 0):
        generator = random.Random(0)
        self.first = first
        self.rows = [[generator.randrange(3, 60) for _ in range(generator.randrange(4, 30))] for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "number": self.first + index}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def llama(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, attention_dropout=dropout)).to(dtype)


class MeanLoss(torch.nn.Module):
    """A model whose loss is a mean over its labels and that takes no number of items."""

    def __init__(self):
        super().__init__()
        self.inner = llama()
        self.config = self.inner.config

    def forward(self, input_ids, attention_mask, labels):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"loss": torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)}


def with_lora():
    from peft import LoraConfig

    from hf_memopt.levers.adapters import add_adapters

    model = llama()
    return add_adapters(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).double()


MODELS = {"loss of the whole window": llama, "mean loss": MeanLoss, "LoRA": with_lora}
DECLARED = {"mean loss": {"loss_reduction": "token_mean"}}  # models of one's own


class Finished:
    """What a run left behind."""

    def __init__(self, trainer):
        trained = [weight.detach().flatten() for weight in trainer.model.parameters() if weight.requires_grad]
        self.weights = torch.cat(trained)
        self.step = trainer.state.global_step
        self.rate = trainer.lr_scheduler.get_last_lr() if trainer.lr_scheduler else None
        self.logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.events = getattr(trainer, "memory_events", [])
        self.seen = trainer.seen


def train(
    folder, strikes=None, kind=MemoryTrainer, model=llama, resume=False, prepare=None, memory=None, **fields
) -> Finished:
    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "include_num_input_tokens_seen": "all",
        **QUIET,
        **fields,
    }
    seen = []

    def noting(rows):
        if rows[0]["number"] < 1000:  # of the training data
            seen.append([row["number"] for row in rows])
        return collate(rows)

    args = TrainingArguments(str(folder), remove_unused_columns=False, **fields)
    given = {"model": model(), "train_dataset": Rows(), "eval_dataset": Rows(8, 1000), "data_collator": noting}
    trainer = kind(args=args, **given, **({"memory_args": MemoryArguments(**memory)} if memory else {}))
    trainer.seen = seen
    if prepare:
        prepare(trainer)
    strikes = strikes or Strikes()
    struck(trainer, strikes)
    with strikes:
        trainer.train(resume_from_checkpoint=resume)
    return Finished(trainer)


def same(found: Finished, wanted: Finished, tolerance: float = 1e-9) -> None:
    assert (found.step, found.rate, found.seen) == (wanted.step, wanted.rate, wanted.seen)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=tolerance)
