"""Logits of answers alone: the same loss and gradients, fewer logits, and all of them when nothing is trained."""

import pytest
import torch
from faults import Strikes
from small_runs import llama, train, with_lora

from hf_memopt import InputError
from hf_memopt.levers.answer_logits import keep_answer_logits

MEMORY = {"logits_to_keep": True}


def batch(first_answer: int = 12):
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (3, 20))
    labels = ids.clone()
    labels[:, :first_answer] = -100
    labels[1, :15] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("items", [None, torch.tensor(17)])
def test_loss_and_gradients_are_the_same(items):
    plain, fewer = llama().train(), llama().train()
    keep_answer_logits(fewer)
    more = {} if items is None else {"num_items_in_batch": items}
    wanted, found = plain(**batch(), **more), fewer(**batch(), **more)
    assert found.logits.shape == (3, 8, 64)  # from the token before the first answer to the one before the last
    assert torch.allclose(found.loss, wanted.loss)
    wanted.loss.backward()
    found.loss.backward()
    for ours, theirs in zip(fewer.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-7)


def test_all_logits_are_there_otherwise():
    model = llama()
    keep_answer_logits(model)
    assert model.eval()(**batch()).logits.shape == (3, 20, 64)
    assert model.train()(input_ids=batch()["input_ids"]).logits.shape == (3, 20, 64)
    assert model(**batch(20), num_items_in_batch=torch.tensor(3)).loss == 0, "no answer at all"


def answers(trainer):
    collate = trainer.data_collator

    def masked(rows):
        made = collate(rows)
        made["labels"][:, :5] = -100
        return made

    trainer.data_collator = masked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [(llama, {"gradient_accumulation_steps": 4}), (llama, {"eval_strategy": "epoch"}), (with_lora, {})],
)
def test_runs_are_the_same(model, fields, tmp_path):
    wanted = train(tmp_path / "plain", model=model, prepare=answers, **fields)
    found = train(tmp_path / "fewer", model=model, prepare=answers, memory=MEMORY, **fields)
    struck = train(
        tmp_path / "struck",
        Strikes({"forward": {100}, "backward": {150}}),
        model=model,
        prepare=answers,
        memory=MEMORY,
        **fields,
    )
    assert len(struck.events) == 2
    for other in (found, struck):  # the loss is taken in fp32
        assert torch.allclose(other.weights, wanted.weights, rtol=0, atol=1e-6)


def test_refused(tmp_path):
    with pytest.raises(InputError, match="leave logits_to_keep out"):
        train(tmp_path, memory={**MEMORY, "loss_chunk_size": 8})
    with pytest.raises(InputError, match="label_smoothing_factor"):
        train(tmp_path, memory=MEMORY, label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="logits_to_keep"):
        keep_answer_logits(torch.nn.Linear(2, 2))
