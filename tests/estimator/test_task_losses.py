"""Losses, batches and arguments of one's own around transformers' heads: split to the same weights, or an end."""

from collections import OrderedDict, UserDict

import pytest
import torch
import transformers
from conftest import slow
from faults import Strikes
from test_tasks import TASKS, attack, bert, collate, one_of, samples, train
from torch.nn import functional
from transformers import BatchEncoding, Trainer

# ---- batches

BATCHES = {
    **{"BatchEncoding": BatchEncoding, "UserDict": UserDict, "OrderedDict": OrderedDict},
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
