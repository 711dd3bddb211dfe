"""What a plan spends CPU time on, told without a clock: threads, traces and imports."""

import subprocess
import sys

import pytest
import torch
from test_plan import config, request_for

from hf_memopt.estimator import job as jobs
from hf_memopt.estimator.api import estimate_job


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
    request = request_for(config(2))
    estimate_job(request.job(request.choices()[0]))
    assert set(threads) == {1} and torch.get_num_threads() == 2


def test_the_command_line_imports_no_compiler():
    code = (
        "import sys; from hf_memopt.cli.estimate import import_libraries; import_libraries(); "
        "import torch; print(torch.compile.__module__, 'torch._inductor.compile_fx' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["torch", "False"]
