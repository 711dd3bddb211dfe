"""MemoryTrainer around losses, models, hooks and callbacks of one's own: what an OOM at any stage leaves is what a run
without it would have left, or the run ends and says why. Without an OOM nothing differs, and nothing is called more
often."""

import logging

import pytest
import torch
from conftest import slow
from faults import Strikes, struck
from own_hooks import KNOWN
from own_losses import CASES, MEANS, Net
from transformers import Trainer, TrainingArguments, set_seed

from hf_memopt import MemoryArguments, MemoryTrainer, MemoryTrainerMixin, TrainingOutOfMemory

STAGES = ("forward", "loss", "backward", "clipping", "optimizer", "eval", "save")


def rows(count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "x": torch.randn(8, generator=generator).double(),
            "labels": torch.randint(0, 4, (), generator=generator),
            "weight": torch.tensor([1.0, 1.0, 1.0, 3.0])[torch.randint(0, 4, (), generator=generator)],
            "ids": torch.randint(1, 32, (6,), generator=generator),
        }
        for _ in range(count)
    ]


def collate(batch):
    names = [name for name in batch[0] if name != "ids"]
    return {name: torch.stack([row[name] for row in batch]) for name in names}


class Sums:
    """Metrics that are summed batch by batch (batch_eval_metrics)."""

    def __init__(self):
        self.samples, self.right = 0, 0

    def __call__(self, prediction, compute_result):
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        self.samples += len(logits)
        self.right += float(torch.as_tensor(logits).sum())
        if not compute_result:
            return {}
        result = {"samples": self.samples, "right": self.right}
        self.samples, self.right = 0, 0
        return result


class Result:
    """What a run left; `refused` is the message of one that ended."""

    def __init__(self, name, folder, base, strikes=None, **memory):
        set_seed(0)
        args = TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            optim="adamw_torch",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            batch_eval_metrics=True,
            save_steps=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        common = {"args": args, "train_dataset": rows(24), "eval_dataset": rows(10), "data_collator": collate}
        common["compute_metrics"] = Sums()
        if base is MemoryTrainer:
            common["memory_args"] = MemoryArguments(**memory)
        trainer = CASES[name](base, common)
        self.strikes = strikes or Strikes()
        trainer.compute_loss = self.strikes.during("loss", trainer.compute_loss)
        struck(trainer, self.strikes)
        self.refused = ""
        try:
            with self.strikes:
                trainer.train()
        except TrainingOutOfMemory as end:
            self.refused = str(end)
        self.state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        self.logs = [
            {key: value for key, value in entry.items() if key in ("loss", "eval_loss", "eval_samples", "eval_right")}
            for entry in trainer.state.log_history
        ]

    def differs(self, other: "Result") -> float:
        """The largest difference of a weight or buffer; of what is logged, where that is no rounding in float32."""
        differences = [float((self.state[name].double() - other.state[name]).abs().max()) for name in self.state]
        for mine, theirs in zip(self.logs, other.logs, strict=True):
            assert mine.keys() == theirs.keys()
            differences += [abs(mine[key] - theirs[key]) for key in mine if mine[key] != pytest.approx(theirs[key])]
        return max(differences)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """plain Trainer's result of a case; kept."""
    kept = {}

    def run(name):
        if name not in kept:
            kept[name] = Result(name, tmp_path_factory.mktemp("plain"), Trainer)
        return kept[name]

    return run


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def strike(plain: Result, stage: str) -> Strikes:
    """One failure in the second half of a stage."""
    return Strikes({stage: {1 + int(0.7 * plain.strikes.counts[stage])}})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", CASES)
def test_nothing_differs_without_an_oom_and_one_in_forward_is_recovered_or_refused(name, plain, tmp_path):
    wanted = plain(name)
    found = Result(name, tmp_path / "untouched", MemoryTrainer)
    assert (found.differs(wanted), found.refused) == (0, "")
    assert found.strikes.counts == wanted.strikes.counts, "nothing is computed more often"
    check(name, "forward", plain, tmp_path, {})


def check(name, stage, plain, tmp_path, memory) -> Result:
    wanted = plain(name)
    found = Result(name, tmp_path / stage, MemoryTrainer, strike(wanted, stage), **memory)
    assert found.strikes.hits
    if not found.refused:
        assert found.differs(wanted) < 1e-9, (name, stage, memory)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_oom_at_any_stage_is_recovered_or_refused(name, plain, tmp_path):
    for stage in STAGES[1:]:
        if plain(name).strikes.counts.get(stage):
            check(name, stage, plain, tmp_path, {})


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("reduction", ["sample_mean", slow("token_mean")])
# Not R-Drop: with dropout, chunks draw other masks than the whole.
@pytest.mark.parametrize("name", [name for name in CASES if name not in KNOWN | {"R-Drop"}])
def test_a_wrong_declaration_is_found_out(name, reduction, plain, tmp_path):
    for stage in ("forward", "backward"):
        check(name, stage, plain, tmp_path, {"loss_reduction": reduction})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MEANS)
def test_declared_means_are_split(name, plain, tmp_path):
    for stage in ("forward", "backward", "eval"):
        refusable = stage == "eval" and "prediction" in name
        found = check(name, stage, plain, tmp_path, {"loss_reduction": MEANS[name]})
        assert bool(found.refused) == refusable, found.refused


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_what_is_known_is_never_refused(name, plain, tmp_path):
    for stage in ("forward", "backward", "eval"):
        assert not check(name, stage, plain, tmp_path, {}).refused


@pytest.mark.parametrize("stage", ["eval", "clipping"])
def test_a_method_below_the_mixin_is_ones_own_too(stage, plain, tmp_path, monkeypatch):
    """`class T(MemoryTrainerMixin, Mine)`: the mixin's method comes first, and calls the other."""

    class Mine(Trainer):
        calls = 0

        def prediction_step(self, model, inputs, *args, **kwargs):
            self.calls += 1
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
            return loss * self.calls, logits, labels

        def _clip_grad_norm(self, model):
            self.calls += 1
            for weight in model.parameters():
                weight.grad.mul_(1 / self.calls)
            return super()._clip_grad_norm(model)

    both = type("Both", (MemoryTrainerMixin, Mine), {})
    monkeypatch.setitem(CASES, "mine", lambda base, common: (Mine if base is Trainer else both)(Net(), **common))
    found = check("mine", stage, plain, tmp_path, {"loss_reduction": "sample_mean"})
    assert found.refused


@pytest.mark.parametrize("name", ["cross entropy", "batch norm", "own training_step that counts"])
def test_a_refusal_names_what_to_do(name, plain, tmp_path):
    found = check(name, "forward", plain, tmp_path, {})
    declares = 'set loss_reduction="sample_mean" or "token_mean"'
    cannot = {"batch norm": "normalizes over the whole batch", "own training_step that counts": "own training_step"}
    assert cannot.get(name, declares) in found.refused


def test_a_loss_is_compared_on_the_batch_its_halves_and_smaller_starts():
    from hf_memopt.trainer.step.loss_rule import _groups

    assert _groups(2) == [(0, 1, 2)]
    assert _groups(3) == [(0, 1, 3), (1, 2, 3)]
    assert _groups(8) == [(0, 4, 8), (4, 6, 8), (0, 2, 4), (0, 1, 2)]
    assert _groups(5) == [(0, 2, 5), (2, 3, 5), (0, 1, 2)]
