"""The estimator over every model type that transformers can train: python benchmarks/estimator_model_types.py

For every task and every model type that transformers' auto classes map to a model, a tiny configuration is made from
the fields of its class (tiny_models.py) and estimated, in a process of its own with a time limit. A row says whether
the job was answered, refused with a sentence, or failed with another error. Where it was answered, the same step is
measured: two steps of the real Trainer on real tensors, the sum of the allocator's events.

Args: names of tasks or model types to run only these and keep the other rows; --measure N to measure every N-th
answer (0: none); --seconds per job.
"""

import argparse
import json
import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

from record import RESULTS, record
from rich.progress import track
from tiny_models import LENGTH, measured_peak, tiny_config

MICRO = 2
LARGEST = 2**32  # predicted bytes of what is measured


def jobs():
    """(task, model type, configuration class) of everything that the tasks' auto classes map."""

    import transformers

    from hf_memopt.estimator.tracing.tasks import TASKS

    seen = set()
    for task, row in TASKS.items():
        for kind, model in getattr(transformers, row.auto_class)._model_mapping.items():
            if (kind, model) not in seen:
                seen.add((kind, model))
                yield task, kind.model_type, kind


def estimated(task: str, model_type: str, kind: type, measure: bool) -> dict:
    """A row."""
    row = {"outcome": "no model", "reason": f"transformers cannot make a {kind.__name__} without arguments"}
    for make in (tiny_config, partial(tiny_config, small=False), lambda kind: kind()):
        if make not in (tiny_config,) and row["outcome"] == "refused" and "cannot be built" not in row["reason"]:
            break
        try:
            config = make(kind)
        except Exception:  # validators of the sizes' relations raise anything; the class's own sizes come next
            continue
        start = time.perf_counter()
        row = _answer(config, task)
        row["seconds"] = round(time.perf_counter() - start, 2)
        if row["outcome"] == "answered":
            small = row["predicted_bytes"] < LARGEST  # a class of its own sizes may not fit any machine
            return row | (_measured(config, task, row["predicted_bytes"]) if measure and small else {})
    if "cannot be built" in row["reason"] and (error := _building_error(kind, task)):
        return row | {"outcome": "no model", "reason": f"of its class's defaults transformers makes no model: {error}"}
    if measure and row["outcome"] != "no model":
        row |= _measured(config, task, 0)
    return row


def again(row: dict) -> dict:
    """What is predicted now, or why nothing is."""
    kind = next(kind for task, name, kind in jobs() if (task, name) == (row["task"], row["model_type"]))
    now = estimated(row["task"], row["model_type"], kind, measure=False)
    return {name: value for name, value in now.items() if name != "seconds"}


def _building_error(kind: type, task: str) -> str:
    """Why transformers itself cannot build a model from a configuration's defaults; empty where it can."""
    import torch
    import transformers

    from hf_memopt.estimator.tracing.tasks import TASKS

    try:
        with torch.device("meta"):
            getattr(transformers, TASKS[task].auto_class).from_config(kind())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _answer(config, task: str) -> dict:
    from hf_memopt.errors import InputError
    from hf_memopt.estimator import estimate

    try:
        result = estimate(config, {"per_device_train_batch_size": MICRO}, LENGTH, "cpu", task=task)
    except InputError as error:
        return {"outcome": "refused", "reason": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return {"outcome": "failed", "reason": reason}
    return {"outcome": "answered", "predicted_bytes": result.peak_allocated_bytes}


def _measured(config, task: str, predicted: int) -> dict:
    try:
        measured = measured_peak(config, task, MICRO)
    except Exception as error:  # the real job may fail where the estimate did not
        return {"measuring_failed": f"{type(error).__name__}: {error}"[:300]}
    return {"measured_bytes": measured} | ({"error": round(predicted / measured - 1, 5)} if predicted else {})


def limited(function, seconds: int, *args) -> dict:
    """A function's result from a forked process that is killed after some time."""
    with tempfile.NamedTemporaryFile("r") as result:
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as quiet:
                os.dup2(quiet.fileno(), 1)
                os.dup2(quiet.fileno(), 2)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor: others may be using the machine
            Path(result.name).write_text(json.dumps(function(*args)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        text = result.read()
    if text:
        return json.loads(text)
    reason = f"more than {seconds} s of CPU time" if status == signal.SIGPROF else f"ended with status {status}"
    return {"outcome": "failed", "reason": reason}


def main() -> None:
    import transformers

    from hf_memopt.estimator import estimate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--measure", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=120)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    estimate("smollm2-135m", {}, 8, "cpu")  # imports what every process needs
    chosen = [job for job in jobs() if not options.names or {job[0], job[1]} & set(options.names)]
    rows = []
    for number, (task, model_type, kind) in enumerate(track(chosen, description="model types")):
        measure = options.measure > 0 and number % options.measure == 0
        row = limited(estimated, options.seconds, task, model_type, kind, measure)
        rows.append({"task": task, "model_type": model_type, **row})
    print(Counter(row["outcome"] for row in rows))
    path = RESULTS / "estimator_model_types.json"
    old = json.loads(path.read_text())["rows"] if options.names else []
    new = {(row["task"], row["model_type"]) for row in rows}
    rows += [row for row in old if (row["task"], row["model_type"]) not in new]
    rows.sort(key=lambda row: (row["model_type"], row["task"]))
    record("estimator_model_types", rows)


if __name__ == "__main__":
    main()
