"""Losses and batches that other people write: a micro-batch in chunks gives the whole one's gradients, or is not
split."""

import contextlib
import itertools
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType
from conftest import slow
from faults import Strikes
from small_runs import OOM, MeanLoss, collate, llama, train
from torch.nn import functional
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlavaForConditionalGeneration,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_memopt import InputError, MemoryArguments, MemoryTrainer, MemoryTrainerMixin, TrainingOutOfMemory
from hf_memopt.trainer.data_loading import batch_order
from hf_memopt.trainer.step import recoverability, runner
from hf_memopt.trainer.step.known_code import _own_model
from hf_memopt.trainer.step.loss_rule import LossRule, find_rule, known_mean
from hf_memopt.trainer.step.recoverability import _why_not_repeated
from hf_memopt.trainer.step.runner import MicroBatch, StepRunner
from hf_memopt.trainer.step.split import KtoLayout, PairLayout, RowLayout, UnpaddedLayout
from hf_memopt.trainer.step.step_state import Buffers, StepState


def shifted_cross_entropy(outputs, labels, **kwargs):
    return functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], **kwargs)


class DocumentedLoss(Trainer):
    """compute_loss without super(), as the documentation of transformers has it: a mean over labels."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = shifted_cross_entropy(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class DocumentedSum(Trainer):
    """The same, divided by the items of the whole window."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = shifted_cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class MeanOverSamples(Trainer):
    """Every sample counts alike, however long it is."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = shifted_cross_entropy(outputs, labels, reduction="none").mean(dim=1)
        return (each.mean(), outputs) if return_outputs else each.mean()


def overriding(kind):
    """`class T(MemoryTrainer)` with the trainer's own compute_loss."""
    fields = {"compute_loss": kind.compute_loss, "loss_is_scaled_for_ga": kind.loss_is_scaled_for_ga}
    return type(f"Own{kind.__name__}", (MemoryTrainer,), fields)


ORDERS = {
    "subclass": overriding,
    "mixin first": lambda kind: type(f"Mixin{kind.__name__}", (MemoryTrainerMixin, kind), {}),
    "mixin last": lambda kind: type(f"Last{kind.__name__}", (kind, MemoryTrainer), {}),
}
DECLARED = {DocumentedLoss: "token_mean", DocumentedSum: "token_mean", MeanOverSamples: "sample_mean"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("kind", [DocumentedLoss, DocumentedSum, MeanOverSamples])
def test_a_loss_of_ones_own_in_chunks(kind, order, tmp_path):
    fields = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    wanted = train(tmp_path / "plain", kind=kind, **fields)
    hit = Strikes({"forward": {200}, "backward": {300}})
    memory = {"loss_reduction": DECLARED[kind]}
    found = train(tmp_path / "struck", hit, kind=ORDERS[order](kind), memory=memory, **fields)
    assert len(hit.hits) == 2 and len(found.events) == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)
    assert found.logs == pytest.approx(wanted.logs, abs=1e-9), "the logged loss is the whole batch's, too"


def mean_loss(outputs, labels, num_items_in_batch=None):
    return shifted_cross_entropy(outputs, labels)


def sum_loss(outputs, labels, num_items_in_batch=None):
    return shifted_cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize("function", [mean_loss, sum_loss])
def test_compute_loss_func_in_chunks(function, tmp_path):
    def prepare(trainer):
        trainer.compute_loss_func = function

    fields = {"max_steps": 3, "prepare": prepare}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)
    memory = {"loss_reduction": "token_mean"}
    found = train(tmp_path / "struck", Strikes({"forward": {200}, "backward": {300}}), memory=memory, **fields)
    assert len(found.events) == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_label_smoothing_in_chunks(tmp_path):
    fields = {"max_steps": 3, "label_smoothing_factor": 0.1}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)
    found = train(tmp_path / "struck", Strikes({"forward": {200}, "backward": {300}}), **fields)
    assert len(found.events) == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


# ---- what is not split


class Contrastive(Trainer):
    """Every sample against all others of the batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels")
        outputs = model(**inputs, output_hidden_states=True)
        means = functional.normalize(outputs.hidden_states[-1].mean(dim=1), dim=-1)
        loss = functional.cross_entropy(means @ means.T / 0.1, torch.arange(len(means)))
        return (loss, outputs) if return_outputs else loss


class ClassWeights(Trainer):
    """A mean weighted by class: neither over labels nor over samples."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = shifted_cross_entropy(outputs, labels, weight=torch.arange(1.0, 65.0).double())
        return (loss, outputs) if return_outputs else loss


class TwoBackwards(Trainer):
    """A training_step of one's own, which calls backward twice."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        for _ in range(2):
            loss = self.compute_loss(model, self._prepare_inputs(dict(inputs)), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss / 2)
        return loss.detach()


def _fails_at_step_two(trainer):
    forward = trainer.model.forward

    @wraps(forward)
    def too_much(*args, **kwargs):
        rows = kwargs["input_ids"].shape[0]
        if trainer.state.global_step == 2 and rows > 2 and trainer.model.training:
            raise torch.OutOfMemoryError(OOM)
        return forward(*args, **kwargs)

    trainer.model.forward = too_much


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "declared", "reason"),
    [
        (Contrastive, None, "MemoryContrastive has its own compute_loss: .* set loss_reduction"),
        slow(Contrastive, "sample_mean", "is not a mean over samples, as loss_reduction=sample_mean says"),
        (ClassWeights, "token_mean", "as loss_reduction=token_mean says"),
        slow(TwoBackwards, "token_mean", "MemoryTwoBackwards has its own training_step, which cannot run again"),
    ],
)
def test_what_does_not_add_up_is_not_split(kind, declared, reason, tmp_path, caplog):
    """Where memory runs out, the last good step is saved and resumed from."""
    memory_kind = type(f"Memory{kind.__name__}", (MemoryTrainerMixin, kind), {})
    memory = {"loss_reduction": declared}
    wanted = train(tmp_path / "plain", kind=kind, max_steps=4)
    with pytest.raises(TrainingOutOfMemory, match=reason) as end:
        train(tmp_path / "out", kind=memory_kind, max_steps=4, prepare=_fails_at_step_two, memory=memory)
    assert "micro-batches run whole" in caplog.text
    assert end.value.report["checkpoint"].endswith("checkpoint-2")
    found = train(tmp_path / "out", kind=memory_kind, max_steps=4, resume=True, memory=memory)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-12)


class WithBatchNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = llama(), torch.nn.BatchNorm1d(64).double()
        self.config = self.inner.config

    def forward(self, input_ids, attention_mask, labels):
        logits = self.norm(self.inner(input_ids=input_ids, attention_mask=attention_mask).logits.transpose(1, 2))
        return {"loss": functional.cross_entropy(logits, labels)}


@pytest.mark.slow
def test_batch_normalization_is_said_at_construction(tmp_path, caplog):
    with pytest.raises(TrainingOutOfMemory, match="norm normalizes over the whole batch"):
        train(tmp_path, Strikes({"forward": {300}}), model=WithBatchNorm)
    assert "micro-batches run whole: norm normalizes over the whole batch" in caplog.text


@pytest.mark.slow
def test_more_rows_than_samples_are_not_split(tmp_path):
    """A collator that puts two rows where one sample was: who knows which belong together."""

    def doubling(trainer):
        inner = trainer.data_collator
        trainer.data_collator = lambda rows: {name: torch.cat([x, x]) for name, x in inner(rows).items()}

    with pytest.raises(TrainingOutOfMemory, match=r"a batch of 4 samples has 8 rows: override split_batch\(\)"):
        train(tmp_path, prepare=lambda trainer: (doubling(trainer), _fails_at_step_two(trainer)))


class Lists(MemoryTrainer):
    """Batches that are lists of samples, as TRL's GRPO has them."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs):
        if isinstance(inputs, list):
            inputs = {name: torch.cat([row[name] for row in inputs]) for name in inputs[0]}
        return super()._prepare_inputs(inputs)


def test_batches_that_are_lists_train_and_are_not_split(tmp_path, caplog):
    def listing(trainer):
        inner = trainer.data_collator
        trainer.data_collator = lambda rows: [
            {name: x[at : at + 1] for name, x in batch.items()} for batch in [inner(rows)] for at in range(len(rows))
        ]

    wanted = train(tmp_path / "plain", kind=Trainer, max_steps=3, gradient_accumulation_steps=1)
    fields = {"max_steps": 3, "gradient_accumulation_steps": 1, "include_num_input_tokens_seen": "no"}
    found = train(tmp_path / "out", kind=Lists, prepare=listing, **fields)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)
    assert "Lists has its own training_step, which cannot run again" in caplog.text
    with pytest.raises(TrainingOutOfMemory, match="has its own training_step"):
        train(tmp_path / "struck", Strikes({"forward": {300}}), kind=Lists, prepare=listing, **fields)


@pytest.mark.parametrize("kind", [MemoryTrainer, type("Norm", (MemoryTrainer,), {})])
def test_max_batch_size_needs_what_can_be_split(kind, tmp_path):
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "memory": {"max_batch_size": 8}}
    with pytest.raises(InputError, match="max_batch_size=8 needs micro-batches that can be split"):
        train(tmp_path, kind=kind, **{**fields, "memory": {"max_batch_size": 8, "oom_recovery": False}})
    with pytest.raises(InputError, match="max_batch_size=8 needs micro-batches that can be split"):
        train(tmp_path, kind=kind, model=WithBatchNorm, **fields)


# ---- layouts


def _a_run_ends_where_others_wait_in_the_all_reduce(world_size, stage, synced, ends_at, splits, halved):
    class Ended(Exception):
        pass

    def end_run(*_):
        raise Ended

    limits = []
    args = SimpleNamespace(world_size=world_size, device=torch.device("cuda"))
    runner = SimpleNamespace(
        _trainer=SimpleNamespace(args=args, _ending=SimpleNamespace(end_run=end_run)),
        running=(SimpleNamespace(synced=synced, position=ends_at - 2, samples=4, elements=100), 2),
        stage=stage,
        splits=splits,
        limit=SimpleNamespace(halve=lambda *asked: limits.append(asked)),
    )
    error = torch.OutOfMemoryError("CUDA out of memory.")
    if halved == "recovers":
        assert StepRunner._check_recoverable(runner, error).smaller_batch_helps and not limits
        with pytest.raises(ValueError, match="no memory"):
            StepRunner._check_recoverable(runner, ValueError("of no memory"))
        return
    with pytest.raises(Ended):
        StepRunner._check_recoverable(runner, error)
    assert limits == ([halved] if halved else [])


def test_a_run_ends_where_others_wait_in_the_all_reduce(subtests):
    """Two of four samples, which have 100 elements, ran when memory did."""
    for world_size, stage, synced, ends_at, splits, halved in [
        (2, "backward", True, 4, True, (2, 50)),
        (2, "backward", True, 4, False, None),
        (1, "backward", True, 4, True, "recovers"),
        (2, "forward", True, 4, True, "recovers"),
        (2, "backward", False, 4, True, "recovers"),
        (2, "backward", True, 3, True, "recovers"),
    ]:
        with subtests.test(world_size=str(world_size), stage=str(stage)):
            _a_run_ends_where_others_wait_in_the_all_reduce(world_size, stage, synced, ends_at, splits, halved)


def test_three_samples_and_three_axes():
    """mRoPE's position_ids are (axes, samples, tokens): with three samples both first sizes are 3."""
    batch = {"input_ids": torch.arange(6).reshape(3, 2), "position_ids": torch.arange(18).reshape(3, 3, 2)}
    chunk = RowLayout().chunk(batch, 1, 2)
    assert torch.equal(chunk["position_ids"], batch["position_ids"][:, 1:2])


def test_a_value_that_is_not_by_sample_is_refused():
    for value in [[1, 2], torch.ones(5, 2)]:
        with pytest.raises(InputError, match="a batch of 3 samples cannot be split: images has"):
            RowLayout().chunk({"input_ids": torch.ones(3, 2), "images": value}, 0, 1)


def test_pairs_stay_together():
    batch = {"input_ids": torch.arange(8).reshape(8, 1), "margin": torch.arange(4.0)}
    layout = PairLayout()
    assert layout.count(batch) == 4
    chunk = layout.chunk(batch, 1, 3)
    assert chunk["input_ids"].flatten().tolist() == [1, 2, 5, 6] and chunk["margin"].tolist() == [1.0, 2.0]


def test_every_kto_chunk_has_the_whole_kl_batch():
    batch = {"input_ids": torch.ones(4, 2), "label": torch.ones(4), "KL_input_ids": torch.ones(4, 3)}
    chunk = KtoLayout().chunk(batch, 0, 1)
    assert chunk["input_ids"].shape == (1, 2) and chunk["KL_input_ids"].shape == (4, 3)


# ---- parts of a step


def _only_the_last_chunk_of_a_window_is_reduced(processes, synced, apart, monkeypatch):
    monkeypatch.setattr(StepState, "now", lambda trainer: None)
    passes, rows = [], {"x": torch.arange(6.0)}

    @contextlib.contextmanager
    def no_sync(model):
        passes.append(model)
        yield

    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=processes),
        accelerator=SimpleNamespace(no_sync=no_sync),
        split_batch=lambda inputs, start, stop: {"x": inputs["x"][start:stop]},
    )
    buffers = SimpleNamespace(changed_since=lambda state: "", note_changed=lambda state: "")
    rule = SimpleNamespace(weight=lambda *_: 0.5)
    runner = SimpleNamespace(_trainer=trainer, _rule=rule, own_loss=False, buffers=buffers, splits=True)
    runner._hooked_backward = contextlib.nullcontext
    micro = MicroBatch(rows, None, samples=6, elements=6, size=2, synced=synced, number=0, versions=[])
    loss = StepRunner._run(runner, lambda model, inputs, items: inputs["x"].sum(), "model", micro, synced)
    assert (float(loss), passes) == (7.5, ["model"] * apart)


def test_only_the_last_chunk_of_a_window_is_reduced(monkeypatch, subtests):
    for processes, synced, apart in [(1, True, 0), (2, True, 2), (2, False, 3)]:
        with subtests.test(processes=str(processes), synced=str(synced)):
            _only_the_last_chunk_of_a_window_is_reduced(processes, synced, apart, monkeypatch)


def _what_the_loss_of_a_class_is_a_mean_over(kind, smoothed, rule):
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(is_encoder_decoder=kind is T5ForConditionalGeneration)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    assert known_mean(SimpleNamespace(model=model, accelerator=accelerator, label_smoother=smoothed or None)) is rule


def test_what_the_loss_of_a_class_is_a_mean_over(subtests):
    for kind, smoothed, rule in [
        (LlamaForCausalLM, False, LossRule.LABELS),
        (LlamaForCausalLM, True, LossRule.LABELS),
        (LlamaForSequenceClassification, True, LossRule.UNSHIFTED),
        (LlavaForConditionalGeneration, False, LossRule.LABELS),
        (LlavaForConditionalGeneration, True, LossRule.UNSHIFTED),
        (T5ForConditionalGeneration, False, LossRule.UNSHIFTED),
        (LlamaModel, False, None),
    ]:
        with subtests.test(kind=str(kind), smoothed=str(smoothed)):
            _what_the_loss_of_a_class_is_a_mean_over(kind, smoothed, rule)


def test_modules_of_ones_own_are_named():
    class Mine(torch.nn.Linear):
        pass

    known = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert _own_model(known) == ""
    assert _own_model(torch.nn.Sequential(known, Mine(2, 2))) == "1 is your own Mine"
    assert _own_model(Mine(2, 2)) == "the model is your own Mine"
    known[1].forward = lambda x: x
    assert _own_model(known) == "1 has a forward of your own"


def test_weights_are_watched_where_a_step_of_ones_own_runs_again():
    trainer = SimpleNamespace(model=torch.nn.BatchNorm1d(2))
    made = {both: Buffers(trainer, *both) for both in itertools.product((True, False), repeat=2)}
    assert [len(one.written()) for one in made.values()] == [2, 0, 0, 0]
    assert [len(one.copies()) for one in made.values()] == [3, 0, 3, 0]


def test_normalization_over_the_batch_does_not_repeat():
    args = SimpleNamespace(n_gpu=1, optim="adamw_torch", world_size=1)
    memory = SimpleNamespace(oom_recovery=True, optimizer_in_backward=False)
    trainer = SimpleNamespace(args=args, memory_args=memory, is_distributed_loading_by_transformers=False)
    trainer.accelerator = SimpleNamespace(distributed_type=DistributedType.NO)
    for model, reason in (
        (None, ""),
        (torch.nn.Sequential(torch.nn.LayerNorm(2)), ""),
        (torch.nn.Sequential(torch.nn.BatchNorm1d(2)), "0 normalizes over the whole batch and counts every pass"),
    ):
        trainer.model = model
        assert _why_not_repeated(trainer, None) == reason


def _how_a_trainers_batches_hold_their_samples(name, padding_free, layout, monkeypatch):
    monkeypatch.setattr(recoverability, "trl_trainer", lambda trainer: name and type(name, (), {}))
    for reason in ("_why_not_repeated", "_why_not_split"):
        monkeypatch.setattr(recoverability, reason, lambda trainer, kind: "")
    monkeypatch.setattr(recoverability, "_why_no_step_repeats", lambda trainer: "")
    monkeypatch.setattr(recoverability, "_own_loss", lambda trainer: (True, ""))
    found = recoverability.assess_recoverability(SimpleNamespace(padding_free=padding_free))
    assert type(found.layout) is layout
    assert (found.repeats, found.splits, found.reason, found.own_loss) == (True, True, "", True)
    monkeypatch.setattr(recoverability, "_why_not_split", lambda trainer, kind: "one of a kind")
    found = recoverability.assess_recoverability(SimpleNamespace())
    assert (found.repeats, found.splits, found.reason) == (True, False, "one of a kind")
    monkeypatch.setattr(recoverability, "_why_no_step_repeats", lambda trainer: "no step")
    found = recoverability.assess_recoverability(SimpleNamespace())
    assert (found.repeats, found.splits, found.reason) == (False, False, "no step")


def test_how_a_trainers_batches_hold_their_samples(monkeypatch, subtests):
    for name, padding_free, layout in [
        ("SFTTrainer", False, RowLayout),
        ("SFTTrainer", True, UnpaddedLayout),
        ("DPOTrainer", False, PairLayout),
        ("DPOTrainer", True, PairLayout),
        ("AnotherTrainer", True, RowLayout),
        (None, True, RowLayout),
    ]:
        with subtests.test(name=name, padding_free=padding_free):
            _how_a_trainers_batches_hold_their_samples(name, padding_free, layout, monkeypatch)


def _why_a_micro_batch_does_not_run_again(stage, started, callback, written, says, monkeypatch):
    monkeypatch.setattr(runner, "assess_recoverability", lambda trainer: recoverability.Recoverability(RowLayout()))
    monkeypatch.setattr(runner, "own_substep_callback", lambda trainer: callback)
    made = SimpleNamespace(
        _trainer=None,
        stage=stage,
        window=SimpleNamespace(started=[None] * started),
        buffers=SimpleNamespace(written=lambda: (1,), changed_since=lambda state: ""),
        splits=True,
        _chunk_state=SimpleNamespace(written=(0,) if written else (1,)),
    )
    assert StepRunner._why_not_again(made) == says


def test_why_a_micro_batch_does_not_run_again(monkeypatch, subtests):
    for stage, started, callback, written, says in [
        ("forward", 2, "a callback", False, ""),
        ("backward", 1, "a callback", False, ""),
        ("backward", 2, "", False, ""),
        ("backward", 2, "a callback", False, "a callback, and a step that starts again would do without it"),
        ("backward", 1, "", True, "the loss changes weights or buffers before it fails"),
    ]:
        with subtests.test(stage=stage, started=started, callback=callback):
            _why_a_micro_batch_does_not_run_again(stage, started, callback, written, says, monkeypatch)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_an_epochs_order_is_read_without_drawing_it(generator):
    sampler = SeedableRandomSampler(range(10), generator=generator, data_seed=5)
    loader = torch.utils.data.DataLoader(range(10), sampler=sampler, batch_size=3)
    state = None if generator is None else generator.get_state()
    orders = {epoch: list(batch_order(loader, epoch)) for epoch in (0, 1)}
    assert orders[0] != orders[1] and sorted(itertools.chain(*orders[1])) == list(range(10))
    assert list(batch_order(loader, 0)) == orders[0]
    assert sampler.epoch == 0 and (generator is None or torch.equal(generator.get_state(), state))
    assert list(loader.batch_sampler) == orders[0]
    in_order = torch.utils.data.DataLoader(range(4), batch_size=3)
    assert list(batch_order(in_order, 1)) == [[0, 1, 2], [3]]
    assert batch_order(torch.utils.data.DataLoader(range(4), shuffle=True), 0) is None and batch_order([], 0) is None


class ShiftedMean(MeanLoss):
    """The same mean over the next tokens."""

    def forward(self, input_ids, attention_mask, labels):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        return {"loss": functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])}


def test_a_mean_over_labels_is_told_from_one_over_shifted_labels(tmp_path, subtests):
    """By samples of one length, too, whose halves weigh the same in both, and where the first label does not count."""
    rows = [{"input_ids": [5 + place, *range(3, 12)], "number": place} for place in range(4)]
    for kind, rule in ((MeanLoss, LossRule.UNSHIFTED), (ShiftedMean, LossRule.LABELS)):
        for first in ("counts", "does not"):
            with subtests.test(kind=kind.__name__, first=first):
                args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
                trainer = MemoryTrainer(kind(), args, memory_args=MemoryArguments(loss_reduction="token_mean"))
                inputs = collate(rows)
                if first == "does not":
                    inputs["labels"][:, 0] = -100
                assert find_rule(trainer, inputs, None) is rule


class LabelASample(MeanLoss):
    """A mean over samples that have a label each."""

    def forward(self, input_ids, attention_mask, labels):
        return {"loss": functional.cross_entropy(self.inner(input_ids=input_ids).logits[:, -1], labels)}


def test_one_label_a_sample_is_a_mean_over_labels(tmp_path):
    inputs = collate([{"input_ids": [5 + place, *range(3, 12)], "number": place} for place in range(4)])
    inputs["labels"] = torch.tensor([3, 4, 5, 6])
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = MemoryTrainer(LabelASample(), args, memory_args=MemoryArguments(loss_reduction="token_mean"))
    rule = find_rule(trainer, inputs, None)
    halves = {name: part[:2] for name, part in inputs.items()}
    assert rule in (LossRule.LABELS, LossRule.UNSHIFTED) and rule.weight(trainer, inputs, halves) == 0.5
