"""Tasks, losses and batches as other people write them: a struck run has the plain run's weights, or says why not."""

import random

import pytest
import torch
import transformers
from conftest import slow
from faults import Strikes, struck
from small_runs import QUIET
from transformers import Trainer, TrainingArguments

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
