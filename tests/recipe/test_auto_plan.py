"""--preset auto: a recipe plans for the memory that is free, and begins again where the largest batch does not fit."""

import json
from functools import wraps
from pathlib import Path

import pytest
import torch
from conftest import flags
from torch._subclasses.fake_tensor import FakeTensor

from hf_memopt.errors import InputError, StartAgain
from hf_memopt.hardware import get_hardware
from hf_memopt.monitor import readers
from hf_memopt.planner.plan import plan
from hf_memopt.program import _until_it_stands
from hf_memopt.recipe import auto

OPTIM = {"optim": "adamw_torch"}  # fewer choices


@pytest.fixture
def sft(recipe, builtin_model, jsonl, tmp_path):
    """The recipe's main function, and arguments for a model of one's own."""
    rows = [{"prompt": f"{number}? " * (1 + number % 9), "completion": f"{number}."} for number in range(40)]
    arguments = flags(
        model_name_or_path=builtin_model,
        dataset_name=jsonl(rows),
        output_dir=tmp_path / "out",
        max_length=64,
        effective_batch_size=8,
        held_out=0,
        save_strategy="no",
        samples=0,
        max_steps=2,
        report_to="none",
        disable_tqdm="true",
        optim="adamw_torch",
    )
    return recipe("sft"), arguments


@pytest.fixture
def free(monkeypatch):
    """Says how much memory is free."""

    def say(size: int):
        monkeypatch.setattr(auto, "usable_memory", lambda device: size)

    return say


@pytest.mark.slow
def test_it_plans_for_what_is_free(sft, free, capsys):
    main, arguments = sft
    free(2**30)
    plenty = main([*arguments, "--preset", "auto"])
    assert plenty.args.per_device_train_batch_size == 8 and not plenty.args.activation_checkpointing
    assert plenty.memory_events[0]["event"] == "worst_batch_fits"  # tried before step 0
    assert "plan  balanced: micro-batch 8 × 1" in capsys.readouterr().out
    free(
        int(
            plan(plenty.model.config, "cpu", 8, 64, "full", memory=2**40, task="sft", training=OPTIM)
            .profiles[0]
            .estimate.device_bytes
            * 0.85
        )
    )
    little = main([*arguments, "--overwrite"])  # auto is the default
    args = little.args
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 8
    assert args.per_device_train_batch_size < 8 or args.activation_checkpointing or little.memory_args.levers()
    assert little.state.global_step == 2


@pytest.mark.slow
def test_what_is_named_is_not_planned(sft, free):
    main, arguments = sft
    free(1)
    trainer = main([*arguments, "--preset", "cpu", "--dry_run"])
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 8


@pytest.mark.slow
def test_nothing_fits(sft, free):
    main, arguments = sft
    free(2**20)
    with pytest.raises(InputError, match=r"nothing fits the 0\.00 GiB that are free here: .* missing"):
        main(arguments)


@pytest.mark.slow
def test_a_profile_down(sft, free, builtin_model, monkeypatch, caplog):
    """Probed with a model that runs out of memory at more than two samples, it starts again one profile safer."""
    main, arguments = sft
    first = plan(str(builtin_model), "cpu", 8, 64, "full", memory=2**40, task="sft", training=OPTIM).profiles[-1]
    free(int(first.estimate.device_bytes / 0.895))  # balanced fills 0.90 of it, safe only 0.85
    from hf_memopt.recipe import job as jobs

    load, begun = jobs.load_model, []

    def load_limited(job, *args, **kwargs):
        model = load(job, *args, **kwargs)
        begun.append((job.planned.summary.split(":")[0], job.args.per_device_train_batch_size))
        backbone = model.base_model  # which TRL's head calls
        forward = backbone.forward

        @wraps(forward)
        def limited(input_ids, **inputs):
            if len(input_ids) == 8 and not isinstance(input_ids, FakeTensor):  # a prediction's are no memory
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(input_ids=input_ids, **inputs)

        backbone.forward = limited
        return model

    monkeypatch.setattr(jobs, "load_model", load_limited)
    _until_it_stands(lambda argv=None: main(argv or arguments))
    assert [name for name, _ in begun] == ["balanced", "safe"] and begun[0][1] == 8
    assert "starting again with the profile safe" in caplog.text
    report = json.loads((Path(arguments[5]) / "memory_report.json").read_text())
    batch = report["settings"]
    assert batch["per_device_train_batch_size"] * batch["gradient_accumulation_steps"] == 8
    assert report["global_step"] == 2


def test_the_lowest_profile_has_no_way_down():
    auto.step_down(["--x"], None, 2, 8)
    with pytest.raises(StartAgain) as again:
        auto.step_down(["--x"], "safe", 2, 8)
    assert again.value.argv == ["--x", "--profile", "safe"]


def test_what_counts_as_free(monkeypatch):
    """The cards are not here: their readings are made up."""

    class Card:
        def __init__(self, device=None):
            pass

        def read(self):
            return readers.Reading(0, 0, 0, 0, 4 * 2**30, 24 * 2**30, 0, 0, 3 * 2**30)

    monkeypatch.setattr(readers, "Reader", Card)
    context = 512 * 2**20  # which this process has already taken of the free memory, and which the estimate counts
    assert auto.usable_memory(get_hardware("rtx_4090")) == 20 * 2**30 + context - 256 * 2**20
    assert auto.usable_memory(get_hardware("apple_m4_max_64gb")) == 3 * 2**30 - 256 * 2**20  # the host's own is less
    assert auto.usable_memory(get_hardware("cpu")) == 2 * 2**30
    monkeypatch.setattr(Card, "read", lambda self: readers.Reading(0, 0, 0, 0, 0, 24 * 2**30, 0, 0, 0))
    assert auto.usable_memory(get_hardware("cpu")) == 1


def test_several_processes_do_not_plan(monkeypatch):
    assert auto.plans_here("auto") and not auto.plans_here("rtx_4090")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not auto.plans_here("auto")
