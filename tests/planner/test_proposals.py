"""What is proposed for a job that does not fit: estimate and plan say the same, and it fits as it is written."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import yaml
from random_jobs import random_job
from test_plan import config, least, spec_for

from hf_memopt.cli.changes import _words, fitting_changes
from hf_memopt.cli.estimate import settle_job
from hf_memopt.cli.foreign import read_job
from hf_memopt.cli.settings import command_spec
from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner import plan
from hf_memopt.planner.plan import plan_job
from hf_memopt.planner.proposals import Proposal
from hf_memopt.planner.settle import left_open

_CARD = {"name": "a small card", "backend": "cuda", "architecture": "8.9", "bandwidth": "1 TB/s"}
_CARD |= {"bf16_flops": "100 TFLOPS", "host_link": "20 GB/s", "peer_link": "20 GB/s"}


def job_that_does_not_fit(number: int, folder):
    """The command line of a random job and its estimate, on a card that has less than it needs."""
    row = random_job(number, depths=(2, 3))
    model = folder / "config.json"
    model.write_text(json.dumps(row["config"]))
    options = {name: row[name] for name in ("method", "seq_len", "strategy")}
    # Logits of so many tokens are larger than a context.
    options |= {"model": str(model), "seq_len": 8 * row["seq_len"], "world_size": row["world_size"]}

    def asked(memory: int, settings=row["settings"], **changed):
        hardware = json.dumps(_CARD | {"memory": memory})
        return command_spec(settings, hardware=hardware, **{**options, **changed})

    estimate = estimate_job(spec_job(settle_job(asked(2**40))))
    share = (0.2, 0.4, 0.6, 0.8)[number % 4]
    memory = int(estimate.device_bytes - share * estimate.peak_allocated_bytes)
    return asked, memory, row["settings"]


def applied(text: str, asked, memory: int, settings: list[str]):
    """The job of a command line with the words of a proposal."""
    moved = {}
    if found := re.match(r"(\d+) × .*?, strategy (\w+)", text):
        moved |= {"world_size": int(found[1]), "strategy": found[2]}
    words = shlex.split(re.sub(r"\([^)]*\)", "", text))
    pairs = [(words[place], words[place + 1]) for place, word in enumerate(words) if word.startswith("--")]
    names = {"--method": "method", "--strategy": "strategy", "--seq-len": "seq_len"}
    moved |= {names[key]: int(value) if key == "--seq-len" else value for key, value in pairs if key in names}
    own = dict(setting.split("=", 1) for setting in settings)
    if "method" in moved:
        own.pop("optim", None)  # the method's own
    own |= dict(value.split("=", 1) for key, value in pairs if key == "--set")
    return asked(memory, [f"{name}={value}" for name, value in own.items()], **moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        5,
        pytest.param(101, marks=pytest.mark.slow),
        *(pytest.param(number, marks=[pytest.mark.slow, pytest.mark.sweep]) for number in range(102, 160)),
    ],
)
def test_estimate_and_plan_propose_the_same_and_it_fits(number, tmp_path):
    try:
        asked, memory, settings = job_that_does_not_fit(number, tmp_path)
        spec = asked(memory)
        settled = settle_job(spec)
        job = spec_job(settled)
    except InputError:
        pytest.skip("refused")
    estimate = estimate_job(job)
    assert estimate.fits is False
    samples = job.fields["per_device_train_batch_size"] * job.fields["gradient_accumulation_steps"]
    proposed = fitting_changes(spec, settled, job, samples, estimate, settle_job)
    try:
        # The same step: a plan's own is of 32 samples.
        whole = samples * settled.preset.batches(job.world_size)
        made = plan_job(replace(spec, effective_batch_size=whole))
    except InputError:
        assert proposed == [] or all(saving.saved_bytes > 0 for saving in proposed)
        return
    if made.profiles:
        needed, first = made.usual.estimate.device_bytes, ""
        assert proposed[0].change
    elif not made.proposals:
        assert proposed == []
        return
    else:
        needed, first = made.proposals[0].device_bytes, " and ".join(made.proposals[0].changes)
    assert proposed[0].change.startswith(first)
    assert estimate.device_bytes - proposed[0].saved_bytes == needed <= memory
    if made.profiles or (made.proposals[0].choice and not made.proposals[0].sketched):
        text = proposed[0].change
        after = estimate_job(spec_job(settle_job(applied(text, asked, memory, settings))))
        assert after.fits and after.device_bytes == needed, text


@pytest.mark.slow
@pytest.mark.parametrize("of_trl", [True, False])
def test_where_nothing_fits_changes_are_looked_for_once(of_trl, monkeypatch, tmp_path):
    """With what another tool's file leaves open, and of a method that was chosen among several."""
    asked, file = [], tmp_path / "job.yaml"
    monkeypatch.setattr(plan, "nearest_changes", lambda spec, *_: asked.append(spec) or [Proposal(["x"], 1)])
    small = config(2, vocab_size=200)
    memory = least(spec_for(small, seq_len=256)) // 2
    small.save_pretrained(tmp_path)
    file.write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path), "dataset_name": "rows", "max_length": 256}))
    given = {"hardware": "cpu", "effective_batch_size": 4, "memory": memory}
    spec = JobSpec(model=small, method="full", seq_len=256, training={"optim": "adamw_torch"}, **given)
    made = plan.plan_job(left_open(read_job(str(file), "full", None, **given)[0]) if of_trl else spec)
    assert not made.profiles and made.nearest == ["x: 0.00 GiB"]
    assert len(asked) == 1 and "optim" not in asked[0].training


def test_another_models_proposal_is_its_change_alone():
    asked = JobSpec(model="llama-3.1-8b")
    assert _words(Proposal(["llama-3.2-1b instead", "more"], 1), asked, asked, None) == "llama-3.2-1b instead and more"
