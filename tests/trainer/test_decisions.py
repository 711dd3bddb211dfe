"""What MemoryTrainer's parts decide, by tables: each border, with stand-ins for trainers, devices and processes."""

import itertools
import json
import os
import random
import signal
from types import SimpleNamespace

import numpy
import pytest
import torch
from transformers import TrainerState, TrainingArguments

from hf_memopt import InputError, MemoryArguments, MemoryTrainer
from hf_memopt.monitor.monitor import status_at
from hf_memopt.trainer import combination, evaluation, interrupt, oom_report, video_trainer
from hf_memopt.trainer.checkpoints import intact, resuming, saving
from hf_memopt.trainer.distributed import Peers
from hf_memopt.trainer.ending import Updates
from hf_memopt.trainer.evaluation import ArgmaxLogits, EvalRecovery
from hf_memopt.trainer.generation import GenerationRecovery
from hf_memopt.trainer.step import known_code, loss_rule, process_metrics, recoverability, runner, step_state
from hf_memopt.trainer.step.batch_limit import BatchLimit, Pressure
from hf_memopt.trainer.step.loss_rule import LossRule
from hf_memopt.trainer.step.window import MicroBatch, Window


def micro_batch(samples=8, size=8, elements=800, number=0, **inputs) -> MicroBatch:
    return MicroBatch(inputs, None, samples, elements, size, True, number, [])


class Ended(Exception):
    pass


def end_run(*details, **more):
    raise Ended(details, more)


# ---- memory between forward and backward


def test_when_micro_batches_shrink_and_grow_with_memory(monkeypatch):
    """Of a device of 1,000 bytes: (near, resting, samples, splits, fewest) -> the event, and the limit afterwards."""
    freed = []
    monkeypatch.setattr("hf_memopt.trainer.step.batch_limit.free_memory", lambda: freed.append(1))
    for (near, resting, samples, splits, fewest), (event, elements) in {
        (949, 100, 8, True, 1): (None, 400),
        (950, 100, 8, True, 1): ("micro_batch_lowered", 400),
        (970, 100, 8, True, 1): ("micro_batch_lowered", 400),
        (950, 100, 8, False, 1): (None, 400),
        (950, 930, 8, True, 1): (None, 400),
        (950, 929, 8, True, 1): ("micro_batch_lowered", 400),
        (950, 100, 4, True, 4): (None, 400),
        (957, 100, 5, True, 4): ("micro_batch_lowered", 400),
        (499, 100, 8, True, 1): ("micro_batch_restored", None),
        (500, 100, 8, True, 1): (None, 400),
        (300, 0, 8, True, 1): ("micro_batch_restored", None),
    }.items():
        events, limit = [], BatchLimit(1, fewest)
        limit.elements, limit._largest = 400, 800
        status = lambda share: status_at(share, 0.92, 0.95, 0.97)  # noqa: E731
        monitor = SimpleNamespace(status=status, target_utilization=0.9)
        callback = SimpleNamespace(monitor=monitor, growth=SimpleNamespace(capacity=1000), note="")
        trainer = SimpleNamespace(_callback=callback, _runner=SimpleNamespace(limit=limit, splits=splits))
        trainer._event = lambda name, events=events, **details: events.append((name, details))
        freed.clear()
        Pressure(trainer, None)._adjust_limit(near, resting, samples, micro_batch(samples=8, size=samples))
        assert [name for name, _ in events] == ([event] if event else []), (near, resting, samples, splits, fewest)
        assert len(freed) == (near >= 970)
        if event == "micro_batch_lowered":
            after = max(fewest, samples // 2)
            assert events[0][1] == {
                **{"status": "emergency" if near >= 970 else "critical", "utilization": near / 1000},
                **{"micro_batch_before": samples, "micro_batch_after": after},
            }
            assert limit.elements == 100 * after and callback.note == f"batch reduced to {after} samples at once"
        else:
            assert limit.elements == elements
        if event == "micro_batch_restored":
            assert events[0][1] == {"piece_elements": None, "samples_at_once": 8}
            assert callback.note == "batch restored to 8 samples at once"


def test_figures_of_a_window():
    """Two micro-batches on four processes, of which two hold the same tokens."""
    seen, read = [], [70, 50, 30]
    callback = SimpleNamespace(monitor="one", elements=0, near_peak=0, tokens=5)
    trainer = SimpleNamespace(_callback=callback, args=SimpleNamespace(world_size=4), get_tp_size=lambda: 2)
    pressure = Pressure(trainer, SimpleNamespace(allocated=lambda: read.pop(0)))
    pressure._adjust_limit = lambda *figures: seen.append(figures)
    assert pressure.is_largest({"x": [1]}) is None
    pressure.note_activations(), pressure.note_activations()
    tokens = torch.zeros(2, 3, dtype=torch.long)
    first, second = micro_batch(4, 2, 400, input_ids=tokens), micro_batch(3, 9, 330, input_ids=tokens[:1])
    pressure.after_window(Window(started=[first, second]))
    assert seen == [(70, 0, 3, second)] and (callback.elements, callback.near_peak, callback.tokens) == (730, 70, 23)
    assert (pressure._near_peak, pressure._resting) == (0, 30)
    assert pressure.is_largest({"x": [330]}) is False and pressure.is_largest({"x": [300], "y": [31]}) is True
    read[:] = [20, 10]
    pressure.after_window(Window())
    callback.monitor = None
    pressure.after_window(Window(started=[first]))
    assert pressure._resting == 10 and len(seen) == 1


def test_chunks_of_a_micro_batch():
    micro = micro_batch(samples=7, size=3)
    assert (micro.position, micro.next_chunk) == (0, (0, 3))
    micro.record_chunk(0, 3, 1.5)
    micro.record_chunk(3, 6, 2.5)
    assert (micro.position, micro.next_chunk, micro.loss, micro.chunk_sizes) == (6, (6, 7), 4.0, [3, 3])
    micro.restart()
    assert (micro.position, micro.next_chunk, micro.loss) == (0, (0, 3), None)
    micro.record_chunk(0, 3, 1.0)
    micro.shrink(2)
    assert (micro.chunk_sizes, micro.next_chunk) == ([3], (3, 5))
    micro.record_chunk(3, 5, 1.0)
    assert (micro.done, micro.loss, micro.next_chunk) == (2, 2.0, (5, 7))


# ---- a step that fails


def test_how_many_samples_run_after_a_failure():
    """(samples, splits, fewest, splitting, tried before) -> the next chunk; None where the run ends."""
    for (samples, splits, fewest, splitting, before), smaller in {
        (8, True, 1, "", False): 4,
        (1, True, 1, "", False): 1,
        (1, True, 1, "", True): None,
        (2, True, 1, "", True): 1,
        (4, True, 4, "", False): 4,
        (5, True, 4, "", False): 4,
        (8, False, 1, "", False): 8,
        (8, False, 1, "", True): None,
        (8, True, 1, "no row a sample", False): 8,
        (8, True, 1, "no row a sample", True): None,
    }.items():

        def split(inputs, start, stop, splitting=splitting):
            assert (start, stop) == (0, 1)
            if splitting:
                raise InputError(splitting)

        refused, micro = [], micro_batch()
        micro.retried_whole = before
        trainer = SimpleNamespace(split_batch=split, _ending=SimpleNamespace(end_run=end_run))
        own = SimpleNamespace(splits=splits, limit=BatchLimit(1, fewest), _trainer=trainer, refuse=refused.append)
        own.stage, own._recoverability = "backward", SimpleNamespace(reason="it is whole")
        if smaller is None:
            with pytest.raises(Ended) as end:
                runner.StepRunner._smaller(own, micro, samples, "diagnosis")
            reason = splitting or ("it is whole" if samples > 1 else "")
            assert end.value.args[0] == ("backward", "diagnosis", micro, reason)
            continue
        assert runner.StepRunner._smaller(own, micro, samples, "diagnosis") == smaller
        assert refused == ([splitting] if splitting else [])
        halved = splits and samples > fewest and not splitting
        assert own.limit.elements == (100 * smaller if halved else None)
        assert micro.retried_whole is (before or not halved)


def test_what_is_a_failure_of_a_chunk_alone():
    """(samples that ran, a rule, processes, of memory) -> whether the micro-batch runs whole instead."""
    for samples, rule, processes, error, whole in (
        (4, "a rule", 1, ValueError("odd"), True),
        (8, "a rule", 1, ValueError("odd"), False),
        (4, None, 1, ValueError("odd"), False),
        (4, "a rule", 2, ValueError("odd"), False),
        (4, "a rule", 1, torch.OutOfMemoryError("CUDA out of memory."), False),
        (4, "a rule", 1, InputError("no rows"), True),
    ):
        refused, micro = [], micro_batch()
        micro.record_chunk(0, 4, 1.0)
        own = SimpleNamespace(running=(micro, samples), _rule=rule, recovers="as before")
        own._trainer = SimpleNamespace(args=SimpleNamespace(world_size=processes))
        own.refuse = lambda *why, refused=refused: refused.append(why)
        assert runner.StepRunner._splitting_failed(own, error) is whole
        says = str(error) if isinstance(error, InputError) else f"a chunk of it fails (ValueError: {error})"
        assert refused == [(says, "as before")] * whole
        assert (micro.done, micro.size, micro.chunk_sizes) == ((0, 8, []) if whole else (1, 8, [4]))


def test_states_of_the_last_two_steps_are_kept(monkeypatch):
    monkeypatch.setattr(step_state.StepState, "now", lambda trainer: f"state {trainer.state.global_step}")
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0))
    own = SimpleNamespace(_trainer=trainer, resume_states={})
    for step, ahead, kept in (
        (0, 0, [0]),
        (1, 0, [0, 1]),
        (2, 0, [1, 2]),
        (2, 1, [2, 3]),
        (4, 0, [3, 4]),
        (9, 0, [9]),
    ):
        trainer.state.global_step = step
        assert runner.StepRunner.remember_state(own, ahead) == f"state {step}"
        assert sorted(own.resume_states) == kept


def test_a_micro_batch_as_it_starts():
    """Rows beyond those that were fetched are not split; where batches are by tokens, nobody knows how many."""
    for fetched, batches, splits, size, refused in (
        (8, None, True, 4, 0),
        (7, None, True, 8, 1),
        (7, SimpleNamespace(), True, 4, 0),
        (9, SimpleNamespace(batch_size=7), True, 8, 1),
        (7, SimpleNamespace(batch_size=8), True, 4, 0),
        (7, None, False, 8, 0),
    ):
        limit, reasons = BatchLimit(1), []
        limit.elements = 4
        loader = SimpleNamespace() if batches is None else SimpleNamespace(batch_sampler=batches)
        gradients = SimpleNamespace(gradient_state=SimpleNamespace(sync_gradients=1))
        own = SimpleNamespace(window=Window(started=["one"]), recovers=True, splits=splits, limit=limit)
        own._trainer = SimpleNamespace(memory_args=SimpleNamespace(oom_recovery=False), _train_loader=loader)
        own._trainer.args, own._trainer.accelerator = SimpleNamespace(train_batch_size=fetched), gradients
        own._trainer.count_samples = len

        def refuse(reason, own=own, reasons=reasons):
            reasons.append(reason)
            own.splits = False

        own.refuse = refuse
        micro = runner.StepRunner._start(own, {number: torch.zeros(1) for number in range(8)}, None)
        assert (micro.size, len(reasons), micro.number, micro.synced, micro.samples) == (size, refused, 1, True, 8)
        assert micro.elements == 8 and own.window.started[-1] is micro and own.window.state is None


def test_why_a_step_does_not_repeat_or_split(monkeypatch):
    monkeypatch.setattr(recoverability, "holds_whole_model", lambda trainer: not trainer.sharded)
    kinds = {name: type(name, (), {}) for name in ("SFTTrainer", "KTOTrainer", "GRPOTrainer", "DPOTrainer")}

    def reason(kind=None, sharded=False, **more):
        args = {"n_gpu": 1, "optim": SimpleNamespace(value="adamw_torch"), "world_size": 1}
        args |= {"activation_offloading": False, **more}
        memory = {"oom_recovery": True, "optimizer_in_backward": False}
        memory |= {name: args.pop(name) for name in [*memory] if name in args}
        trainer = SimpleNamespace(args=SimpleNamespace(**args))
        trainer.memory_args, trainer.sharded, trainer.model = SimpleNamespace(**memory), sharded, None
        trainer.accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="FSDP"))
        return recoverability._why_not_repeated(trainer, kinds.get(kind))

    for about, says in (
        ({}, ""),
        ({"n_gpu": 2}, "DataParallel cannot repeat a step"),
        ({"oom_recovery": False}, "oom_recovery is off"),
        ({"sharded": True}, "FSDP cannot repeat a step"),
        ({"optimizer_in_backward": True}, "optimizer_in_backward cannot repeat a step"),
        ({"optim": SimpleNamespace(value="lomo")}, "lomo cannot repeat a step"),
        ({"world_size": 2}, ""),
        ({"kind": "GRPOTrainer"}, "GRPOTrainer generates, keeps state"),
        ({"kind": "KTOTrainer"}, ""),
        ({"kind": "KTOTrainer", "world_size": 2}, "the loss of KTOTrainer gathers over processes"),
        ({"kind": "SFTTrainer", "world_size": 2}, ""),
        ({"kind": "SFTTrainer", "activation_offloading": True}, "activation_offloading of TRL keeps"),
        ({"activation_offloading": True}, ""),
    ):
        assert reason(**about).startswith(says) and bool(reason(**about)) is bool(says), about

    def not_split(kind=None, config=None, **more):
        trainer = SimpleNamespace(model=SimpleNamespace(config=config), **more)
        return recoverability._why_not_split(trainer, kinds.get(kind))

    def router(logits=True, coefficient=0.1):
        return SimpleNamespace(output_router_logits=logits, router_aux_loss_coef=coefficient)

    text, balances = router(), "the router's auxiliary loss is a mean"
    for about, says in (
        ({}, ""),
        ({"config": router()}, balances),
        ({"config": router(False)}, ""),
        ({"config": router(True, 0)}, ""),
        ({"config": SimpleNamespace(get_text_config=lambda: text, output_router_logits=False)}, balances),
        ({"kind": "SFTTrainer", "aux_loss_enabled": True}, balances),
        ({"aux_loss_enabled": True}, ""),
        ({"kind": "DPOTrainer", "loss_types": ["sigmoid", "sft", "aot"]}, "loss_type=aot compares"),
        ({"kind": "DPOTrainer", "loss_types": ["sigmoid"]}, ""),
        ({"loss_types": ["sft"]}, ""),
    ):
        assert not_split(**about).startswith(says) and bool(not_split(**about)) is bool(says), about


# ---- losses


def test_groups_of_samples_that_are_compared():
    for samples, groups in {
        1: [],
        2: [(0, 1, 2)],
        3: [(0, 1, 3), (1, 2, 3)],
        4: [(0, 2, 4), (2, 3, 4), (0, 1, 2)],
        9: [(0, 4, 9), (4, 6, 9), (0, 2, 4), (0, 1, 2)],
    }.items():
        assert loss_rule._groups(samples) == groups


def test_losses_that_a_forward_names():
    def forward(self, loss_function, out):
        self.CrossEntropyLoss, self.cross_entropy, self.router_loss_coef, self.loss_coefficient, self.x = range(5)
        return self.aux_Loss(loss_function) + self.cross_entropy_of + self.loss_coefficients

    named = loss_rule._losses_named(forward)
    assert named == {"CrossEntropyLoss", "cross_entropy", "aux_Loss", "loss_coefficients"}


def test_whether_a_known_loss_takes_the_number_of_items(monkeypatch):
    class Calls(torch.nn.Module):
        def forward(self):
            return self.loss_function(1)

    class Computes(torch.nn.Module):
        def forward(self):
            return torch.nn.CrossEntropyLoss()

    class Fused(Computes):
        def forward(self):
            return 1

    Fused.forward.__module__ = "liger_kernel.transformers.model.llama"
    for kind, trl, smoother, takes in (
        (Calls, None, None, True),
        (Computes, None, None, False),
        (Computes, "SFTTrainer", None, True),
        (Computes, None, object(), True),
        (Fused, None, None, True),
    ):
        monkeypatch.setattr(loss_rule, "trl_trainer", lambda trainer, trl=trl: trl)
        trainer = SimpleNamespace(model=kind(), label_smoother=smoother)
        trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        assert loss_rule._takes_items(trainer) is takes


def measure(losses=(), labels=None, tolerance=1e-3):
    """A measure that is given its losses, by the samples that they are of."""
    self = loss_rule._Measure.__new__(loss_rule._Measure)
    self._inputs = {"labels": torch.tensor([[5, 6], [7, -100], [1, 2], [3, 4]]) if labels is None else labels}
    split = lambda inputs, start, stop: {name: part[start:stop] for name, part in inputs.items()}  # noqa: E731
    self._trainer = SimpleNamespace(split_batch=split, count_samples=lambda inputs: len(inputs["labels"]))
    self._tolerance, self._loss = tolerance, lambda *part: losses[part]
    return self


def test_a_loss_is_the_weighted_sum_of_its_halves():
    group, nan = (0, 1, 4), float("nan")
    for rule, together, halves, holds in (
        (LossRule.SAMPLES, 4.0, (1.0, 5.0), True),
        (LossRule.UNSHIFTED, (2 + 5 * 5) / 7, (1.0, 5.0), True),
        (LossRule.LABELS, (1 + 2 * 5) / 3, (1.0, 5.0), True),
        (LossRule.SUM, 6.0, (1.0, 5.0), True),
        (LossRule.SAMPLES, 4.0049, (1.0, 5.0), True),
        (LossRule.SAMPLES, 4.0051, (1.0, 5.0), False),
        (LossRule.SAMPLES, 3.9949, (1.0, 5.0), False),
        (LossRule.SUM, nan, (1.0, 5.0), False),
        (LossRule.SUM, 0.0, (0.0, 0.0), True),
    ):
        assert measure().holds(rule, (group, [together, *halves])) is holds, (rule, together)
    silent = measure(labels=torch.tensor([[1, -100], [1, 2]]))
    assert silent.holds(LossRule.LABELS, ((0, 1, 2), [5.0, nan, 5.0])), "a half of weight 0 is left out"
    losses = {(0, 4): 4.0, (0, 2): 1.0, (2, 4): 7.0}
    assert measure(losses).compare((0, 2, 4)) == ((0, 2, 4), [4.0, 1.0, 7.0])
    for odd in (nan, float("inf")):
        assert measure({**losses, (0, 4): odd}).compare((0, 2, 4)) is None


def test_whether_a_loss_reads_the_first_labels():
    group = (0, 1, 2)
    for labels, reads, changes in (
        ([[-100, 5], [3, 4]], lambda part: float((part["labels"][:, 0] == 5).sum()), True),
        ([[1, 5], [3, 4]], lambda part: 2.0, False),
        ([[1, 5], [3, 4]], lambda part: float("nan") if (part["labels"][:, 0] == -100).all() else 1.0, True),
        ([[1, 5], [3, 4]], lambda part: 1.0 + 5e-8 * float(part["labels"][0, 0] == 1), False),
        ([[1, 5], [3, 4]], lambda part: 1.0 + 5e-7 * float(part["labels"][0, 0] == 1), True),
    ):
        own = measure(labels=torch.tensor(labels))
        own._loss_of = reads
        assert own.reads_first_label(group) is changes
        assert own._inputs["labels"].tolist() == labels, "the batch itself stays"


def test_dropout_is_off_and_training_on():
    ones = torch.ones(1, 1, 2, 4)
    with loss_rule._NoDropout():
        for name in ("dropout", "alpha_dropout", "dropout2d"):
            assert torch.equal(getattr(torch.nn.functional, name)(ones, 0.9, training=True), ones)
        dropped = torch.nn.functional.dropout(input=ones, p=0.9)
        attend = torch.nn.functional.scaled_dot_product_attention
        plain = attend(ones, ones, ones)
        assert torch.equal(dropped, ones) and torch.equal(attend(ones, ones, ones, None, 0.9), plain)
        assert torch.equal(attend(ones, ones, ones, dropout_p=0.9), plain)
        assert attend(ones, ones, ones, None, 0.9, True).shape == plain.shape


# ---- code of one's own


def mine(*_, **__):
    """A function of a user's: this module is no library."""


def test_hooks_and_functions_of_ones_own():
    class Mine:
        def __call__(self):
            pass

    known = torch.nn.functional.relu
    assert [known_code.is_known(one) for one in (torch.nn.Linear, known, mine, Mine(), Mine, int)] == [
        *(True, True, False, False, False, False),
    ]
    import functools

    assert known_code.is_known(functools.partial(functools.partial(known), 1))
    assert not known_code.is_known(functools.partial(mine))
    holder = {"a": {1: known}, "b": {1: known, 2: mine}, "c": {1: Mine()}, "d": None}
    for names, hook in ((("a",), ""), (("a", "b"), "mine"), (("c",), Mine.__qualname__), (("d", "e"), "")):
        assert known_code._own_hook(holder, names) == hook
    for function, says in (
        (None, ""),
        (known, ""),
        (mine, "compute_loss_func is your own (mine)"),
        (Mine(), "compute_loss_func is your own (Mine)"),
        ("text", ""),
    ):
        own = TrainerOfOnes()
        own.compute_loss_func = function
        assert known_code.overridden_loss(own) == says
    for change, says in (
        (lambda weight: weight.register_hook(mine), "weight has a gradient hook of your own (mine)"),
        (lambda weight: weight.register_post_accumulate_grad_hook(mine), "weight has a gradient hook of your own"),
        (lambda weight: weight.register_hook(known), ""),
        (lambda weight: None, ""),
    ):
        own = TrainerOfOnes()
        own.model = torch.nn.Linear(2, 2)
        change(own.model.weight)
        assert known_code._own_backward(own).startswith(says) and bool(known_code._own_backward(own)) is bool(says)
    own.model.register_full_backward_hook(mine)
    assert known_code._own_backward(own) == "the model has a backward hook of your own (mine)"
    own.accelerator.backward = mine
    assert known_code._own_backward(own) == "accelerator.backward is your own"
    for name, at in (("on_substep_end", True), ("on_step_end", False)):
        callback = type("Own", (interrupt.TrainerCallback,), {name: mine})()
        handler = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[interrupt.TrainerCallback(), callback]))
        assert bool(known_code.own_substep_callback(handler)) is at


class TrainerOfOnes:
    """As a library's: nothing of it counts as a user's."""

    compute_loss_func = model = None

    def __init__(self):
        self.accelerator = SimpleNamespace(backward=torch.nn.functional.relu)


TrainerOfOnes.__module__ = "transformers.trainer"
TrainerOfOnes.__init__.__module__ = "transformers.trainer"


def test_attributes_that_a_loss_of_ones_own_keeps():
    own = TrainerOfOnes()
    own.count, own.mean, own.flag, own.text, own.seen = 3, 0.5, True, "a", [1, {"b": 2}]
    assert step_state.numbers(own) == {"count": 3, "mean": 0.5, "flag": True}
    before = step_state.fingerprint(own)
    assert before.keys() == {"text", "seen"}
    for change in (lambda: own.seen.append(1), lambda: own.seen[1].update(b=3), lambda: setattr(own, "text", "b")):
        change()
        after = step_state.fingerprint(own)
        assert after != before
        before = after
    value, deep = torch.ones(3), [[[["x"]]]]
    printed = step_state._print(value, 0)
    assert printed[1:] == (0, 3.0) and step_state._print(value.mul_(2), 0)[1:] == (1, 6.0)
    assert step_state._print(torch.ones(2, dtype=torch.complex64), 1)[2] == step_state._print(torch.ones(0), 1)[2] == 0
    assert step_state._print(numpy.float32(2), 1) == 2 and step_state._print(numpy.ones(1), 1) == (
        (1,),
        b"\0" * 6 + b"\xf0?",
    )
    assert step_state._print(deep, 4) == [[[["x"]]]] and step_state._print(deep, 3) == [[[id(deep[0][0][0])]]]
    shallow = step_state._print(deep, 2)
    deep[0][0][0].append("y")
    assert step_state._print(deep, 2) == shallow and step_state._print(deep, 4) == [[[["x", "y"]]]]
    kept = {"loss": [1, 2], "inner": {"a": [3]}}
    copied = step_state._copied(kept)
    kept["loss"].append(9), kept["inner"]["a"].append(9)
    assert copied == {"loss": [1, 2], "inner": {"a": [3]}}


def test_random_states_and_their_device(monkeypatch):
    for cuda, initialized, xpu, mps, module in (
        (True, True, True, True, torch.cuda),
        (True, False, False, False, None),
        (False, True, False, False, None),
        (False, False, True, True, torch.xpu),
        (True, False, False, True, torch.mps),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda initialized=initialized: initialized)
        monkeypatch.setattr(torch.xpu, "is_available", lambda xpu=xpu: xpu)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert step_state._device_module() is module
    asked = []
    device = SimpleNamespace(get_rng_state=lambda *index: ("state", *index))
    device.set_rng_state = lambda *given: asked.append(given)
    monkeypatch.setattr(step_state, "_device_module", lambda: device)
    states = [step_state.RandomState.now()]
    drawn = random.random(), numpy.random.rand(), float(torch.rand(1))
    device.current_device = lambda: 3
    states.append(step_state.RandomState.now())
    assert [(state.device, state.index) for state in states] == [(("state",), None), (("state", 3), 3)]
    for state in states:
        state.restore()
    assert asked == [(("state",),), (("state", 3), 3)]
    states[0].restore()
    assert (random.random(), numpy.random.rand(), float(torch.rand(1))) == drawn


def test_buffers_that_a_pass_changes():
    """(own, copied) -> what is said of a changed buffer before and after the first pass."""
    for own, copied in itertools.product((True, False), repeat=2):
        model = torch.nn.Module()
        model.register_buffer("seen", torch.zeros(2))
        model.register_buffer("inv_freq", torch.zeros(2))
        buffers = step_state.Buffers(SimpleNamespace(model=model), own, copied)
        state = SimpleNamespace(buffers=buffers.copies(), written=buffers.written())
        assert state.buffers.keys() == ({"seen"} if copied else set())
        model.inv_freq.add_(1)
        assert buffers.changed_since(state) == ""
        model.seen.add_(1)
        assert buffers.changed_since(state) == ("seen" if copied else "")
        assert buffers.note_changed(state) == ("seen" if copied and not own else "")
        buffers.restore(state.buffers)
        assert model.seen.tolist() == ([0, 0] if copied else [1, 1]) and model.inv_freq.tolist() == [1, 1]
        fresh = SimpleNamespace(buffers=buffers.copies(), written=())
        assert buffers.changed_since(fresh) == ("seen" if copied and not own else ""), "known from then on"
        assert buffers.note_changed(fresh) == ""
    quiet = step_state.Buffers(SimpleNamespace(model=model), False, True)
    assert quiet.note_changed(SimpleNamespace(buffers=quiet.copies(), written=())) == ""
    model.seen.add_(1)
    assert quiet.changed_since(SimpleNamespace(buffers={}, written=())) == "" and quiet.copies() == {}


# ---- evaluation


def test_logits_of_which_the_argmax_was_kept():
    logits = ArgmaxLogits(numpy.array([[3, -100, 5], [1, 2, 0]]), 7)
    assert logits.shape == (2, 3, 7) and len(logits) == 2
    for index, shape in (
        (slice(1), (1, 3, 7)),
        ((slice(None), slice(1, None)), (2, 2, 7)),
        ((slice(None), slice(2), slice(None)), (2, 2, 7)),
        (Ellipsis, (2, 3, 7)),
        ((Ellipsis, slice(2), slice(None)), (2, 2, 7)),
        ((slice(1), Ellipsis, slice(None)), (1, 3, 7)),
        ((slice(1), slice(1), slice(None), Ellipsis), (1, 1, 7)),
    ):
        assert logits[index].shape == shape, index
    assert logits.argmax(-1).tolist() == logits.argmax(2).tolist() == [[3, 0, 5], [1, 2, 0]]
    for index in (0, (slice(None), 0), (slice(None), slice(None), slice(3))):
        with pytest.raises(TypeError, match="reduce_eval_logits=True kept only their argmax"):
            logits[index]
    for index in ((slice(None),) * 4, (Ellipsis, Ellipsis)):
        with pytest.raises(IndexError, match="the logits have 3 dimensions"):
            logits[index]
    for asked in ({"axis": 1}, {"axis": -1, "out": 3}, {"axis": -1, "keepdims": True}, {}):
        with pytest.raises(TypeError, match="an argmax over another axis"):
            logits.argmax(**asked)
    assert numpy.ndim(logits) == 3 and numpy.shape(logits) == (2, 3, 7)


def test_how_an_evaluation_is_halved(monkeypatch):
    """(samples, at once before, what else is in the way) -> at once afterwards; None where the run ends."""
    monkeypatch.setattr(evaluation, "holds_whole_model", lambda trainer: True)
    for (samples, before, helps, why), after in {
        **{(8, None, True, ""): 4, (8, 4, True, ""): 2, (3, 4, True, ""): 1, (9, None, True, ""): 4},
        **{(2, None, True, ""): 1, (1, None, True, ""): None, (8, 1, True, ""): None},
        **{(8, None, False, ""): None, (8, None, True, "no chunks"): None},
    }.items():
        monkeypatch.setattr(evaluation, "why_not_evaluated_in_chunks", lambda trainer, why=why: why)
        recovered = []
        own = SimpleNamespace(_evaluated_at_once=before, count_samples=len, args=SimpleNamespace(device="cpu"))
        own._ending = SimpleNamespace(end_run=end_run)
        own._recovered = lambda *about, recovered=recovered: recovered.append(about)
        diagnosis = SimpleNamespace(helps_on=lambda device, helps=helps: helps)
        if after is None:
            with pytest.raises(Ended) as end:
                EvalRecovery._halve_evaluation(own, range(samples), diagnosis)
            reason = why or ("no smaller evaluation batch helps there" if not helps else "the evaluation batch is one")
            assert end.value.args[1]["why"].startswith(reason) and end.value.args[1]["intact"] is True
            continue
        EvalRecovery._halve_evaluation(own, range(samples), diagnosis)
        assert own._evaluated_at_once == after and own._eval_failure is diagnosis
        assert recovered == [("eval", diagnosis, min(samples, before or samples), after)]


def test_losses_of_an_evaluation_in_chunks(monkeypatch):
    nan = float("nan")
    items = {"whole": 8, "a": 2, "b": 6, "c": 0}
    for rule, losses, joined in (
        (LossRule.SUM, (4.0, 8.0), 0.25 * 4 + 0.75 * 8),
        (SimpleNamespace(weight=lambda own, whole, part: {"a": 0.1, "b": 0.9}[part]), (4.0, 8.0), 7.6),
        (SimpleNamespace(weight=lambda own, whole, part: {"a": 1.0, "b": 0.0}[part]), (4.0, nan), 4.0),
    ):
        monkeypatch.setattr(evaluation, "find_rule", lambda *_, rule=rule: rule)
        own = SimpleNamespace(_eval_rule=None, args=SimpleNamespace(device=None))
        own._get_num_items_in_batch = lambda batches, device: torch.tensor(sum(items[batch] for batch in batches))
        assert EvalRecovery._join_losses(own, "whole", ["a", "b"], losses) == pytest.approx(joined)
        assert own._eval_rule is rule
    assert EvalRecovery._join_losses(own, "whole", ["a"], (None,)) is None


def test_generation_in_smaller_groups(monkeypatch):
    calls, events = [], []

    class Generates:
        def _generate_single_turn(self, prompts, images, fields):
            calls.append(len(prompts))
            if len(prompts) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return [prompt * 10 for prompt in prompts] if self.rloo else ([prompt * 10 for prompt in prompts], None)

    class Own(GenerationRecovery, Generates):
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        args = SimpleNamespace(
            device=torch.device("cuda"), activation_checkpointing=False, gradient_checkpointing=False
        )
        model, _ending = None, SimpleNamespace(end_run=end_run)

        def _splits_generation(self, images, fields):
            return True

        def _recovered(self, *about):
            events.append((about[0], *about[2:]))

    for rloo, found in ((True, [10, 20, 30, 40, 50]), (False, ([10, 20, 30, 40, 50], None))):
        calls.clear(), events.clear()
        own = Own()
        own.rloo = rloo
        assert own._generate_single_turn([1, 2, 3, 4, 5], None, None) == found
        assert calls == [5, 2, 2, 1] and events == [("generation", 5, 2)]
    for size, helps, why in ((1, True, "one completion at a time"), (4, False, "no smaller group")):
        with pytest.raises(Ended) as end:
            own._halve_generation(SimpleNamespace(helps_on=lambda device, helps=helps: helps), size)
        assert end.value.args[1]["why"].startswith(why)


# ---- signals


def stopper(step=3, saves=True, recovers=True, newest=None, alone=True):
    saved = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(save_strategy="steps" if saves else "no", process_index=0),
        state=SimpleNamespace(global_step=step),
        _runner=SimpleNamespace(recovers=recovers),
        emergency_checkpoint=lambda: saved.append("emergency"),
        newest_checkpoint=lambda: newest,
        _peers=SimpleNamespace(alone=alone, smallest=lambda number: 2 if number is None else min(2, number)),
        model=None,
        _save_checkpoint=lambda *_: saved.append("saved"),
    )
    trainer.callback_handler = SimpleNamespace(
        on_save=lambda *_: saved.append("on_save"), on_train_end=lambda *_: saved.append("closed")
    )
    return interrupt._StopAtStepEnd(trainer), saved


def test_how_a_run_is_stopped():
    for signals, step, saves, newest, words in (
        ((2,), 3, True, "out/checkpoint-3", "stopped at step 3; saved as out/checkpoint-3"),
        ((2,), 3, True, "out/checkpoint-2", "stopped at step 3; the newest checkpoint is out/checkpoint-2"),
        ((2,), 3, True, None, "stopped at step 3; there is no checkpoint yet"),
        ((2,), 3, False, None, "stopped at step 3; nothing was saved, since save_strategy is no"),
        ((2,), 3, False, "o/checkpoint-2", "nothing was saved, since save_strategy is no; the newest checkpoint is"),
        ((2,), 3, False, "o/checkpoint-3", "stopped at step 3; saved as o/checkpoint-3"),
    ):
        stop, _ = stopper(step, saves, newest=newest)
        stop.signal = signals[0]
        assert words in str(stop.ending()) and type(stop.ending()) is interrupt.TrainingInterrupted
        assert "stopped at step 3 (why); " in str(stop.ending("why"))
    stop.signal = signal.SIGTERM
    assert type(stop.ending()) is interrupt.TrainingTerminated and stop.ending().code == 143
    for first, second, at_once in ((2, 2, True), (2, 15, True), (15, 2, True), (15, 15, False)):
        stop, _ = stopper()
        stop.signal = first
        if at_once:
            with pytest.raises((interrupt.TrainingInterrupted, interrupt.TrainingTerminated), match="at once"):
                stop.request(second, None)
        else:
            stop.request(second, None)
        assert stop.signal == first
    for alone, number, asks in ((True, None, False), (True, 15, True), (False, None, True), (False, 15, True)):
        control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=True)
        stop, _ = stopper(saves=False, alone=alone)
        stop.signal = number
        stop.on_pre_optimizer_step(None, None, control)
        assert stop._updating
        stop.on_step_end(None, None, control)
        assert not stop._updating and stop.agreed is control.should_training_stop is asks
        assert control.should_evaluate is not asks and control.should_save is False
        assert stop.signal == (number if alone else 2)


def test_what_is_saved_as_a_run_stops():
    for updating, saves, recovers, step, saved in (
        (False, True, True, 3, ["emergency"]),
        (True, True, True, 3, []),
        (False, False, True, 3, []),
        (False, True, False, 3, []),
        (False, True, True, 0, []),
    ):
        stop, found = stopper(step, saves, recovers)
        stop._updating = updating
        stop.save_last_step()
        assert found == saved
    for step, saves, saved in ((3, True, ["saved", "on_save"]), (0, True, []), (3, False, [])):
        stop, found = stopper(step, saves)
        stop.signal = signal.SIGINT
        with pytest.raises(interrupt.TrainingInterrupted):
            stop.on_prediction_step(SimpleNamespace(world_size=1), stop.trainer.state, None)
        assert found == [*saved, "closed"]
    stop, found = stopper()
    stop.on_epoch_end(None, None, None)
    stop.agreed = True
    with pytest.raises(interrupt.TrainingInterrupted):
        stop.on_epoch_end(None, None, None)
    assert found == ["closed"]


# ---- checkpoints


def test_checkpoints_from_the_newest_on(tmp_path):
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-0", "checkpoint-x", "checkpoint--1", "checkpoint-3.5"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-99").touch()
    assert [path.name for path in intact._newest_first(tmp_path)] == ["checkpoint-10", "checkpoint-2", "checkpoint-0"]


def test_what_is_wrong_with_the_files_of_a_checkpoint(tmp_path):
    import zipfile

    import safetensors.numpy

    folder = tmp_path / "checkpoint-1"

    def write(**changes):
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        TrainerState(global_step=1).save_to_json(str(folder / "trainer_state.json"))
        safetensors.numpy.save_file({"a": numpy.ones(2)}, folder / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            with zipfile.ZipFile(folder / name, "w") as archive:
                archive.writestr("archive/data.pkl", "x")
        for name, content in changes.items():
            path = folder / name.replace("__", ".")
            if content is None:
                path.unlink()
            else:
                path.write_text(content)

    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    for changes, only_model, fault in (
        ({}, False, ""),
        ({"trainer_state__json": None}, False, "no trainer_state.json"),
        ({"trainer_state__json": '{"global_step": -1}'}, False, "trainer_state.json: global_step is -1"),
        ({"trainer_state__json": '{"global_step": 0}'}, False, ""),
        ({"trainer_state__json": '{"global_step": "1"}'}, False, "trainer_state.json: global_step is '1'"),
        ({"config__json": "[1]"}, False, "config.json holds a list, not an object"),
        ({"memory_state__json": "{"}, False, "memory_state.json: "),
        ({"model__safetensors": None}, False, "no model.safetensors or adapter_model.safetensors"),
        ({"model__safetensors": None, "pytorch_model__bin": ""}, False, ""),
        ({"model__safetensors": None, "global_step1": ""}, False, ""),
        ({"model__safetensors": "x"}, False, "model.safetensors: "),
        ({"model__safetensors__index__json": index}, False, "no model-2.safetensors"),
        ({"optimizer__pt": None}, False, "no optimizer.pt"),
        ({"optimizer__pt": None}, True, ""),
        ({"scheduler__pt": None}, False, "no scheduler.pt"),
        ({"rng_state__pth": None}, False, ""),
        ({"rng_state__pth": "x"}, False, "rng_state.pth: "),
        ({"rng_state__pth": "x"}, True, ""),
    ):
        write(**changes)
        found = intact._fault_of_files(folder, only_model)
        assert found.startswith(fault) and bool(found) is bool(fault), (changes, found)
    write()
    with zipfile.ZipFile(folder / "optimizer.pt", "w") as archive:
        archive.writestr("other", "x")
    assert intact._fault_of_files(folder, False) == "optimizer.pt is not what torch.save writes"


def test_a_manifest_that_is_older_than_the_state(tmp_path):
    state, manifest = tmp_path / "trainer_state.json", tmp_path / intact.MANIFEST
    for text, age, stale in (("{}", 5, False), ("{ }", 5, True), ("{ }", 0, False), ("{ }", -5, False)):
        state.write_text("{}")
        intact.write_manifest(tmp_path)
        state.write_text(text)
        moment = manifest.stat().st_mtime_ns
        os.utime(state, ns=(moment + age, moment + age))
        assert intact.is_stale(tmp_path) is stale
        fault = "" if text == "{}" else "trainer_state.json has 3 bytes, and 2 were written"
        assert intact.manifest_fault(tmp_path) == (None if stale else fault)
    manifest.write_text("{")
    assert intact.is_stale(tmp_path) is False and "cannot be read" in intact.manifest_fault(tmp_path)
    manifest.unlink()
    assert intact.manifest_fault(tmp_path) is None


def test_processes_agree_on_a_checkpoint(monkeypatch):
    checked = []
    monkeypatch.setattr(resuming, "check_intact", lambda path, only_model: checked.append((str(path), only_model)))
    for own, others, agreed in (
        ("out/checkpoint-4", (4, 4), "out/checkpoint-4"),
        ("out/checkpoint-4", (2, 4), "out/checkpoint-2"),
        ("out/checkpoint-4", (0, 4), "out/checkpoint-0"),
        ("out/checkpoint-4", (-1, 4), None),
        (None, (-1, 4), None),
        (None, (-1, -1), "none"),
        ("out/named", (0, 0), "out/named"),
    ):
        checked.clear()
        asked = []

        def smallest(number, others=others, asked=asked):
            asked.append(number)
            return others[0] if len(asked) == 1 else -others[1]

        args = SimpleNamespace(output_dir="out", save_only_model=True)
        trainer = SimpleNamespace(_peers=SimpleNamespace(alone=False, smallest=smallest), args=args)
        if agreed is None:
            with pytest.raises(InputError, match="some nodes have a checkpoint in out and others none"):
                resuming.SafeResume._agree_on_checkpoint(trainer, own)
        else:
            found = resuming.SafeResume._agree_on_checkpoint(trainer, own)
            assert found == (None if agreed == "none" else agreed)
            assert checked == ([(agreed, True)] if others[0] != others[1] else [])
        number = (own or "").rpartition("-")[2]
        step = -1 if own is None else int(number) if number.isdigit() else 0
        assert asked == [step, -step]
    trainer._peers.alone = True
    assert resuming.SafeResume._agree_on_checkpoint(trainer, "other") == "other"


def test_the_effective_batch_of_another_world_size(tmp_path, caplog):
    """(of the checkpoint, its processes, here, DeepSpeed) -> accumulation, or what is said."""
    file = tmp_path / "memory_state.json"
    for (wanted, before, deepspeed), expected in {
        (16, 2, False): 2,
        (8, 2, False): 1,
        (16, 1, False): "effective batch size: 16 in the checkpoint, 8 from here on",
        (12, 2, False): 1.5,
        (24, 3, False): 3,
        (16, 2, True): "set gradient_accumulation_steps=2",
        (0, 2, False): "effective_batch_size=0 is not a whole number",
        (16, 0, False): "world_size=0 is not a whole number",
        (1.5, 2, False): "effective_batch_size=1.5 is not a whole number",
        (4, 2, False): "which 1 process(es) with per_device_train_batch_size=4 cannot make: choose one that divides 2",
    }.items():
        if expected == 1.5:
            expected = "cannot make: choose one that divides 6"
        file.write_text(json.dumps({"effective_batch_size": wanted, "world_size": before}))
        events = []
        args = SimpleNamespace(world_size=1, train_batch_size=4, gradient_accumulation_steps=1)
        args.deepspeed_plugin = object() if deepspeed else None
        trainer = SimpleNamespace(args=args, limit=BatchLimit(1), batches=2)
        trainer._effective_batch_size = lambda: 8
        trainer._event = lambda name, events=events, **about: events.append(about)
        caplog.clear()
        if isinstance(expected, int):
            resuming.SafeResume._keep_effective_batch(trainer, file)
            assert args.gradient_accumulation_steps == expected and len(events) == (wanted != 8)
        elif expected.startswith("effective batch size"):
            resuming.SafeResume._keep_effective_batch(trainer, file)
            assert expected in caplog.text and args.gradient_accumulation_steps == 1
        else:
            with pytest.raises(InputError) as error:
                resuming.SafeResume._keep_effective_batch(trainer, file)
            assert expected in str(error.value)


def test_steps_that_are_done_are_not_trained_again():
    class Loop:
        def _run_epoch(self, *args):
            return "trained"

    class Own(resuming.SafeResume, Loop):
        pass

    for step, most, trained in ((5, 6, "trained"), (6, 6, None), (7, 6, None)):
        own = Own()
        own.state, own.control = SimpleNamespace(global_step=step, max_steps=most), SimpleNamespace()
        assert own._run_epoch() == trained and hasattr(own.control, "should_training_stop") is (trained is None)


def test_a_checkpoint_takes_its_place(tmp_path):
    unfinished, place = tmp_path / saving.UNFINISHED, tmp_path / "checkpoint-3"
    for older in (False, True):
        (unfinished / "checkpoint-3" / "inner").mkdir(parents=True)
        (unfinished / "checkpoint-3" / "inner" / "file").write_text("new")
        (unfinished / "left").mkdir()
        if older:
            (place / "older").touch()
        saving._replace(unfinished / "checkpoint-3", place)
        assert (place / "inner" / "file").read_text() == "new" and not unfinished.exists()
        assert not (place / "older").exists()
    shards = []
    model = SimpleNamespace(save_pretrained=lambda folder, **more: shards.append(more))
    with saving._small_shards(model):
        model.save_pretrained("a", max_shard_size="5GB", x=1)
    model.save_pretrained("a")
    assert shards == [{"max_shard_size": "256MB", "x": 1}, {}]
    model.peft_config = {}
    with saving._small_shards(model), saving._small_shards(torch.nn.Linear(1, 1)):
        model.save_pretrained("a")
    assert shards[-1] == {}


# ---- the trainer


def test_the_first_limit_of_micro_batches():
    """(micro-batch, accumulation, max_batch_size, splits) -> what is fetched and what runs first."""
    for (first, accumulation, largest, splits), found in {
        (2, 4, None, False): (2, 4, None),
        (2, 4, 2, False): (2, 4, None),
        (2, 4, 4, True): (4, 2, 2),
        (2, 4, 8, True): (8, 1, 2),
        (2, 4, 3, True): "max_batch_size=3 does not divide the 8 samples",
        (2, 4, 4, False): "max_batch_size=4 needs micro-batches that can be split (why)",
    }.items():
        args = SimpleNamespace(per_device_train_batch_size=first, gradient_accumulation_steps=accumulation)
        args.train_batch_size, memory = 99, MemoryArguments(max_batch_size=largest, adjustment_frequency=7)
        own = SimpleNamespace(memory_args=memory, args=args, _train_batch_size=first)
        own._recoverability = SimpleNamespace(splits=splits, reason="why")
        if isinstance(found, str):
            with pytest.raises(InputError) as error:
                MemoryTrainer._first_limit(own)
            assert found in str(error.value)
            continue
        limit = MemoryTrainer._first_limit(own)
        micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        assert (micro, steps, limit._first_samples) == found and limit._patience == 7
        assert own._train_batch_size == (99 if limit._first_samples else first)


def test_engines_and_batches_of_a_trainer():
    for kind, more, label in (
        ("NO", {}, "none"),
        ("MULTI_GPU", {}, "ddp"),
        ("DEEPSPEED", {"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, "zero2"),
        ("DEEPSPEED", {"deepspeed_plugin": None}, "zero0"),
        ("FSDP", {}, "fsdp2"),
    ):
        plugin = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=2))
        accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=plugin)
        own = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(**{"deepspeed_plugin": None, **more}))
        own.is_distributed_loading_by_transformers = False
        assert MemoryTrainer._engine(own).label.startswith(label[:4]), kind
        own.is_distributed_loading_by_transformers = True
        assert MemoryTrainer._engine(own).by_transformers
    own = SimpleNamespace(args=SimpleNamespace(world_size=16), get_tp_size=lambda: 4, get_sp_size=lambda: 2)
    assert MemoryTrainer.batches.fget(own) == 2


def test_the_setup_of_a_trainers_job(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    setup = combination.describe_setup(model, args)
    assert (setup.device, setup.method, setup.dtype, setup.precision) == ("cpu", "full", "bfloat16", "fp32")
    assert setup.accumulates and not setup.replicated and setup.optim == args.optim.value
    args.gradient_accumulation_steps, model.peft_config = 1, {}
    assert not combination.describe_setup(model, args).accumulates
    assert combination.describe_setup(model, args).method == "lora"
    model.is_loaded_in_4bit = True
    assert combination.describe_setup(model, args).method == "qlora"
    for name, optim in (("AdamW8bit", "adamw_8bit"), ("Adafactor", "adafactor"), ("PagedLion8bit", "paged_lion_8bit")):
        assert combination.describe_setup(model, args, optimizer=type(name, (), {})()).optim == optim
    assert combination.describe_setup(model, args, optimizer=type("Mine", (), {})()).optim == "adamw_torch"
    assert combination.describe_setup(model, args, own_optimizer=True).optim == "adamw_torch"
    for sizes, mesh in (((2, None, None), (2, 1, 1)), ((None, 4, 2), (1, 4, 2))):
        config = SimpleNamespace(**dict(zip(("tp_size", "fsdp_size", "dp_replicate_size"), sizes, strict=True)))
        sharded = SimpleNamespace(is_distributed_loading_by_transformers=True)
        sharded.config = SimpleNamespace(distributed_config=config)
        found = combination._mesh(sharded)
        assert (found.tp_size, found.fsdp_size, found.dp_replicate_size) == mesh


def test_bytes_that_are_held_when_memory_runs_out():
    model = torch.nn.Linear(3, 2)
    model.weight.grad = torch.zeros(2, 3)
    optimizer = SimpleNamespace(state={0: {"step": 3, "exp_avg": torch.zeros(5, dtype=torch.bfloat16)}})
    for given, states in ((SimpleNamespace(optimizer=optimizer), 10), (optimizer, 10), (None, 0)):
        held = oom_report.count_held_bytes(SimpleNamespace(model=model, optimizer=given))
        assert held == {"parameters": 32, "gradients": 24, "optimizer_states": states}


def test_the_tokens_of_the_sample_that_is_predicted(monkeypatch):
    from hf_memopt.estimator import api, job, suggestions, training_fields

    asked = []
    monkeypatch.setattr(oom_report, "trl_trainer", lambda trainer: None)
    monkeypatch.setattr(job, "describe", lambda config, fields, length, **more: asked.append((fields, length, more)))
    monkeypatch.setattr(api, "estimate_job", lambda job: SimpleNamespace(breakdown={"x": 1}))
    monkeypatch.setattr(suggestions, "largest_savings", lambda job, estimate: [])
    monkeypatch.setattr(
        training_fields, "read_trainer_fields", lambda trainer: {"per_device_train_batch_size": 8, "a": 1}
    )
    for inputs, length in (
        ({"input_ids": torch.zeros(2, 7), "labels": torch.zeros(2), "pixels": torch.zeros(2, 9, 3)}, 9),
        ({"labels": torch.zeros(5)}, None),
        (None, None),
    ):
        model = torch.nn.Linear(1, 1)
        model.config, running = SimpleNamespace(), None if inputs is None else SimpleNamespace(inputs=inputs)
        trainer = SimpleNamespace(model=model, _runner=SimpleNamespace(running=(running, 0)), memory_args=None)
        if length is None:
            with pytest.raises(InputError, match="the batch has no tokens"):
                oom_report._predicted(trainer)
            continue
        assert oom_report._predicted(trainer) == ({"x": 1}, [])
        fields, tokens, more = asked[-1]
        assert (fields, tokens, more["dtype"]) == ({"per_device_train_batch_size": 1, "a": 1}, length, "float32")


def test_metrics_of_processes_are_brought_together(monkeypatch):
    import accelerate.utils

    monkeypatch.setattr(process_metrics, "trl_trainer", lambda trainer: trainer.kind)
    kinds = {name: type(name, (), {}) for name in ("SFTTrainer", "KTOTrainer")}
    for name, processes, recovers, active in (
        ("SFTTrainer", 2, True, True),
        ("SFTTrainer", 1, True, False),
        ("SFTTrainer", 2, False, False),
        ("KTOTrainer", 2, True, False),
        (None, 2, True, False),
    ):
        accelerator = SimpleNamespace(gather="gather", gather_for_metrics="metrics", sync_gradients=True)
        trainer = SimpleNamespace(kind=kinds.get(name), args=SimpleNamespace(world_size=processes))
        trainer.accelerator, trainer._runner = accelerator, SimpleNamespace(recovers=recovers)
        trainer._metrics, trainer._total_train_tokens = {"train": {"loss": [1.0]}}, 100
        metrics = process_metrics.ProcessMetrics(trainer)
        metrics.begin_step()
        with metrics.kept_apart():
            assert (accelerator.gather == "gather") is not active
            if active:
                assert accelerator.gather("own") == accelerator.gather_for_metrics("own", x=1) == "own"
        assert (accelerator.gather, accelerator.gather_for_metrics) == ("gather", "metrics")
        trainer._metrics["train"]["loss"] += [2.0, 4.0]
        trainer._metrics["train"]["new"] = [5.0, 7.0]
        trainer._total_train_tokens += 7
        monkeypatch.setattr(accelerate.utils, "gather_object", lambda own: [*own, ({"loss": 5.0}, 3)])
        metrics.bring_together()
        if active:
            assert trainer._metrics["train"] == {"loss": [1.0, 4.0], "new": [6.0], "num_tokens": [110]}
            assert trainer._total_train_tokens == 110
        else:
            assert trainer._metrics["train"] == {"loss": [1.0, 2.0, 4.0], "new": [5.0, 7.0]}
    trainer.kind, accelerator.sync_gradients = kinds["SFTTrainer"], False
    waiting = process_metrics.ProcessMetrics(trainer)
    waiting.begin_step()
    waiting.bring_together()
    assert trainer._total_train_tokens == 107


def test_processes_that_are_alone():
    peers = Peers(SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu")))
    assert peers.alone and peers.wait_on_host and peers.share_checkpoint("own") == "own"
    with peers.watching(None):
        peers.announce("none hears", 3)
    peers.size = 2
    assert peers.alone, "nothing is initialized"


def test_the_lock_of_an_update():
    trainer = SimpleNamespace(_runner=SimpleNamespace(remember_state=lambda: None))
    updates = Updates(trainer)
    with updates.paused() as free:
        assert free and not updates.running
    updates.on_train_begin(None, None, None)
    updates.on_step_end(None, None, None)
    updates.on_pre_optimizer_step(None, None, None)
    assert updates.running
    updates.on_step_end(None, None, None)
    with updates.paused() as free:
        assert free and updates.running
    assert not updates.running
    updates.on_train_end(None, None, None)
    assert not updates.running


def test_lengths_for_a_sampler_of_clips(monkeypatch):
    asked = []
    monkeypatch.setattr(video_trainer.MemoryTrainer, "_get_train_sampler", lambda self, data=None: asked.append(data))
    for strategy, measured in (("group_by_length", True), ("batch_rebalance", True), ("random", False)):
        own = video_trainer.VideoTrainer.__new__(video_trainer.VideoTrainer)
        own.args, own.processing_class = SimpleNamespace(train_sampling_strategy=strategy), None
        data = own.train_dataset = SimpleNamespace(lengths=lambda: [3, 1])
        own._get_train_sampler()
        rows = asked[-1]
        assert rows == [{"input_ids": range(3)}, {"input_ids": range(1)}] if measured else rows is data
    own._get_train_sampler([1])
    assert asked[-1] == [1]
