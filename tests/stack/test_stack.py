"""Versions of other libraries: renamed fields, and answers for another environment than this one."""

import configparser
import os
import tomllib

import pytest
from conftest import ROOT, run_forked
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset
from hf_memopt.stack import versions, vocabulary
from hf_memopt.stack.versions import TRIED, beyond_tried, name_stack, stack_has
from hf_memopt.stack.vocabulary import RENAMED, newest, spelled, written


def of(version: str):
    """has() of another version of transformers."""
    return lambda package, since: versions._numbers(version) >= versions._numbers(since)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "activation_checkpointing": st.booleans(),
        "activation_checkpointing_kwargs": st.just({"use_reentrant": False}),
        "train_sampling_strategy": st.sampled_from(["random", "group_by_length"]),
        "warmup_steps": st.sampled_from([0.05, 0.5, 10, 200]),
        "learning_rate": st.floats(0, 1),
        "bf16": st.booleans(),
    },
)


@settings(deadline=None)
@given(FIELDS, st.sampled_from(["4.57", "5.0", "5.1", "5.2", "5.22", "5.23", "5.24"]))
def test_what_an_old_version_is_told_means_the_same(fields, version):
    """Through any version's names and back; what asks for nothing may be left out."""
    asked = {name: value for name, value in fields.items() if (name, value) != ("train_sampling_strategy", "random")}
    back = newest(spelled(fields, of(version)))
    assert {name: value for name, value in back.items() if value != "random"} == asked


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.old)
def test_names_change_where_the_version_does(row):
    value = {"group_by_length": "group_by_length", "warmup_ratio": 0.1}.get(row.old, True)
    before = ".".join(map(str, [int(part) for part in row.since.split(".")][:1])) + ".0"
    before = "4.57" if row.since == "5.0" else before
    assert row.old in spelled({row.new: value}, of(before))
    assert spelled({row.new: value}, of(row.since)) == {row.new: value}


def test_two_values_of_one_field():
    with pytest.raises(InputError, match="warmup_steps's old name, and warmup_steps=20: leave one"):
        newest({"warmup_ratio": 0.1, "warmup_steps": 20})
    assert newest({"warmup_ratio": 0.1, "warmup_steps": 0}) == {"warmup_steps": 0.1}  # its default
    assert newest({"gradient_checkpointing": None, "bf16": True}) == {"bf16": True}


def test_old_names_make_arguments(tmp_path):
    args = get_preset("cpu").training_arguments(
        output_dir=str(tmp_path), warmup_ratio=0.1, group_by_length=True, gradient_checkpointing=True
    )
    assert args.warmup_steps == 0.1 and args.train_sampling_strategy == "group_by_length"
    assert vocabulary.checkpoints_activations(args)


def test_a_stack_has_its_own_words(monkeypatch):
    monkeypatch.setattr(versions, "named", {})
    (sentence,) = name_stack(["transformers==5.5"])
    assert "settings are written for 5.5" in sentence and "--with 'transformers==5.5'" in sentence
    assert not stack_has("transformers", "5.16")
    assert written({"activation_checkpointing": True}) == {"gradient_checkpointing": True}
    assert name_stack([f"transformers=={versions.metadata.version('transformers')}"]) == []
    assert written({"activation_checkpointing": True}) == {"activation_checkpointing": True}


@pytest.mark.slow
def test_plan_and_estimate_for_another_stack(tmp_path):
    done = run_forked(
        "hf-memopt",
        "estimate",
        "gpt2",
        "--hardware",
        "t4",
        "--stack",
        "transformers==5.5",
        "--set",
        "activation_checkpointing=true",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert '"gradient_checkpointing": true' in done.stdout and "settings are written for 5.5" in done.stderr


def test_what_is_newer_than_was_tried_is_said(monkeypatch):
    assert beyond_tried() == []
    monkeypatch.setattr(versions, "installed", lambda package: (6, 0) if package == "transformers" else None)
    monkeypatch.setattr(versions.metadata, "version", lambda package: "6.0")
    assert beyond_tried() == ["transformers 6.0 is newer than 5.24.0, the newest version tried: it may differ"]


def test_tried_versions_are_those_that_install():
    """setup.cfg's floors are the oldest tried ones, and an environment of benchmarks/stacks.py has each."""
    from packaging.requirements import Requirement

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [*config["options"]["install_requires"].split("\n")]
    lines += [line for extra in config["options.extras_require"].values() for line in extra.split("\n")]
    floors = {}
    for line in filter(lambda line: ">=" in line, lines):
        requirement = Requirement(line)
        floors[requirement.name] = next(one.version for one in requirement.specifier if one.operator == ">=")
    stacks = tomllib.loads((ROOT / "benchmarks" / "data" / "stacks.toml").read_text(encoding="utf-8"))
    for package, (oldest, _) in TRIED.items():
        length = len(floors[package].split("."))
        assert oldest.split(".")[:length] == floors[package].split(".") or f"{oldest}".startswith(floors[package])
    assert any(stack["transformers"].startswith("4.57") for stack in stacks.values())
    assert any(stack["transformers"] == TRIED["transformers"][1] for stack in stacks.values())


def test_versions_that_no_row_could_mend_are_named(monkeypatch):
    from hf_memopt.estimator import private_names
    from hf_memopt.estimator.private_names import Part

    monkeypatch.setattr(private_names, "has", lambda package, since: False)
    (sentence,) = private_names.faults(Part.EVERY_JOB)
    assert "predictions of every job need torch 2.13 or newer, and " in sentence
    (sentence,) = private_names.faults(Part.DEEPSPEED)
    assert "predictions of deepspeed need deepspeed 0.19.4 or newer, and " in sentence


def test_ignored_keys_of_checkpointing_are_refused(monkeypatch):
    """Layers of transformers before 5.16 take and ignore every_n_layers."""
    from hf_memopt.estimator import training_fields

    kwargs = {"use_reentrant": False, "every_n_layers": 2}
    fields = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    assert training_fields.read_fields(fields)["activation_checkpointing_kwargs"] == kwargs
    monkeypatch.setattr(training_fields, "has", lambda package, since: False)
    with pytest.raises(InputError, match=r"every_n_layers=2 needs transformers 5\.16 or newer"):
        training_fields.read_fields(fields)


def test_forks_without_autograd_leave_their_share(monkeypatch):
    """As in builds of torch for accelerators, whose autograd raises in a fork."""
    from hf_memopt.estimator.tracing import parallel

    monkeypatch.setattr(parallel, "_has_autograd", lambda: False)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    here = os.getpid()
    assert parallel.on_all_cores(lambda item: (item, os.getpid()), range(5)) == [(item, here) for item in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("option", [["--memory", "8"], ["--host-memory", "32"], ["--export", "run"]])
def test_frames_max_refuses_what_it_would_ignore(option, tmp_path):
    done = run_forked(
        "hf-memopt", "plan", "qwen2.5-vl-3b", "--hardware", "t4", "--frames", "max", *option, cwd=tmp_path
    )
    assert done.returncode == 2 and f"leave {option[0]} out" in done.stderr
