"""Every optimizer that TrainingArguments knows: trained as by the plain Trainer, estimated, measured, interrupted."""

import json
import random
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from conftest import run_forked, slow
from faults import Strikes, StrikesMidway, struck
from safetensors.torch import load_file
from small_runs import OOM, QUIET, Rows, collate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from hf_memopt import InputError, MemoryArguments, MemoryTrainer, TrainingOutOfMemory, estimate, estimate_trainer
from hf_memopt.compatibility.rules import PACKAGES
from hf_memopt.errors import one_line
from hf_memopt.recipe.phase_peaks import PhasePeaks
from hf_memopt.trainer.step.optimizer_guard import StepWatch, guard
from hf_memopt.trainer.step.recoverability import changes_weights_in_backward

NAMES = [member.value for member in OptimizerNames]
# Their packages are installed; the others may fail as they do under the plain Trainer.
RUNS_HERE = [name for name in NAMES if PACKAGES.get(name) in (None, "bitsandbytes", "torchao")]
NOT_HERE = {"adamw_torch_xla": "torch_xla", "adamw_torch_npu_fused": "torch_npu"}
STEPS = 3


def tiny(name: str = "adamw_torch") -> LlamaConfig:
    """Two layers. Optimizers quantize the states of weights from 4096 elements on, here the MLP's; torchao's
    quantization to 4 bits takes minutes to compile."""
    width = 64 if name == "adamw_torch_4bit" else 128
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )


def fields_for(name: str) -> dict:
    fields = {"optim": name, "max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1}
    if name.startswith(("galore", "apollo")):
        fields |= {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=4"}
    if name.startswith("schedule_free"):
        fields |= {"lr_scheduler_type": "constant"}
    if "lomo" in name:
        fields |= {"max_grad_norm": 0.0}
    return fields


def make_trainer(folder, name="adamw_torch", kind=Trainer, memory=None, prepare=None, callbacks=(), **fields):
    torch.manual_seed(0)
    fields = {"per_device_train_batch_size": 4, **QUIET, **fields_for(name), **fields}
    args = TrainingArguments(str(folder), remove_unused_columns=False, **fields)
    more = {"memory_args": MemoryArguments(**memory)} if memory else {}
    trainer = kind(
        model=LlamaForCausalLM(tiny(name)),
        args=args,
        train_dataset=Rows(),
        data_collator=collate,
        callbacks=list(callbacks),
        **more,
    )
    if prepare:
        on_creation(trainer, prepare)
    return trainer


def on_creation(trainer, change) -> None:
    """Change the optimizer once, when the trainer has made it."""
    create, changed = trainer.create_optimizer, []

    def create_changed(*args, **kwargs):
        optimizer = create(*args, **kwargs)
        if not changed:
            changed.append(optimizer)
            change(optimizer)
        return optimizer

    trainer.create_optimizer = create_changed


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def trained(folder, name="adamw_torch", strikes=None, resume=False, **more) -> torch.Tensor:
    trainer = make_trainer(folder, name, **more)
    if strikes is None:
        trainer.train(resume_from_checkpoint=resume)
    else:
        struck(trainer, strikes)
        with strikes:
            trainer.train(resume_from_checkpoint=resume)
    return weights_of(trainer)


def skip_unless_runnable(name: str) -> None:
    package = NOT_HERE.get(name) or PACKAGES.get(name)
    if package and find_spec(package) is None:
        pytest.skip(f"optim={name} needs {package}")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Plain Trainer's weights, by optimizer; kept."""
    kept = {}

    def weights(name: str) -> torch.Tensor:
        skip_unless_runnable(name)
        if name not in kept:
            try:
                kept[name] = trained(tmp_path_factory.mktemp("plain"), name)
            except Exception as error:
                if name in RUNS_HERE:
                    raise
                pytest.skip(f"the plain Trainer cannot either: {one_line(error)}")
        return kept[name]

    return weights


QUICK = {"adamw_torch_fused", "adamw_8bit", "sgd"}  # make test-slow has all of them


def marked(name: str):
    """An optimizer's case, with what it needs: torchao's kernels are compiled."""
    compiled = [pytest.mark.needs_compiler] if PACKAGES.get(name) == "torchao" else []
    return pytest.param(name, marks=compiled + ([] if name in QUICK else [pytest.mark.slow]))


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_weights_are_those_of_the_plain_trainer(name, plain, tmp_path):
    """With recovery, without it, and while PhasePeaks measures."""
    wanted = plain(name)
    peaks = PhasePeaks()
    assert torch.equal(trained(tmp_path, name, kind=MemoryTrainer), wanted)
    assert torch.equal(trained(tmp_path, name, kind=MemoryTrainer, memory={"oom_recovery": False}), wanted)
    assert torch.equal(trained(tmp_path, name, callbacks=[peaks]), wanted)
    assert (peaks.bytes == 0) is (PACKAGES.get(name) == "torchao"), "what is compiled is not measured"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_estimates_count_the_states_or_say_why_not(name, tmp_path):
    skip_unless_runnable(name)
    trainer = make_trainer(tmp_path, name)
    fields = {key: value for key, value in fields_for(name).items() if key != "max_steps"}
    try:
        states = estimate_trainer(trainer, "cpu").breakdown["optimizer_states"]
    except InputError as refusal:
        assert PACKAGES[name] not in ("bitsandbytes", "torchao") and "\n" not in str(refusal)
        return
    assert estimate(tiny(name), fields, 32, "cpu").breakdown["optimizer_states"] == states
    if PACKAGES.get(name) in (None, "bitsandbytes", "torchao"):
        trainer.train()
        kept = [part for state in trainer.optimizer.optimizer.state.values() for part in plain_tensors(state)]
        sizes = {part.data_ptr(): part.numel() * part.element_size() for part in kept}
        assert states == pytest.approx(sum(sizes.values()), rel=0.01)


def plain_tensors(state: dict):
    for value in state.values():
        if hasattr(value, "__tensor_flatten__"):
            yield from plain_tensors({part: getattr(value, part) for part in value.__tensor_flatten__()[0]})
        elif isinstance(value, torch.Tensor):
            yield value


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_the_command_line_estimates_torchaos_optimizer(tmp_path):
    """In a process of its own: the copy of a fake learning rate once corrupted the heap, and the process with it."""
    pytest.importorskip("torchao")
    tiny().save_pretrained(tmp_path)
    done = run_forked("hf-memopt", "estimate", tmp_path, "--seq-len", 32, "--set", "optim=adamw_torch_8bit", "--json")
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert json.loads(done.stdout)["breakdown"]["optimizer_states"] > 0


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_a_recipe_trains_with_torchaos_optimizer(tmp_path, jsonl):
    pytest.importorskip("torchao")
    data = jsonl([{"text": "a few words to train on " * 8}] * 8)
    done = run_forked(
        *("python", "recipes/sft.py", "--preset", "cpu", "--optim", "adamw_torch_8bit", "--max_steps", 2),
        *("--samples", 1, "--max_length", 32, "--effective_batch_size", 2, "--held_out", 2),
        *("--dataset_name", data, "--output_dir", tmp_path / "out"),
        env={"CUDA_VISIBLE_DEVICES": "", "CXX": "g++"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "memory_report.json").read_text())["global_step"] == 2


# ---- interrupted


def foreach(on: bool):
    def change(optimizer):
        for group in optimizer.param_groups:
            group["foreach"] = on

    return change


INTERRUPTED = {
    "foreach": {"prepare": foreach(True)},
    "one by one": {"prepare": foreach(False)},
    "fused": {"name": "adamw_torch_fused"},
    "sgd": {"name": "sgd", "optim_args": "momentum=0.9", "prepare": foreach(True)},
    "adafactor": {"name": "adafactor"},
    "8 bits": {"name": "adamw_8bit"},
    "torchao's": {"name": "adamw_torch_8bit"},
    "Adam-mini": {"memory": {"adam_mini": True}, "kind": MemoryTrainer},
}
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


class Reference:
    """An undisturbed run: its weights after every step, and how many operators its optimizer steps have."""

    def __init__(self, folder, setting: dict):
        skip_unless_runnable(setting.get("name", "adamw_torch"))
        counting = StrikesMidway(-1, "before")
        self.setting = {**SAVED, **setting}
        if PACKAGES.get(setting.get("name")) == "torchao":
            trained(folder / "compiled", **self.setting)  # or what compiling runs would be counted
        self.weights = trained(folder, strikes=counting, **{**self.setting, "save_steps": 1})
        self.steps = {path.name: load_file(path / "model.safetensors") for path in folder.glob("checkpoint-*")}
        self.operators = counting.counts["optimizer"]

    def check(self, folder, strikes) -> TrainingOutOfMemory | None:
        """A run that is struck ends with these weights, or at a step from which it resumes to them."""
        setting = {**self.setting, "kind": MemoryTrainer}
        try:
            weights = trained(folder, strikes=strikes, **setting)
        except TrainingOutOfMemory as end:
            assert end.report["stage"] == "optimizer"
            saved = list(folder.glob("checkpoint-*"))
            for path in saved:
                weights = load_file(path / "model.safetensors")
                assert all(torch.equal(weights[name], kept) for name, kept in self.steps[path.name].items())
            if saved:
                assert torch.equal(trained(folder, resume=True, **setting), self.weights)
            return end
        assert torch.equal(weights, self.weights)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    kept = {}

    def reference(case: str) -> Reference:
        if case not in kept:
            setting = dict(INTERRUPTED[case])
            setting.setdefault("kind", Trainer)
            kept[case] = Reference(tmp_path_factory.mktemp("undisturbed"), setting)
        return kept[case]

    return reference


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["midway", slow("before"), slow("after")])
@pytest.mark.parametrize(
    "case",
    [
        "foreach",
        slow("fused"),
        *(slow(case) for case in INTERRUPTED if case not in ("foreach", "fused", "torchao's")),
        pytest.param("torchao's", marks=[pytest.mark.slow, pytest.mark.needs_compiler]),
    ],
)
def test_the_weights_are_exact_or_the_run_ends_at_a_whole_step(case, manner, undisturbed, tmp_path):
    """An operator finds no memory before it wrote, when it had updated some of its tensors, or after all of them."""
    reference = undisturbed(case)
    drawn = random.Random(f"{case} {manner}")
    for turn in range(3):
        number, times = drawn.randint(1, reference.operators), drawn.choice([1, 2])
        strikes = StrikesMidway(number, manner, times=times)
        reference.check(tmp_path / str(turn), strikes)
        assert strikes.hits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_torch_fused", slow("adamw_torch"), slow("adamw_8bit")])
def test_a_hook_that_fails_after_the_update_leaves_no_checkpoint_of_half_a_step(name, tmp_path):
    """The weights are the next step's by then: that of the last periodic checkpoint is the newest whole step."""

    def moving_average(optimizer):
        def average(*_):
            steps.append(None)
            if len(steps) == 4:
                raise torch.OutOfMemoryError(OOM)

        steps = []
        optimizer.register_step_post_hook(average)

    with pytest.raises(TrainingOutOfMemory) as end:
        trained(tmp_path / "out", name, kind=MemoryTrainer, prepare=moving_average, **SAVED)
    assert end.value.report["checkpoint"].endswith("checkpoint-2")
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.slow
def test_step_counts_of_a_checkpoint_are_those_of_its_step(tmp_path):
    """Adam-mini counts a weight's steps in Python, before it finds no memory for the first norm."""
    setting = {"memory": {"adam_mini": True}, "kind": MemoryTrainer, **SAVED}
    three = Strikes()
    trained(tmp_path / "three", strikes=three, **setting | {"max_steps": 3})
    first = three.counts["optimizer"] + 1  # of the fourth step
    with pytest.raises(TrainingOutOfMemory):
        trained(tmp_path / "out", strikes=Strikes({"optimizer": set(range(first, first + 9))}), **setting)
    saved = torch.load(tmp_path / "out" / "checkpoint-3" / "optimizer.pt", weights_only=False)
    assert {state["step"] for state in saved["state"].values()} == {3}


def test_a_step_that_wrote_nothing_is_taken_again_one_weight_at_a_time(tmp_path):
    """foreach AdamW takes a copy of all weights once its first states are there; without decay nothing was written."""
    setting = {"prepare": foreach(True), "weight_decay": 0.0}
    roots = []

    class NoRoots(Strikes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._foreach_sqrt.default:
                roots.append(func)
                self.fail(func)
            return func(*args, **(kwargs or {}))

    wanted = trained(tmp_path / "plain", **setting)
    trainer = make_trainer(tmp_path / "out", kind=MemoryTrainer, **setting)
    with NoRoots():
        trainer.train()
    assert len(roots) == 2, "the operator was repeated, then the step without it"
    assert torch.equal(weights_of(trainer), wanted)
    (event,) = trainer.memory_events
    assert event["event"] == "oom_recovered" and event["stage"] == "optimizer"


class Half(Strikes):
    """A list operator updates its first tensor and then finds no memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_add_.List and not self.hits:
            self.hits.append(("optimizer", 1))
            func(args[0][:1], args[1][:1], **(kwargs or {}))
            self.fail(func)
        return func(*args, **(kwargs or {}))


def test_no_tensor_of_a_list_is_updated_twice():
    weights = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD(weights, lr=1.0, foreach=True)
    failures = []
    step = guard(optimizer.step, optimizer, pytest.fail, lambda error, wrote: failures.append(wrote))
    with pytest.raises(torch.OutOfMemoryError), Half():
        step()
    assert failures == [True]
    assert [weight.unique().item() for weight in weights] == [-1.0, 0.0, 0.0]


def test_what_counts_as_written():
    for write, wrote in [
        (lambda weight: weight.view(-1).mul_(2), True),
        (lambda weight: torch.add(weight, 1, out=weight), True),
        (lambda weight: torch._foreach_add_([torch.zeros(2), weight], 1), True),
        (lambda weight: torch.zeros_like(weight).view(-1).mul_(2), False),
        (lambda weight: torch.tensor(0.0).add_(1), False),
        (lambda weight: torch._foreach_sqrt([weight]), False),
    ]:
        weight = torch.ones(2, 2)
        with StepWatch() as watch:
            write(weight)
        assert watch.wrote is wrote


def test_optimizers_that_step_in_backward():
    def in_backward(optim):
        return changes_weights_in_backward(
            SimpleNamespace(args=SimpleNamespace(optim=optim), memory_args=MemoryArguments())
        )

    assert in_backward(OptimizerNames.LOMO) and in_backward("galore_adamw_layerwise")
    assert not in_backward(OptimizerNames.ADAMW_TORCH)


class Own(torch.optim.SGD):
    """Someone's optimizer, which could write in ways that nobody sees, and keeps states that nobody knows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state["moments"] = [torch.zeros(2)]


@pytest.mark.parametrize(("kind", "wrote"), [(torch.optim.SGD, False), (Own, True)])
def test_of_an_unknown_optimizer_every_failure_counts_as_written(kind, wrote):
    failures = []
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer.step = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError(OOM))
    step = guard(optimizer.step, optimizer, pytest.fail, lambda error, known: failures.append(known))
    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert failures == [wrote]
