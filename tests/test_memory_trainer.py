"""MemoryTrainer on real runs that run out of memory at chosen allocations: what comes out is what would have."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import wraps

import numpy
import pytest
import torch
from conftest import slow
from faults import Strikes, struck
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_memopt import InputError, MemoryArguments, MemoryTrainer, MemoryTrainerMixin, TrainingOutOfMemory
from hf_memopt.program import run

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


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
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).to(dtype)


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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Plain Trainer's result for a model and fields, and how many allocations each phase made; kept."""
    kept = {}

    def run(name, **fields):
        key = (name, *sorted(fields.items()))
        if key not in kept:
            strikes = Strikes()
            done = train(tmp_path_factory.mktemp("plain"), strikes, Trainer, MODELS[name], **fields)
            kept[key] = done, strikes.counts
        return kept[key]

    return run


def same(found: Finished, wanted: Finished, tolerance: float = 1e-9) -> None:
    assert (found.step, found.rate, found.seen) == (wanted.step, wanted.rate, wanted.seen)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=tolerance)


ANYWHERE = [
    (model, accumulation) for model in ("mean loss", "LoRA", "loss of the whole window") for accumulation in (1, 4)
]


# Remainders: 40 samples in micro-batches of 4 are 10; windows of 4 leave 2, the third epoch is cut by max_steps.
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize(("model", "accumulation"), [ANYWHERE[0], *(slow(*case) for case in ANYWHERE[1:])])
def test_running_out_anywhere_changes_nothing(model, accumulation, data, uninterrupted, tmp_path_factory):
    fields = {"gradient_accumulation_steps": accumulation, "max_steps": 7, "eval_strategy": "steps", "eval_steps": 3}
    wanted, counts = uninterrupted(model, **fields)
    # Less than halvings of a micro-batch of 4 in one run of bad luck.
    strikes = data.draw(
        st.dictionaries(
            st.sampled_from(["forward", "backward", "clipping", "optimizer", "eval"]), st.floats(0, 1), min_size=1
        )
    )
    at = {phase: {1 + int(share * (counts[phase] - 1))} for phase, share in strikes.items()}
    hit = Strikes(at)
    found = train(tmp_path_factory.mktemp("struck"), hit, model=MODELS[model], memory=DECLARED.get(model), **fields)
    assert {phase for phase, _ in hit.hits} == set(at)
    # One while the rule of the loss is determined, by fewer samples then, is no event.
    assert 0 < len(found.events) <= len(hit.hits)
    same(found, wanted)


# SGD in fp32, since Adam amplifies rounding; Adam in float64.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "dtype", "optim", "phases", "tolerance"),
    [
        (1, torch.float32, "sgd", ("forward", "backward"), 1e-6),
        (4, torch.float64, "adamw_torch", ("forward", "backward", "optimizer"), 1e-9),
    ],
)
def test_every_step_may_run_out(accumulation, dtype, optim, phases, tolerance, tmp_path):
    """Twenty steps, something in each phase of each of them."""
    fields = {"max_steps": 20, "optim": optim, "gradient_accumulation_steps": accumulation}

    def model():
        return llama(dtype)

    wanted = train(tmp_path / "plain", kind=Trainer, model=model, **fields)
    hit = Strikes({phase: {90} for phase in phases} | {"optimizer": {5}})

    def every_step(trainer):
        """Windows begin whole, and allocations are counted anew."""
        begin = trainer._runner.begin_window
        trainer._runner.begin_window = lambda: (
            begin(),
            setattr(trainer.limit, "elements", None),
            hit.counts.clear(),
        )

    found = train(tmp_path / "struck", hit, model=model, prepare=every_step, **fields)
    assert {(event["step"], event["stage"]) for event in found.events} == {
        (step, stage) for step in range(20) for stage in phases
    }
    same(found, wanted, tolerance)


@pytest.mark.slow
def test_dropout_is_reproducible_from_the_seed(tmp_path):
    def dropping():
        return llama(dropout=0.3)

    results = [
        train(tmp_path / str(turn), Strikes({"forward": {500}, "backward": {900}}), model=dropping).weights
        for turn in range(2)
    ]
    assert torch.equal(*results)
    assert not torch.equal(results[0], train(tmp_path / "other", model=dropping, seed=7).weights)


@pytest.mark.slow
def test_a_window_starts_again_with_the_random_numbers_it_had(tmp_path):
    """With dropout, what ran before the failure comes out as it was: one sample at a time, only the failing one runs
    again, so that all is as if nothing had happened."""

    def dropping():
        return llama(dropout=0.3)

    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    wanted = train(tmp_path / "plain", kind=Trainer, model=dropping, **fields)
    found = train(tmp_path / "struck", Strikes({"backward": {1500}, "forward": {901}}), model=dropping, **fields)
    assert len(found.events) == 2
    same(found, wanted)


@pytest.mark.slow
def test_the_smaller_micro_batch_is_remembered_and_logged(tmp_path, caplog):
    found = train(tmp_path, Strikes({"backward": {30}}))
    (event,) = found.events
    assert (event["micro_batch_before"], event["micro_batch_after"], event["stage"]) == (4, 2, "backward")
    assert event["dataset_indices"] == found.seen[0], "the samples of the batch that did it"
    assert event["shapes"]["input_ids"][0] == 4
    assert "4 → 2 samples at once" in caplog.text and OOM[:30] in caplog.text


def test_chunk_size_by_size_and_growth():
    from hf_memopt.trainer.batch_limit import BatchLimit

    limit = BatchLimit(patience=3)
    assert limit.chunk_size(8, 800) == 8
    assert limit.halve(8, 800) == 4
    assert limit.chunk_size(8, 800) == 4
    assert limit.chunk_size(8, 400) == 8, "a batch of short samples stays whole"
    assert limit.chunk_size(8, 4000) == 1
    grown = [limit.count_quiet_step(True) for _ in range(6)]
    assert grown == [False] * 5 + [True], "one failure doubles the patience"
    assert limit.chunk_size(8, 800) == 8
    limit.halve(8, 800)
    assert not any(limit.count_quiet_step(True) for _ in range(11)), "another one doubles it again"
    assert limit.count_quiet_step(True)
    limit.halve(8, 800)
    assert not any(limit.count_quiet_step(False) for _ in range(1000)), "memory never stayed low"


def test_one_sample_that_does_not_fit_ends_the_run(tmp_path):
    """Diagnosis, checkpoint of the last good step, exit code 75; resuming gives the uninterrupted run."""
    fields = {"max_steps": 6, "per_device_train_batch_size": 2}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)

    def full(trainer):
        forward = trainer.model.forward

        @wraps(forward)
        def too_much(*args, **kwargs):
            if trainer.state.global_step == 3:
                raise torch.OutOfMemoryError(OOM)
            return forward(*args, **kwargs)

        trainer.model.forward = too_much

    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path / "out", prepare=full, **fields)
    assert end.value.exit_code == 75
    report = json.loads((tmp_path / "out" / "oom_report.json").read_text())
    assert (report["step"], report["stage"], report["kind"]) == (3, "forward", "device")
    assert report["held_bytes"]["optimizer_states"] == pytest.approx(2 * report["held_bytes"]["parameters"], rel=0.01)
    assert report["held_bytes"]["gradients"] == 0
    assert report["reason"].startswith("it fitted for 3 steps")
    assert len(report["next"]) >= 1 and all(change["change"] for change in report["next"])
    assert report["checkpoint"].endswith("checkpoint-3")
    found = train(tmp_path / "out", resume=True, **fields)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_an_optimizer_that_never_fits_leaves_the_last_good_step(tmp_path):
    def full(trainer):
        step = torch.optim.AdamW.step

        def too_much(optimizer, *args, **kwargs):
            if trainer.state.global_step == 2:
                raise torch.OutOfMemoryError(OOM)
            return step(optimizer, *args, **kwargs)

        create = trainer.create_optimizer

        def create_optimizer(*args, **kwargs):
            optimizer = create(*args, **kwargs)
            optimizer.step = too_much.__get__(optimizer)
            return optimizer

        trainer.create_optimizer = create_optimizer

    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path, prepare=full)
    assert end.value.report["stage"] == "optimizer"
    assert end.value.report["checkpoint"].endswith("checkpoint-2")


def test_other_errors_pass_through(tmp_path):
    def broken(trainer):
        trainer.model.forward = lambda **_: (_ for _ in ()).throw(ValueError("no such thing"))

    with pytest.raises(ValueError, match="no such thing"):
        train(tmp_path, prepare=broken)


def test_recovery_can_be_turned_off(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, Strikes({"forward": {50}}), memory={"oom_recovery": False})


def test_auto_find_batch_size_is_refused(tmp_path):
    with pytest.raises(InputError, match="auto_find_batch_size"):
        train(tmp_path, auto_find_batch_size=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_profile": "agressive"}, "Did you mean 'aggressive'"),
        ({"warning_threshold": 0.99}, "thresholds must rise"),
        ({"adjustment_frequency": 0}, "adjustment_frequency=0 must be above 0"),
        ({"min_batch_size": 4, "max_batch_size": 2}, "max_batch_size=2 is below min_batch_size=4"),
    ],
)
def test_bad_memory_arguments(fields, message):
    with pytest.raises(InputError, match=message):
        MemoryArguments(**fields)


# ---- subclasses


class WeightedLoss(Trainer):
    """A trainer of one's own: another loss, which ignores the number of items, and its own collator's field."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), shifted, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class MemoryWeightedLoss(MemoryTrainerMixin, WeightedLoss):
    pass


@pytest.mark.slow
def test_a_mixin_over_a_trainer_with_its_own_loss(tmp_path):
    plain = Strikes()
    wanted = train(tmp_path / "plain", plain, WeightedLoss)
    hit = Strikes({"forward": {plain.counts["forward"] // 3}, "backward": {plain.counts["backward"] // 2}})
    found = train(tmp_path / "struck", hit, MemoryWeightedLoss, memory={"loss_reduction": "token_mean"})
    assert len(hit.hits) == 2
    same(found, wanted)


@pytest.mark.slow
def test_a_piece_without_labels_adds_nothing(tmp_path):
    """Of a mean loss: a mean over nothing would be no number."""

    def half(trainer):
        inner = trainer.data_collator

        def silent(rows):
            batch = inner(rows)
            batch["labels"][len(rows) // 2 :] = -100
            return batch

        trainer.data_collator = silent

    wanted = train(tmp_path / "plain", kind=Trainer, model=MeanLoss, prepare=half)
    declared = DECLARED["mean loss"]
    found = train(tmp_path / "struck", Strikes({"forward": {20}}), model=MeanLoss, prepare=half, memory=declared)
    assert found.events and found.weights.isfinite().all()
    same(found, wanted)


@pytest.mark.slow
def test_a_mixin_over_seq2seq_trainer(tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    class MemorySeq2Seq(MemoryTrainerMixin, Seq2SeqTrainer):
        pass

    def run(folder, kind, strikes):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=64,
                d_model=16,
                d_ff=32,
                d_kv=4,
                num_layers=1,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ).double()
        args = Seq2SeqTrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            max_steps=4,
            optim="adamw_torch",
            remove_unused_columns=False,
            predict_with_generate=True,
            **QUIET,
        )
        trainer = struck(
            kind(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(8), data_collator=collate), strikes
        )
        with strikes:
            trainer.train()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()]), trainer

    plain = Strikes()
    wanted, _ = run(tmp_path / "plain", Seq2SeqTrainer, plain)
    hit = Strikes({"forward": {plain.counts["forward"] // 2}, "backward": {plain.counts["backward"] // 2}})
    found, trainer = run(tmp_path / "struck", MemorySeq2Seq, hit)
    assert len(trainer.memory_events) == 2
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9)
    assert "eval_loss" in trainer.evaluate(max_new_tokens=4)


@pytest.mark.slow
def test_a_batch_that_cannot_be_cut_says_why(tmp_path):
    def packed(trainer):
        trainer.split_batch = lambda inputs, start, stop: (
            (_ for _ in ()).throw(
                InputError("a batch of 4 samples cannot be split: pixel_values has the shape (9, 3)")
            )
            if (start, stop) != (0, 4)
            else dict(inputs)
        )

    with pytest.raises(TrainingOutOfMemory, match="pixel_values has the shape"):
        train(tmp_path, Strikes({"forward": set(range(50, 10**4))}), prepare=packed)


def test_cutting_a_batch():
    from hf_memopt.trainer.split import RowLayout

    batch = {
        "position_ids": torch.arange(24).reshape(3, 4, 2),
        "input_ids": torch.arange(8).reshape(4, 2),
        "bias": torch.ones(1, 2),
        "names": ["a", "b", "c", "d"],
        "scale": torch.tensor(2.0),
        "more": {"x": torch.ones(4)},
    }
    layout = RowLayout()
    assert layout.count(batch) == 4
    piece = layout.chunk(batch, 1, 3)
    assert piece["position_ids"].shape == (3, 2, 2) and piece["names"] == ["b", "c"]
    assert piece["input_ids"].tolist() == [[2, 3], [4, 5]] and piece["more"]["x"].shape == (2,)
    assert piece["bias"].shape == (1, 2) and piece["scale"].item() == 2.0
    with pytest.raises(InputError, match=r"pixel_values has the shape \(9, 3\)"):
        layout.chunk({**batch, "pixel_values": torch.ones(9, 3)}, 0, 2)


# ---- evaluation


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


@pytest.mark.parametrize(
    "take",
    [
        lambda logits: logits.argmax(-1),
        lambda logits: logits.argmax(axis=2),
        lambda logits: numpy.argmax(logits, axis=-1),
        lambda logits: logits[:, :-1].argmax(-1),
        lambda logits: logits[..., :-1, :].argmax(-1),
        lambda logits: logits[:, :-1, :].argmax(axis=-1),
        lambda logits: numpy.argmax(logits[2:, 1:][...], -1),
        lambda logits: numpy.array([*logits.shape, logits.ndim, len(logits), *logits[1:, :3].shape]),
        lambda logits: numpy.array([*numpy.shape(logits), numpy.ndim(logits)]),
    ],
)
def test_what_reduced_logits_answer_is_what_the_logits_would(take, tmp_path):
    seen = []

    def metric(prediction):
        seen.append(take(prediction.predictions))
        return {"samples": float(len(prediction.label_ids))}

    _evaluated(Trainer, tmp_path, metric)
    _evaluated(MemoryTrainer, tmp_path, metric, reduce_eval_logits=True)
    assert numpy.array_equal(*seen)


@pytest.mark.parametrize(
    "take",
    [
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
    ],
)
def test_whatever_else_is_asked_of_reduced_logits_is_refused(take, tmp_path):
    def metric(prediction):
        take(prediction.predictions)
        return {}

    with pytest.raises((TypeError, ValueError)):
        _evaluated(MemoryTrainer, tmp_path, metric, reduce_eval_logits=True)


def test_the_refusal_names_the_setting(tmp_path):
    with pytest.raises(TypeError, match="reduce_eval_logits=True kept only their argmax: leave it out"):
        _evaluated(MemoryTrainer, tmp_path, lambda prediction: prediction.predictions.mean(), reduce_eval_logits=True)


# ---- data


def _data_fails(trainer):
    collate = trainer.data_collator

    def fails(rows):
        if trainer.state.global_step == 3 and trainer.is_in_train:
            raise MemoryError("Unable to allocate 3.00 GiB for an array with shape (1,)")
        return collate(rows)

    trainer.data_collator = fails


class WorkerIsKilled(Rows):
    """The system kills the data loading worker that asks for a sample, as it does for host memory."""

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and index == 30:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def _worker_is_killed(trainer):
    trainer.train_dataset = WorkerIsKilled()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "fields", "cause"),
    [
        (_data_fails, {}, "host memory ran out"),
        (_worker_is_killed, {"dataloader_num_workers": 1}, "the system killed a data loading worker"),
    ],
)
def test_data_that_run_out_of_memory_end_the_run_with_a_report(prepare, fields, cause, tmp_path):
    wanted = train(tmp_path / "plain", kind=Trainer)
    with pytest.raises(TrainingOutOfMemory, match="out of memory in data of step"):
        train(tmp_path / "out", prepare=prepare, **fields)
    report = json.loads((tmp_path / "out" / "oom_report.json").read_text())
    assert report["stage"] == "data" and report["cause"].startswith(cause)
    assert report["checkpoint"] == str(tmp_path / "out" / f"checkpoint-{report['step']}")
    assert torch.allclose(train(tmp_path / "out", resume=True).weights, wanted.weights, rtol=0, atol=1e-9)


def test_a_lost_connection_to_a_killed_worker_is_its_death(monkeypatch):
    """The connection may break before the signal comes that torch names the worker by: here at its third question."""
    from torch.utils.data._utils import signal_handling

    from hf_memopt.trainer.ending import worker_death

    asked = []

    def ask():
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed.")

    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", ask)
    assert "killed by signal" in str(worker_death(ConnectionResetError(104, "Connection reset by peer")))
    assert len(asked) == 3
    unrelated = ValueError("a bug")
    assert worker_death(unrelated) is unrelated and len(asked) == 3


@pytest.mark.slow
def test_a_callback_that_runs_out_of_memory_ends_the_run_with_a_report(tmp_path):
    class Average(TrainerCallback):
        """An average of the weights, for which there is no room from the third step on."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise torch.OutOfMemoryError(OOM)

    with pytest.raises(TrainingOutOfMemory, match="out of memory in callbacks of step 4"):
        train(tmp_path, prepare=lambda trainer: trainer.add_callback(Average()))
    assert json.loads((tmp_path / "oom_report.json").read_text())["checkpoint"] == str(tmp_path / "checkpoint-3")


@pytest.mark.slow
def test_clipping_that_never_fits_ends_the_run(tmp_path):
    def fails(trainer):
        def always(*args, **kwargs):
            raise torch.OutOfMemoryError(OOM)

        trainer.accelerator.clip_grad_norm_ = always

    with pytest.raises(TrainingOutOfMemory, match="out of memory in clipping of step 1"):
        train(tmp_path, prepare=fails)


# ---- checkpoints


def _saves_fail(times: int):
    def prepare(trainer):
        save, left = trainer.save_model, [times]

        def failing(*args, **kwargs):
            save(*args, **kwargs)
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError(OOM)

        trainer.save_model = failing

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize(("times", "checkpoints"), [(1, [2, 4, 5]), slow(2, [4, 5])])
def test_a_save_that_fails_is_done_again_or_left_out(times, checkpoints, tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)
    found = train(tmp_path / "out", prepare=_saves_fail(times), **fields)
    same(found, wanted)
    assert [event["stage"] for event in found.events] == ["save"] * times
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == [f"checkpoint-{step}" for step in checkpoints]  # the Trainer saves the last step, whatever it is


@pytest.mark.slow
def test_saving_is_tried_after_the_first_step(tmp_path):
    """probe_save: a checkpoint although none is due; without room for it the run ends at once."""
    found = train(tmp_path / "out", memory={"probe_save": True}, max_steps=3)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not found.events

    def full(trainer):
        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device")

        trainer.save_model = fail

    with pytest.raises(InputError, match=r"probe_save: no checkpoint can be written to .* No space left on device"):
        train(tmp_path / "full", memory={"probe_save": True}, prepare=full, max_steps=3)
    with pytest.raises(InputError, match="probe_save: not enough memory to write a checkpoint"):
        train(tmp_path / "small", memory={"probe_save": True}, prepare=_saves_fail(2), max_steps=3)


@pytest.mark.slow
def test_best_and_rotation_work_as_in_the_trainer(tmp_path):
    fields = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 4,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    states = {}
    for name, kind in (("plain", Trainer), ("memory", MemoryTrainer)):
        train(tmp_path / name, kind=kind, **fields)
        kept = sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        state = json.loads((tmp_path / name / kept[-1] / "trainer_state.json").read_text())
        states[name] = kept, state["best_global_step"], os.path.basename(state["best_model_checkpoint"])
        assert os.path.isdir(state["best_model_checkpoint"])
    assert states["plain"] == states["memory"]


@pytest.mark.slow
def test_the_effective_batch_is_kept_under_another_world_size(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    state = tmp_path / "checkpoint-2" / "memory_state.json"
    before = json.loads(state.read_text())
    assert before["effective_batch_size"] == 8 and before["world_size"] == 1
    (tmp_path / "checkpoint-2" / "memory_manifest.json").unlink()  # which notices what is edited here
    # As if four processes with accumulation 1 had saved it: one process has to accumulate four times.
    state.write_text(json.dumps({**before, "effective_batch_size": 16, "world_size": 4}))
    found = train(tmp_path, resume=True, max_steps=4)
    (event,) = found.events
    assert event["gradient_accumulation_steps"] == 4
    state.write_text(json.dumps({**before, "effective_batch_size": 6, "world_size": 3}))
    with pytest.raises(InputError, match="effective batch size is 6"):
        train(tmp_path, resume=True, max_steps=4)


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from test_memory_trainer import train
def slowly(trainer):
    step = trainer.training_step
    def slow(*args, **kwargs):
        import time; time.sleep(0.05)
        return step(*args, **kwargs)
    trainer.training_step = slow
import os
from transformers.trainer_utils import get_last_checkpoint
folder = sys.argv[1]
resume = bool(os.path.isdir(folder) and get_last_checkpoint(folder))
done = train(folder, resume=resume, prepare=slowly, save_strategy="steps", save_steps=1, max_steps=12,
             logging_strategy="steps", logging_steps=1, save_total_limit=3)
import json
json.dump(done.logs, open(sys.argv[2], "w"))
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_loss_curve_goes_on(tmp_path):
    wanted = train(
        tmp_path / "plain",
        save_strategy="steps",
        save_steps=1,
        max_steps=12,
        logging_strategy="steps",
        logging_steps=1,
        save_total_limit=3,
    ).logs
    script = tmp_path / "script.py"
    here = os.path.dirname(__file__)
    script.write_text(SCRIPT.format(paths=[here]))
    moments = random.Random(5)
    kills = 0
    for _ in range(4):
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, script, tmp_path / "out", tmp_path / "losses"], stdout=log, stderr=log
            )
            while process.poll() is None and not list((tmp_path / "out").glob("checkpoint-*")):
                time.sleep(0.01)
            last = sorted((tmp_path / "out").glob("checkpoint-*"))
            end = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < end:
                if sorted((tmp_path / "out").glob("checkpoint-*")) != last:  # it trains: strike soon
                    time.sleep(moments.uniform(0, 0.4))
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.01)
            kills += process.wait() == -signal.SIGKILL
        if (tmp_path / "losses").exists():
            break
    else:
        assert (
            train(
                tmp_path / "out",
                resume=True,
                save_strategy="steps",
                save_steps=1,
                max_steps=12,
                logging_strategy="steps",
                logging_steps=1,
                save_total_limit=3,
            ).logs
            == wanted
        )
        return
    assert kills >= 1
    assert json.loads((tmp_path / "losses").read_text()) == wanted


# ---- endings


@pytest.mark.slow
def test_the_end_can_be_caught(tmp_path):
    """A sweep continues with its next trial; a program that run() starts ends with the code for relaunchers."""
    assert issubclass(TrainingOutOfMemory, Exception)
    with pytest.raises(SystemExit) as ended:
        run(lambda: train(tmp_path, Strikes({"forward": set(range(1, 10**4))})))
    assert ended.value.code == 75


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


def test_the_last_step_is_saved_before_it_is_explained(tmp_path, monkeypatch):
    """An explanation takes an estimate, which may take long or fail, while other processes wait."""
    from hf_memopt.trainer import ending

    def slow(*args):
        assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
        raise KeyError("explaining failed")

    monkeypatch.setattr(ending, "describe_failure", slow)
    with pytest.raises(KeyError, match="explaining failed"):
        train(tmp_path, prepare=lambda trainer: _fails_from_step(trainer, 2))


def _fails_from_step(trainer, step: int):
    forward = trainer.model.forward

    @wraps(forward)
    def too_much(*args, **kwargs):
        if trainer.state.global_step >= step:
            raise torch.OutOfMemoryError(OOM)
        return forward(*args, **kwargs)

    trainer.model.forward = too_much


@pytest.mark.slow
def test_the_checkpoint_of_an_older_run_is_not_called_this_ones(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    old = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"][0]["exp_avg"]
    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path, prepare=lambda trainer: _fails_from_step(trainer, 2), seed=3, learning_rate=0.5)
    assert end.value.report["checkpoint"].endswith("checkpoint-2")
    new = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"][0]["exp_avg"]
    assert not torch.equal(old, new)


def test_random_numbers_are_of_the_device_that_was_in_use(monkeypatch):
    """A stand-in for CUDA: torch's current device belongs to a thread, and a new thread's is device 0."""
    import threading

    from hf_memopt.trainer import random_state

    class Cuda:
        def __init__(self):
            self.states = {0: torch.zeros(1), 1: torch.ones(1)}
            self.local = threading.local()

        def current_device(self):
            return getattr(self.local, "index", 0)

        def get_rng_state(self, index):
            return self.states[index].clone()

        def set_rng_state(self, state, index):
            self.states[index] = state

    cuda = Cuda()
    monkeypatch.setattr(random_state, "_device_module", lambda: cuda)
    cuda.local.index = 1
    kept = random_state.RandomState.now()
    cuda.states[1] = torch.full((1,), 7.0)
    thread = threading.Thread(target=kept.restore)
    thread.start()
    thread.join()
    assert {index: float(state) for index, state in cuda.states.items()} == {0: 0.0, 1: 1.0}
