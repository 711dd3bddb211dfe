"""`hf-memopt advise`: what ran out of memory, when, why, and what to change; or what made a run slow."""

import sys
from collections import deque
from dataclasses import replace

from hf_memopt.cli.estimate import import_libraries, settle_job
from hf_memopt.cli.output import print_json
from hf_memopt.errors import InputError
from hf_memopt.job.spec import JobSpec
from hf_memopt.reports.advice import LARGEST_TEXT, SLOW, Advice, advise, advise_on_text, decode_log
from hf_memopt.terminal import say
from hf_memopt.units import gib

_LARGEST_PIPE = 2**30  # bytes


def run_advise(source: str, job: JobSpec | None, as_json: bool) -> int:
    """Print the advice; 0 where there is some, 1 where nothing is wrong with memory or speed.

    Args:
        source: a run's folder, a log, the error itself, or - for stdin.
        job: the run's, so that savings can be predicted.
    """
    advice = advise_on_text(_piped()) if source == "-" else advise(source)
    if advice is not None and advice.what != SLOW and job:
        advice = replace(advice, changes=_predict_savings(job) or advice.changes)
    if as_json:
        print_json(advice.to_dict() if advice else {"what": None})
    elif advice is None:
        print("nothing to explain: no out-of-memory error, and no run that waits for data or its device")
    else:
        _print(advice)
    return 0 if advice else 1


def _piped() -> str:
    """The end of what came on stdin.

    Raises:
        InputError: more came than a log holds.
    """
    parts, length, total = deque(), 0, 0
    while part := sys.stdin.buffer.read(2**20):
        parts.append(part)
        length, total = length + len(part), total + len(part)
        while length - len(parts[0]) >= LARGEST_TEXT:
            length -= len(parts.popleft())
        if total > _LARGEST_PIPE:
            raise InputError(f"more than {_LARGEST_PIPE // 2**30} GiB came on stdin: give the log as a file")
    return decode_log(b"".join(parts)[-LARGEST_TEXT:])


def _predict_savings(spec: JobSpec) -> list[dict]:
    """The three changes that are predicted to save most, and smaller models where this one has no weights yet."""
    import_libraries()
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.spec_job import spec_job
    from hf_memopt.estimator.suggestions import largest_savings, smaller_models
    from hf_memopt.estimator.tracing.parallel import on_all_cores

    job = spec_job(settle_job(spec))
    estimate = estimate_job(job, on_all_cores)
    savings = largest_savings(job, estimate, map_fn=on_all_cores) + smaller_models(job, estimate, on_all_cores)
    return [{"change": saving.change, "saved_bytes": saving.saved_bytes} for saving in savings]


def _print(advice: Advice) -> None:
    say(f"what: {advice.what}: {advice.cause}" if advice.what != "not memory" else f"what: {advice.cause}")
    if advice.stage or advice.step is not None:
        after = "" if advice.step is None else f" after {advice.step} steps" if advice.step else " in the first step"
        print(f"when: {advice.stage or 'unknown phase'}{after}")
    say(f"why:  {advice.why}")
    if advice.figures:
        sizes = (f"{name.removesuffix('_bytes')} {gib(size)}" for name, size in advice.figures.items())
        print(f"      the message says: {', '.join(sizes)}")
    for number, change in enumerate(advice.changes, 1):
        saved = f" (predicted to save {gib(change['saved_bytes'])})" if change.get("saved_bytes") else ""
        say(f"try {number}: {change['change']}{saved}")
    if advice.what != SLOW and not any(change.get("saved_bytes") for change in advice.changes):
        print("Add the run's --model, --preset, --method and --seq-len to see predicted savings.")
