"""Random jobs: every estimate satisfies the physical checks and ignores no setting, or is refused in one sentence; a
larger batch, or longer samples, never take less."""

import json
import random
from collections import Counter

import pytest
from random_jobs import random_job

from hf_memopt.cli.estimate import settle_job
from hf_memopt.cli.settings import command_spec
from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.spec_job import spec_job

IN_CI, IN_SWEEPS, CHUNK = 60, 600, 10
SHALLOW = (2, 3)
FOUND = (464, 1368, 1372)


def _job(number: int, options: dict, folder, **changes):
    """The resolved job of random_job()'s options.

    Args:
        changes: its length or batch, in place of those that were drawn.
    """
    options = dict(options)
    file = folder / f"{number}.json"
    file.write_text(json.dumps(options.pop("config")), encoding="utf-8")
    batch = changes.pop("batch", None)
    if batch is not None:
        options["settings"] = [f"per_device_train_batch_size={batch}", *options["settings"][1:]]
    return spec_job(settle_job(command_spec(model=str(file), **options | changes)))


def _estimated(job):
    (result,) = estimate_jobs([job], speed=False)
    if isinstance(result, InputError):
        raise result
    return result


def _check_settings(job, texts: list[str]) -> None:
    """Every setting is in the job."""
    spec = command_spec(texts, model="any")
    for name, value in spec.training.items():
        assert job.fields[name] == value, f"{name}={value} is {job.fields.get(name)}"
    for name in spec.named:
        assert getattr(job.memory_args, name) == getattr(spec.memory_args, name), name
    for name, value in spec.lora.items():
        assert getattr(job.peft_config, name) == value, name
    for name in ("dtype", "attn_implementation", "padded"):
        assert getattr(spec, name) in (None, False, getattr(job, name)), name


def check(number: int, folder, *depths) -> str:
    """Check the properties of a random job.

    Returns:
        answered or refused.
    """
    options = random_job(number, *depths)
    try:
        job = _job(number, options, folder)
        smaller = _estimated(job)
    except InputError as refusal:
        text = str(refusal)
        assert text and "\n" not in text and "Traceback" not in text and len(text) < 500, text
        return "refused"
    _check_settings(job, options["settings"])
    if random.Random(number).random() < 0.5:
        larger = _job(number, options, folder, seq_len=2 * options["seq_len"])
    else:
        larger = _job(number, options, folder, batch=2 * job.fields["per_device_train_batch_size"])
    more = _estimated(larger)
    # What is reserved for it follows from the order of sizes, and may fall.
    assert more.peak_allocated_bytes >= smaller.peak_allocated_bytes, "more takes less"
    return "answered"


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("number", range(IN_CI))
def test_a_random_job(number, tmp_path):
    check(number, tmp_path, SHALLOW)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("number", FOUND)
def test_a_job_that_was_wrong_once(number, tmp_path):
    """Adagrad's states beside offloaded weights; an evaluation without the next batches; Adagrad under ZeRO-3."""
    check(number, tmp_path)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, IN_SWEEPS, CHUNK))
def test_many_random_jobs(first, tmp_path):
    """Most are answered: a generator of refusals would show nothing."""
    failed, outcomes = {}, Counter()
    for number in range(first, first + CHUNK):
        try:
            outcomes[check(number, tmp_path)] += 1
        except Exception as error:
            failed[number] = f"{type(error).__name__}: {error}"
    print(f"jobs {first} to {first + CHUNK - 1}: {dict(outcomes)}, failed: {failed}")
    assert not failed
    assert outcomes["answered"]
