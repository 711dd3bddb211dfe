"""MemoryTrainer's evaluation: smaller batches, metrics, logits that are kept as tokens."""

import itertools
import json
from functools import wraps
from types import SimpleNamespace

import numpy
import pytest
import torch
from faults import Strikes
from small_runs import OOM, QUIET, Rows, collate, llama, train
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memopt import InputError, MemoryArguments, MemoryTrainer, TrainingOutOfMemory
from hf_memopt.trainer.evaluation import join
from hf_memopt.trainer.step import optimizer_guard


@pytest.mark.slow
def test_evaluation_halves_its_batch(tmp_path):
    fields = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "max_steps": 4}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)
    found = train(tmp_path / "struck", Strikes({"eval": {20}}), **fields)
    (event,) = found.events
    assert (event["stage"], event["micro_batch_before"], event["micro_batch_after"]) == ("eval", 8, 4)
    assert found.step == wanted.step and torch.equal(found.weights, wanted.weights)


def _evaluated(kind, folder, metric, **memory):
    """The metrics of a small language model's evaluation, two batches of unlike length."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1200,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            pad_token_id=0,
        )
    )
    args = TrainingArguments(str(folder), remove_unused_columns=False, per_device_eval_batch_size=4, **QUIET)
    given = {"memory_args": MemoryArguments(**memory)} if kind is MemoryTrainer else {}
    trainer = kind(
        model=model, args=args, eval_dataset=Rows(8), data_collator=collate, compute_metrics=metric, **given
    )
    return trainer.evaluate()


def test_metrics_are_given_the_logits_unless_the_user_wants_tokens(tmp_path):
    seen = []

    def metric(prediction):
        seen.append(prediction.predictions)
        return {"mean": float(numpy.asarray(prediction.predictions[0:2, 0]).mean())}

    for kind in (Trainer, MemoryTrainer):
        _evaluated(kind, tmp_path, metric)
    assert numpy.array_equal(*seen) and seen[1].ndim == 3


ANSWERED = (
    lambda logits: logits.argmax(-1),
    lambda logits: logits.argmax(axis=2),
    lambda logits: numpy.argmax(logits, axis=-1),
    lambda logits: logits[:, :-1].argmax(-1),
    lambda logits: logits[..., :-1, :].argmax(-1),
    lambda logits: logits[:, :-1, :].argmax(axis=-1),
    lambda logits: numpy.argmax(logits[2:, 1:][...], -1),
    lambda logits: numpy.array([*logits.shape, logits.ndim, len(logits), *logits[1:, :3].shape]),
    lambda logits: numpy.array([*numpy.shape(logits), numpy.ndim(logits)]),
)
REFUSED = (
    lambda logits: logits[0],
    lambda logits: logits[:, 0],
    lambda logits: logits[:, :, :10],
    lambda logits: logits[..., :-1],
    lambda logits: logits[[0, 1]],
    lambda logits: logits[:, None],
    lambda logits: logits[numpy.ones(len(logits), bool)],
    lambda logits: logits.argmax(),
    lambda logits: logits.argmax(1),
    lambda logits: logits.max(-1),
    lambda logits: logits.reshape(-1, 1200),
    lambda logits: numpy.exp(logits),
    lambda logits: logits + 1,
    lambda logits: logits == 3,
    lambda logits: numpy.asarray(logits),
    lambda logits: numpy.concatenate([logits, logits]),
    lambda logits: torch.from_numpy(logits),
    lambda logits: torch.tensor(logits),
    lambda logits: list(logits),
    lambda logits: [row for row in zip(logits, logits, strict=True)],
)


def test_reduced_logits_answer_what_the_logits_would_or_refuse(tmp_path):
    seen = {}
    for kind, memory in ((Trainer, {}), (MemoryTrainer, {"reduce_eval_logits": True})):

        def metric(prediction, kind=kind):
            seen[kind] = prediction.predictions
            return {"samples": float(len(prediction.label_ids))}

        _evaluated(kind, tmp_path, metric, **memory)
    for take in ANSWERED:
        assert numpy.array_equal(take(seen[Trainer]), take(seen[MemoryTrainer])), take
    for take in REFUSED:
        with pytest.raises((TypeError, ValueError)):
            take(seen[MemoryTrainer])


def _no_room_for_evaluation(trainer):
    forward = trainer.model.forward

    @wraps(forward)
    def too_much(*args, **kwargs):
        if not trainer.model.training:
            raise torch.OutOfMemoryError(OOM)
        return forward(*args, **kwargs)

    trainer.model.forward = too_much


@pytest.mark.slow
def test_an_evaluation_that_never_fits_costs_no_step(tmp_path):
    fields = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 5}
    wanted = train(tmp_path / "plain", kind=Trainer, max_steps=5)
    with pytest.raises(TrainingOutOfMemory, match="the evaluation batch is one sample") as end:
        train(tmp_path / "out", prepare=_no_room_for_evaluation, **fields)
    assert end.value.report["checkpoint"].endswith("checkpoint-3")
    found = train(tmp_path / "out", resume=True, max_steps=5)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


def test_evaluate_alone_says_why_it_ended(tmp_path, caplog):
    args = TrainingArguments(str(tmp_path), remove_unused_columns=False, **QUIET)
    trainer = MemoryTrainer(model=llama(), args=args, eval_dataset=Rows(8), data_collator=collate)
    _no_room_for_evaluation(trainer)
    with pytest.raises(TrainingOutOfMemory):
        trainer.evaluate()
    assert "out of memory in eval" in caplog.text
    report = json.loads((tmp_path / "oom_report.json").read_text())
    assert (report["stage"], report["checkpoint"]) == ("eval", None)


def test_outputs_of_chunks_are_joined_by_sample():
    one, two = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])
    assert join([one, two], [2, 1]).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [part.tolist() for part in join([(one, one), (two, two)], [2, 1])] == 2 * [[[1, 2], [3, 4], [5, 6]]]
    assert join([{"a": one}, {"a": two}], [2, 1])["a"].shape == (3, 2) and join([None, None], [2, 1]) is None
    for parts, counts in (
        ([torch.tensor(1.0)], [1]),  # of the batch
        ([one, one], [2, 1]),
        ([one, torch.ones(1, 3)], [2, 1]),
        (["text"], [1]),
    ):
        with pytest.raises(InputError):
            join(parts, counts)


def test_an_update_repeats_where_the_model_is_whole_and_backward_left_it(monkeypatch):
    for whole, changes, (recovery, devices) in itertools.product(
        (True, False), (True, False), ((True, 1), (True, 2), (False, 1))
    ):
        monkeypatch.setattr(optimizer_guard, "holds_whole_model", lambda trainer, whole=whole: whole)
        monkeypatch.setattr(optimizer_guard, "changes_weights_in_backward", lambda trainer, changes=changes: changes)
        memory, args = SimpleNamespace(oom_recovery=recovery), SimpleNamespace(n_gpu=devices)
        update = optimizer_guard.UpdateRecovery(SimpleNamespace(memory_args=memory, args=args), None)
        assert update._repeats is (recovery and devices == 1 and whole and not changes)
