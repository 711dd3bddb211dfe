"""Tasks, losses and batches as other people write them: a struck run has the plain run's weights, or says why not."""

import random
from collections import OrderedDict, UserDict

import pytest
import torch
import transformers
from conftest import slow
from faults import Strikes, struck
from test_memory_trainer import QUIET
from torch.nn import functional
from transformers import BatchEncoding, Trainer, TrainingArguments

from hf_memopt import MemoryArguments, MemoryTrainerMixin, TrainingOutOfMemory

LENGTH = 8
TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


def bert(head: str, **fields):
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**TEXT, **fields)).double()


def vit():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": 5}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**TEXT, **sizes)).double()


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).double()


def segformer():
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[16],
        num_attention_heads=[1],
        patch_sizes=[3],
        strides=[2],
        mlp_ratios=[2],
        decoder_hidden_size=16,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return transformers.SegformerForSemanticSegmentation(config).double()


def samples(labels, count=32, pixels=False):
    """Samples of 4 to 8 tokens, or an image, with the fields that a function makes from a generator and a length."""
    generator = random.Random(0)
    made = []
    for at in range(count):
        length = generator.randrange(4, LENGTH + 1)
        ids = [generator.randrange(3, 40) for _ in range(length)]
        if pixels:
            sample = {"pixel_values": torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(at)).double()}
        else:
            sample = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(length, dtype=torch.long)}
        made.append(sample | labels(generator, at, length))
    return made


def collate(rows):
    """Tensors padded and stacked, all else as a list."""
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if not isinstance(values[0], torch.Tensor):
            batch[name] = values
        elif (
            name in ("input_ids", "attention_mask", "labels")
            and values[0].dim() == 1
            and not values[0].is_floating_point()
        ):
            fill = -100 if name == "labels" else 0
            padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
            batch[name] = padded
        else:
            batch[name] = torch.stack(values)
    return batch


def one_of(classes):
    return lambda generator, at, length: {"labels": torch.tensor(generator.randrange(classes))}


def of_tokens(classes):
    return lambda generator, at, length: {
        "labels": torch.tensor([generator.randrange(classes) for _ in range(length)])
    }


def masked(generator, at, length):
    hidden = [generator.randrange(3, 40) if generator.random() < 0.4 else -100 for _ in range(length)]
    return {"labels": torch.tensor(hidden)}


def spans(last):
    return lambda generator, at, length: {
        name: torch.tensor(generator.randrange(last if at > 7 else 4)) for name in ("start_positions", "end_positions")
    }


def train(
    folder,
    model,
    data,
    kind=Trainer,
    memory=True,
    strikes=None,
    collator=collate,
    prepare=None,
    declared=None,
    **fields,
):
    """A short run; its trainer and weights."""
    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "remove_unused_columns": False,
        **QUIET,
        **fields,
    }
    if memory:
        kind = type(f"Memory{kind.__name__}", (MemoryTrainerMixin, kind), {})
    args = TrainingArguments(str(folder), **fields)
    more = {"memory_args": MemoryArguments(loss_reduction=declared)} if memory else {}
    trainer = kind(model=model(), args=args, train_dataset=data, data_collator=collator, **more)
    if prepare:
        prepare(trainer)
    strikes = strikes or Strikes()
    struck(trainer, strikes)
    with strikes:
        trainer.train()
    return trainer, torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def attack(folder, *given, turns=2, **fields):
    """Plain weights from every struck run; the trainers, or the endings where it was not split."""
    counted = Strikes()
    _, wanted = train(folder / "plain", *given, memory=False, strikes=counted, **fields)
    choose, ended = random.Random(0), []
    _, calm = train(folder / "calm", *given, **fields)
    assert torch.allclose(calm, wanted, rtol=0, atol=1e-9), "nothing ran out"
    for turn in range(turns):
        at = {phase: {choose.randrange(1, counted.counts[phase])} for phase in ("forward", "backward")}
        at["forward"] |= {min(at["forward"]) + 1} if turn % 2 else set()
        hit = Strikes(at)
        try:
            trainer, found = train(folder / f"struck{turn}", *given, strikes=hit, **fields)
        except TrainingOutOfMemory as end:
            ended.append(str(end))
            continue
        assert hit.hits and trainer.memory_events
        assert torch.allclose(found, wanted, rtol=0, atol=1e-9), (hit.hits, (found - wanted).abs().max())
    return ended


TASKS = {
    "one label": (lambda: bert("SequenceClassification", num_labels=5), samples(one_of(5))),
    "regression": (
        lambda: bert("SequenceClassification", num_labels=1),
        samples(lambda g, at, n: {"labels": torch.tensor(g.random()).double()}),
    ),
    "several labels": (
        lambda: bert("SequenceClassification", num_labels=3),
        samples(lambda g, at, n: {"labels": torch.tensor([float(g.randrange(2)) for _ in range(3)]).double()}),
    ),
    "token classification": (lambda: bert("TokenClassification", num_labels=5), samples(of_tokens(5))),
    "question answering": (lambda: bert("QuestionAnswering"), samples(spans(5))),
    "question answering, out of range": (lambda: bert("QuestionAnswering"), samples(spans(20))),
    "masked LM": (lambda: bert("MaskedLM"), samples(masked)),
    "masked LM, hardly a label": (
        lambda: bert("MaskedLM"),
        samples(lambda g, at, n: {"labels": torch.tensor([-100] * (n - 1) + [7 if at % 4 == 3 else -100])}),
    ),
    "sequence to sequence": (t5, samples(of_tokens(40))),
    "images": (vit, samples(one_of(5), pixels=True)),
    "segmentation": (
        segformer,
        samples(
            lambda g, at, n: {
                "labels": torch.tensor([255 if i < 3 * at else g.randrange(4) for i in range(64)]).view(8, 8)
            },
            pixels=True,
        ),
    ),
    "multiple choice": (
        lambda: bert("MultipleChoice"),
        [
            {
                "input_ids": torch.randint(3, 40, (3, LENGTH), generator=torch.Generator().manual_seed(at)),
                "labels": torch.tensor(at % 3),
            }
            for at in range(32)
        ],
    ),
}


# Whose mean leaves out what no rule knows of, or whose samples may have nothing to tell a rule by.
MAY_END = {
    "question answering, out of range": "positions lie beyond the tokens",
    "segmentation": "batch_norm normalizes over the whole batch",
    "masked LM, hardly a label": "is not",
}


@pytest.mark.parametrize("task", ["one label", *(slow(task) for task in TASKS if task != "one label")])
def test_heads_of_transformers(task, tmp_path):
    ended = attack(tmp_path, *TASKS[task])
    assert all(MAY_END[task] in text for text in ended) if task in MAY_END else not ended


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked LM", "token classification"])
def test_label_smoothing(task, tmp_path):
    assert not attack(tmp_path, *TASKS[task], label_smoothing_factor=0.1)


# ---- batches

BATCHES = {
    "BatchEncoding": BatchEncoding,
    "UserDict": UserDict,
    "OrderedDict": OrderedDict,
    "ModelOutput": transformers.utils.ModelOutput,
}


class ByAttribute(Trainer):
    """Asks a BatchEncoding for its values by attribute, as tokenizers' documentation does."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert inputs.labels is inputs["labels"]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BatchEncoding", *(slow(kind) for kind in BATCHES if kind != "BatchEncoding")])
def test_batches_keep_their_type(kind, tmp_path):
    kinds = []

    class Noting(ByAttribute if kind == "BatchEncoding" else Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            kinds.append(type(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    model, data = TASKS["one label"]
    given = {"collator": lambda rows: BATCHES[kind](collate(rows)), "declared": "sample_mean"}
    ended = attack(tmp_path, model, data, Noting, **given)
    assert not ended and set(kinds) == {BATCHES[kind]}


class Weighted(Trainer):
    """A mean that a column of the data weights."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("text", None)
        weight = inputs.pop("weight")
        outputs = model(**inputs)
        each = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = (weight * each).sum() / weight.sum()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_weight_that_the_first_batches_do_not_show(tmp_path):
    def fields(generator, at, length):
        return one_of(5)(generator, at, length) | {"weight": torch.tensor(1.0 if at < 8 else 0.1 * at).double()}

    def in_order(trainer):
        trainer._get_train_sampler = lambda *_: None

    ended = attack(tmp_path, TASKS["one label"][0], samples(fields), Weighted, prepare=in_order)
    assert ended and all("has its own compute_loss" in end for end in ended)


class PerSample(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("text")
        weight = inputs.pop("weight")
        outputs = model(**inputs)
        loss = (weight * functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_weighted_samples_and_strings(tmp_path):
    def fields(generator, at, length):
        more = {"weight": torch.tensor(0.1 * at).double(), "text": f"sample {at}"}
        return one_of(5)(generator, at, length) | more

    assert not attack(tmp_path, TASKS["one label"][0], samples(fields), PerSample, declared="sample_mean")


class ClassWeights(Trainer):
    """As the documentation of transformers has it."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        weight = torch.ones(logits.shape[-1]).double()
        weight[3] = 4.0
        loss = torch.nn.CrossEntropyLoss(weight=weight)(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
@pytest.mark.parametrize("task", ["one label", "token classification"])
def test_class_weights_that_the_first_samples_do_not_show(task, tmp_path):
    model, data = TASKS[task]
    data = [row | {"labels": row["labels"].clamp(max=2 if at < 8 else 5)} for at, row in enumerate(data)]

    def in_order(trainer):
        trainer._get_train_sampler = lambda *_: None

    assert attack(tmp_path, model, data, ClassWeights, prepare=in_order)


class LaterContrastive(Trainer):
    """A term that compares samples joins after the first step."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = outputs.logits
        loss = outputs.loss + self.state.global_step * logits.var(dim=0).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_loss_that_changes_with_the_step(tmp_path):
    attack(tmp_path, *TASKS["one label"], LaterContrastive, turns=6, max_steps=4)


class InPlace(Trainer):
    """Changes its batch in place, more with every pass."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["labels"] -= 1
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.slow
def test_a_loss_that_changes_its_batch(tmp_path):
    model, data = TASKS["one label"]
    data = [row | {"labels": row["labels"] + 1} for row in data]
    attack(tmp_path, model, data, InPlace)


class Stateful(Trainer):
    """Divides by a running mean of its losses."""

    loss_is_scaled_for_ga = False
    mean = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.mean = 0.9 * self.mean + 0.1 * outputs.loss.item()
        loss = outputs.loss / self.mean
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_loss_with_a_memory(tmp_path):
    assert attack(tmp_path, *TASKS["one label"], Stateful)


class Focal(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        each = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = ((1 - (-each).exp()) ** 2 * each).mean()
        return (loss, outputs) if return_outputs else loss


class Distilled(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not hasattr(self, "teacher"):
            torch.manual_seed(5)
            self.teacher = bert("SequenceClassification", num_labels=5).eval()
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        far = functional.kl_div(outputs.logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        loss = 0.5 * outputs.loss + 0.5 * far
        return (loss, outputs) if return_outputs else loss


class Tuples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, return_dict=False)
        return (outputs[0], outputs) if return_outputs else outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Focal, slow(Distilled), slow(Tuples)])
def test_losses_over_samples(kind, tmp_path):
    assert not attack(tmp_path, *TASKS["one label"], kind, declared="sample_mean")


class WholeBatchFocal(Trainer):
    """Modulates the mean, not each sample."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = (1 - (-outputs.loss).exp()) ** 2 * outputs.loss
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_function_of_the_mean(tmp_path):
    """Samples of clearly different losses show it; of nearly equal ones it would be within the rounding."""

    def confident():
        model = bert("SequenceClassification", num_labels=5)
        torch.nn.init.normal_(model.classifier.weight, std=3.0)
        return model

    assert attack(tmp_path, confident, TASKS["one label"][1], WholeBatchFocal)


class Patches(torch.nn.Module):
    """Patches of all images in one tensor, as many for each sample as its tokens say."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.image = torch.nn.Embedding(40, 8).double(), torch.nn.Linear(6, 8).double()
        self.head = torch.nn.Linear(8, 5).double()

    def forward(self, input_ids, attention_mask, pixel_values, labels):
        places = input_ids == 1
        if places.sum() != len(pixel_values):
            raise ValueError("image features and image tokens do not match")
        hidden = self.token(input_ids).masked_scatter(places[..., None], self.image(pixel_values))
        logits = self.head((hidden * attention_mask[..., None]).mean(dim=1))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
def test_as_many_images_as_samples_by_chance(tmp_path):
    def fields(generator, at, length):
        images = 1 if at < 12 else (2, 0, 1, 1)[at % 4] if at < 16 else at % 3
        ids = torch.tensor([1] * images + [generator.randrange(3, 40) for _ in range(length)])
        more = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.rand(images, 6).double(),
        }
        return one_of(5)(generator, at, length) | more

    def stacked(rows):
        pixels = torch.cat([row["pixel_values"] for row in rows])
        return collate([{k: v for k, v in row.items() if k != "pixel_values"} for row in rows]) | {
            "pixel_values": pixels
        }

    def in_order(trainer):
        trainer._get_train_sampler = lambda *_: None

    torch.manual_seed(0)
    attack(tmp_path, Patches, samples(fields), collator=stacked, prepare=in_order, turns=6)


# ---- arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
        {"train_sampling_strategy": "group_by_length"},
        {"label_names": ["labels"]},
        {"average_tokens_across_devices": False},
    ],
    ids=str,
)
def test_arguments(fields, tmp_path):
    assert not attack(tmp_path, *TASKS["masked LM"], **fields)


@pytest.mark.parametrize("fields", [{"bf16": True}, {"neftune_noise_alpha": 5.0}], ids=str)
def test_arguments_that_round_or_draw(fields, tmp_path):
    """Chunks draw other noise and round otherwise: the run ends, or it ends well."""
    model, data = TASKS["masked LM"]
    hit = Strikes({"forward": {60}, "backward": {80}})
    _, found = train(tmp_path, model, data, strikes=hit, **fields)
    assert hit.hits and found.isfinite().all()


@pytest.mark.slow
def test_no_label_in_a_batch_counts(tmp_path):
    model, data = TASKS["token classification"]
    data = [row | {"labels": row["labels"] if at % 3 else row["labels"] * 0 - 100} for at, row in enumerate(data)]

    def in_order(trainer):
        trainer._get_train_sampler = lambda *_: None

    assert not attack(tmp_path, model, data, prepare=in_order, turns=6)
