"""What a plan spends CPU time on: threads, traces and imports are counted, and no time is measured."""

import os
import subprocess
import sys
from collections import Counter
from unittest import mock

import pytest
import torch
from test_plan import config, spec_for
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memopt import estimate
from hf_memopt.estimator import job as jobs
from hf_memopt.estimator.accounting import fake_outputs
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.tracing import parallel
from hf_memopt.planner import sketch
from hf_memopt.planner.choice_jobs import baseline_jobs, choice_job
from hf_memopt.planner.choices import list_choices


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_trace_computes_in_one_thread(monkeypatch, two_threads):
    threads, make_model = [], jobs.make_model

    def noted(*args):
        threads.append(torch.get_num_threads())
        return make_model(*args)

    monkeypatch.setattr(jobs, "make_model", noted)
    spec = spec_for(config(2))
    estimate_job(choice_job(spec, list_choices(spec)[0]))
    assert set(threads) == {1} and torch.get_num_threads() == 2


@pytest.mark.slow
def test_the_command_line_imports_no_compiler():
    code = (
        "import sys; from hf_memopt.cli.estimate import import_libraries; import_libraries(); "
        "import torch; print(torch.compile.__module__, 'torch._inductor.compile_fx' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["torch", "False"]


@pytest.mark.slow
def test_fake_collectives_are_asked_for_once_and_programs_never(monkeypatch):
    pytest.importorskip("deepspeed")
    collectives, asked = [], FakeTensorMode.dispatch

    def dispatch(self, func, *args, **kwargs):
        if func in known:
            collectives.append(func)
        return asked(self, func, *args, **kwargs)

    def zero3():
        collectives.clear()
        fields = {"per_device_train_batch_size": 1, "bf16": True}
        found = estimate(config(3), fields, 64, "rtx_4090", world_size=2, strategy="zero3")
        return found.to_dict(), Counter(collectives)

    known = set(fake_outputs._COLLECTIVES)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)  # which these tests set for real engines
    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    monkeypatch.setattr(subprocess, "Popen", None)
    found, often = zero3()
    monkeypatch.setattr(fake_outputs, "_COLLECTIVES", set())
    without, oftener = zero3()
    assert found == without
    assert often.keys() == oftener.keys() and sum(oftener.values()) > 10 * sum(often.values())


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    monkeypatch.setattr(parallel, "_can_fork", lambda: True)
    monkeypatch.setattr(parallel, "_warm", True)


def test_one_job_is_traced_in_this_process(two_cores):
    assert parallel.on_all_cores(lambda _: os.getpid(), [1, 2]) == [os.getpid()] * 2
    assert len(set(parallel.on_all_cores(lambda _: os.getpid(), [1, 2, 3]))) == 2


@pytest.mark.slow
def test_jobs_with_the_same_batch_are_traced_by_the_same_process(two_cores):
    spec = spec_for(config(8))
    jobs = baseline_jobs(spec, list_choices(spec))
    with mock.patch.object(sketch, "on_all_cores", side_effect=parallel.on_all_cores) as mapped:
        sketch.traced_jobs(jobs)
    items = mapped.call_args.args[1]
    batches = [
        {items[number][0].fields["per_device_train_batch_size"] for number in share}
        for share in parallel._shares(len(items), 2)
    ]
    assert batches == [{1}, {2}]


@pytest.mark.slow
def test_fake_marks_of_the_profiler_are_not_asked_for(monkeypatch):
    asked, dispatch = [], FakeTensorMode.dispatch

    def noted(self, func, *args, **kwargs):
        asked.append(func)
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    fields = {"per_device_train_batch_size": 1, "bf16": True}
    estimate(config(3), fields, 64, "rtx_4090", world_size=2, strategy="fsdp2")
    assert asked and not [func for func in asked if func.namespace == "profiler"]
