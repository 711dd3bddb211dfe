"""Trainers as people write them: batches of every shape, own loaders, losses, optimizers and teachers. Each is
estimated and really trained."""

import gc

import pytest
import torch
import transformers
from conftest import slow
from transformers import BatchEncoding, BertConfig, LlamaConfig, LlamaForCausalLM, Trainer, default_data_collator

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, estimate_trainer

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
T5 = {"vocab_size": 1000, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 8, "num_heads": 4}


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + 3


def llama(layers=8):
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, **{**SMALL, "num_hidden_layers": layers}))


def bert(name, **fields):
    return getattr(transformers, name)(BertConfig(vocab_size=1000, **SMALL, **fields))


def text(length=64):
    return {"input_ids": ids(length), "labels": ids(length)}


def masked(*shape, **labels):
    return {**labels, "input_ids": ids(*shape), "attention_mask": torch.ones(shape, dtype=torch.long)}


def arguments(folder, kind=transformers.TrainingArguments, **fields):
    usual = {"max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    fields = {"per_device_train_batch_size": 4, "remove_unused_columns": False, **usual, **fields}
    return kind(str(folder), **fields)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([text()] * 16)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=6, collate_fn=default_data_collator)


class ListOfBatches(Trainer):
    def get_train_dataloader(self):
        return [default_data_collator([text()] * 3) for _ in range(4)]


class OwnSteps(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss * 2)
        return loss.detach()

    def create_optimizer(self, *args, **kwargs):
        self.optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


class Nested(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        first, second = inputs["pair"]
        return model(**first).loss + model(**second["inner"]).loss


def nest(rows):
    return {
        "pair": [BatchEncoding(default_data_collator(rows)), {"inner": default_data_collator(rows)}],
        "texts": ["a"],
    }


class Distillation(Trainer):
    """Its teachers are in a dict, its loss selects tokens by a mask and asks a value."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teachers["one"](**inputs).logits
        chosen = inputs["labels"] > 20
        divergence = (outputs.logits[chosen] - taught[chosen]).square().mean() * self.weights.mean()
        return outputs.loss if torch.isnan(divergence).any() else outputs.loss + divergence


def distillation(folder, layers):
    trainer = Distillation(llama(), arguments(folder), train_dataset=[text()] * 16)
    trainer.teachers, trainer.weights = {"one": llama(layers).eval()}, torch.rand(1000)
    return trainer


class Linears(torch.nn.Module):
    """No model of transformers: no configuration."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(10))

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": torch.nn.functional.cross_entropy(x, labels), "logits": x}


def with_optimizer(folder):
    model = llama()
    weights = list(model.parameters())
    groups = [{"params": weights[:9], "lr": 0.1}, {"params": weights[9:]}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    return Trainer(model, arguments(folder), train_dataset=[text()] * 16, optimizers=(optimizer, scheduler))


def generating(folder):
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))
    fields = {"predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 1, "generation_max_length": 24}
    args = arguments(folder, transformers.Seq2SeqTrainingArguments, **fields)
    rows = [masked(50, labels=ids(20))] * 16
    return transformers.Seq2SeqTrainer(model, args, train_dataset=rows, eval_dataset=rows)


def plain(model, row):
    return lambda folder: Trainer(model(), arguments(folder), train_dataset=[row] * 16)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL))


CASES = {
    "labels first": plain(lambda: bert("BertForSequenceClassification"), masked(50, label=1)),
    "multiple choice": plain(lambda: bert("BertForMultipleChoice"), masked(4, 50, label=1)),
    "answers in a text": plain(
        lambda: bert("BertForQuestionAnswering"), masked(50, start_positions=1, end_positions=4)
    ),
    "pixels": plain(vit, {"pixel_values": torch.rand(3, 32, 32), "labels": 1}),
    "no configuration": plain(Linears, {"x": torch.rand(256), "labels": 1}),
    "generation in evaluation": generating,
    "stream": lambda folder: Trainer(llama(), arguments(folder), train_dataset=Stream()),
    "own loader": lambda folder: OwnLoader(llama(), arguments(folder), train_dataset=[text()] * 32),
    "list of batches": lambda folder: ListOfBatches(llama(), arguments(folder)),
    "own steps": lambda folder: OwnSteps(llama(), arguments(folder), train_dataset=[text()] * 16),
    "model_init": lambda folder: Trainer(
        None, arguments(folder), model_init=lambda: llama(), train_dataset=[text()] * 16
    ),
    "optimizer": with_optimizer,
    "nested": lambda folder: Nested(llama(), arguments(folder), train_dataset=[text()] * 16, data_collator=nest),
    "teacher": lambda folder: distillation(folder, 8),
    "deeper teacher": lambda folder: distillation(folder, 12),
    "evaluation of two sets": lambda folder: Trainer(
        llama(),
        arguments(folder, eval_strategy="steps", eval_steps=1),
        train_dataset=[text()] * 16,
        eval_dataset={"short": [text()] * 8, "long": [text(300)] * 16},
    ),
}
QUICK = ("labels first", "optimizer", "teacher")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_predicted_as_measured(case, tmp_path):
    predicted = estimate_trainer(CASES[case](tmp_path), "cpu").peak_allocated_bytes
    gc.collect()
    assert predicted == pytest.approx(allocator_peak(lambda: CASES[case](tmp_path).train()), rel=0.01)


def test_a_value_that_only_a_real_batch_has(tmp_path):
    class Asks(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return outputs.loss + torch.repeat_interleave(outputs.logits.argmax(-1).flatten()).sum()

    trainer = Asks(llama(), arguments(tmp_path), train_dataset=[text()] * 16)
    with pytest.raises(InputError, match=r"test_trainers.py, line \d+, asks for values .*repeat_interleave"):
        estimate_trainer(trainer, "cpu")


def test_a_collator_that_fails(tmp_path):
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=[text()] * 16, data_collator=lambda rows: 1 / 0)
    with pytest.raises(InputError, match=r"the trainer's data: .*test_trainers.py, line \d+: ZeroDivisionError"):
        estimate_trainer(trainer, "cpu")


@pytest.mark.slow
def test_the_longest_pairs_are_found_by_their_batch(tmp_path):
    """Rows without `input_ids`: prompts and answers, which the collator joins."""
    from datasets import Dataset

    def collate(rows):
        return default_data_collator([text(len(row["prompt"]) + len(row["answer"])) for row in rows])

    lengths = [(30, 10)] * 40 + [(10, 90)] * 4 + [(50, 10)] * 40
    data = Dataset.from_list([{"prompt": [1] * prompt, "answer": [1] * answer} for prompt, answer in lengths])
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=data, data_collator=collate)
    longest = Trainer(llama(), arguments(tmp_path), train_dataset=[text(100)] * 16)
    assert estimate_trainer(trainer, "cpu").peak_allocated_bytes == pytest.approx(
        estimate_trainer(longest, "cpu").peak_allocated_bytes, rel=0.001
    )
