"""MemoryTrainer on real runs that run out of memory at chosen allocations: what comes out is what would have."""

from types import SimpleNamespace

import pytest
import torch
from conftest import slow
from faults import Strikes, struck
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import DECLARED, MODELS, OOM, QUIET, MeanLoss, Rows, collate, llama, same, train
from transformers import Trainer

from hf_memopt import InputError, MemoryArguments, MemoryTrainerMixin, TrainingOutOfMemory
from hf_memopt.levers.arguments import THRESHOLDS
from hf_memopt.trainer.step.batch_limit import BatchLimit, Pressure
from hf_memopt.trainer.step.window import MicroBatch


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


ANYWHERE = [
    (model, accumulation) for model in ("mean loss", "LoRA", "loss of the whole window") for accumulation in (1, 4)
]


@pytest.mark.slow
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
        trainer._runner.begin_window = lambda: (begin(), setattr(trainer.limit, "elements", None), hit.counts.clear())

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


@pytest.mark.parametrize(
    ("resting", "near", "splits", "fewest", "halved", "restored"),
    [
        (200, 950, True, 1, True, False),
        (200, 950, False, 1, False, False),
        (200, 950, True, 4, False, False),
        (930, 950, True, 1, False, False),  # activations are too small for half of them to help
        (929, 950, True, 1, True, False),
        (200, 899, True, 1, False, False),
        (200, 500, True, 1, False, False),  # twice the activations would take the 800 that are aimed for
        (200, 499, True, 1, False, True),
    ],
)
def test_pressure_halves_the_batch_and_quiet_restores_it(resting, near, splits, fewest, halved, restored):
    """Bytes of 1000; a micro-batch of 8 samples, 4 at once, has 800 elements."""
    events = []
    monitor = SimpleNamespace(status=lambda share: "critical" if share >= 0.9 else "normal", target_utilization=0.8)
    callback = SimpleNamespace(monitor=monitor, growth=SimpleNamespace(capacity=1000), tokens=5)
    limit = BatchLimit(patience=1, min_samples=fewest)
    limit.elements = 400
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=4),
        get_tp_size=lambda: 2,
        _callback=callback,
        _runner=SimpleNamespace(limit=limit, splits=splits),
        _event=lambda name, **figures: events.append((name, figures)),
    )
    allocated = iter([resting, 100, near, 300])
    pressure = Pressure(trainer, SimpleNamespace(allocated=lambda: next(allocated)))
    pressure.after_window(SimpleNamespace(started=[]))
    pressure.note_activations()
    pressure.note_activations()
    rows = {"input_ids": torch.zeros(8, 100)}
    small, large = (SimpleNamespace(inputs=rows, samples=8, elements=elements, size=4) for elements in (80, 800))
    assert pressure.is_largest({"input_ids": [1, 1]}) is None
    pressure.after_window(SimpleNamespace(started=[small, large]))
    assert (callback.elements, callback.near_peak, callback.tokens) == (880, near, 5 + 2 * 2 * 800)
    assert [pressure.is_largest({"input_ids": [8, length]}) for length in (100, 101)] == [False, True]
    assert limit.elements == (200 if halved else None if restored else 400)
    before_and_after = [figures.get("micro_batch_after", figures.get("samples_at_once")) for _, figures in events]
    assert before_and_after == ([2] if halved else [8] if restored else [])


def test_the_chunks_of_a_micro_batch_that_starts_again():
    micro = MicroBatch({}, None, samples=7, elements=70, size=4, synced=True, number=0, versions=[])
    assert micro.next_chunk == (0, 4)
    micro.record_chunk(0, 4, 1.0)
    assert (micro.position, micro.next_chunk, micro.loss) == (4, (4, 7), 1.0)
    micro.shrink(2)
    assert micro.next_chunk == (4, 6)
    micro.record_chunk(4, 6, 0.5)
    micro.restart()
    assert (micro.position, micro.next_chunk, micro.loss) == (0, (0, 4), None)
    for chunk in ((0, 4), (4, 6), (6, 7)):
        assert micro.next_chunk == chunk
        micro.record_chunk(*chunk, 1.0)
    assert (micro.position, micro.loss, micro.chunk_sizes) == (7, 3.0, [4, 2, 1])


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


_BAD = [
    ({"memory_profile": "agressive"}, "Did you mean 'aggressive'"),
    ({"warning_threshold": 0.99}, "thresholds must rise"),
    ({"adjustment_frequency": 0}, "adjustment_frequency=0 must be above 0"),
    ({"min_batch_size": 4, "max_batch_size": 2}, "max_batch_size=2 is below min_batch_size=4"),
    ({"emergency_threshold": 1.01}, "thresholds must rise"),
    ({"target_memory_utilization": 0.0}, "rise and lie between 0 and 1: target_memory_utilization=0.0, warning_"),
    ({"checkpoint_ratio": 1.01}, r"checkpoint_ratio=1.01 must lie between 0 \(no layer\) and 1 \(all\)"),
    ({"checkpoint_ratio": -0.01}, "checkpoint_ratio=-0.01 must lie"),
    ({"snapshot_steps": "0-1"}, "snapshot_steps='0-1'"),
]


def test_bad_memory_arguments(subtests):
    for fields, message in _BAD:
        with subtests.test(fields=str(fields), message=str(message)), pytest.raises(InputError, match=message):
            MemoryArguments(**fields)


def test_memory_arguments_at_their_bounds():
    for fields in (
        dict.fromkeys(THRESHOLDS, 1.0),
        {"min_batch_size": 2, "max_batch_size": 2},
        {"checkpoint_ratio": 0.0},
        {"checkpoint_ratio": 1.0},
        {"snapshot_steps": "1-1"},
    ):
        MemoryArguments(**fields)
    assert MemoryArguments(max_memory_gib=1.5).max_memory_bytes == 3 * 2**29
    assert MemoryArguments(loss_chunk_size=64, warning_threshold=0.91).levers() == {"loss_chunk_size": 64}


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
    from hf_memopt.trainer.step.split import RowLayout

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


def test_random_numbers_are_of_the_device_that_was_in_use(monkeypatch):
    """A stand-in for CUDA: torch's current device belongs to a thread, and a new thread's is device 0."""
    import threading

    from hf_memopt.trainer.step import step_state

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
    monkeypatch.setattr(step_state, "_device_module", lambda: cuda)
    cuda.local.index = 1
    kept = step_state.RandomState.now()
    cuda.states[1] = torch.full((1,), 7.0)
    thread = threading.Thread(target=kept.restore)
    thread.start()
    thread.join()
    assert {index: float(state) for index, state in cuda.states.items()} == {0: 0.0, 1: 1.0}
