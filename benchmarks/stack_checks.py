"""What hf_memopt does on the libraries of one environment: python benchmarks/stack_checks.py [CHECK …]

benchmarks/stacks.py runs all checks with each environment's Python, .ci/run some on the oldest libraries. Prints a
line of JSON for each check: {"check", "result": works | refused | failed, "says", …}. A sentence of hf_memopt's own is
a refusal, anything else that ends a check is a failure.
"""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SCRIPTS = ("run_clm", "run_glue", "run_mlm", "run_ner", "run_swag")  # of tests/scripts
TRUTHS = 20  # of the jobs of estimator_cpu.py, those that train in seconds
LARGEST_VOCABULARY = 4000


def command(*argv: str, **more) -> subprocess.CompletedProcess:
    """A command of this environment, from an empty folder."""
    program = [str(Path(sys.executable).parent / argv[0]), *argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            program, cwd=more.pop("cwd", folder), capture_output=True, text=True, timeout=900, **more
        )


def outcome(done: subprocess.CompletedProcess) -> dict:
    """A command's end: exit code 2 with one line is a refusal."""
    said = [line for line in done.stderr.strip().splitlines() if line.startswith("error: ")]
    if done.returncode == 0:
        return {"result": "works"}
    if done.returncode == 2 and said:
        return {"result": "refused", "says": said[-1].removeprefix("error: ")}
    return {"result": "failed", "says": (done.stderr or done.stdout).strip().rpartition("\n")[2]}


def doctor() -> dict:
    """`hf-memopt doctor`: it has an answer, whatever it finds."""
    done = command("hf-memopt", "doctor", "--json")
    return {"result": "works", "problems": json.loads(done.stdout)["problems"]} if done.stdout else outcome(done)


def cards() -> dict:
    """The tables and files that need no trace."""
    for argv in (("presets",), ("show", "rtx_4090", "--method", "lora"), ("export", "rtx_4090", "out")):
        done = command("hf-memopt", *argv)
        if done.returncode:
            return outcome(done)
    return {"result": "works"}


def preset_script() -> dict:
    """docs/preset_in_your_script.py's way: a preset's arguments in a script of one's own, trained."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    from hf_memopt import get_preset

    preset = get_preset("cpu")
    with tempfile.TemporaryDirectory() as folder:
        args = preset.training_arguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2, effective_batch_size=2, report_to="none"
        )
        rows = Dataset.from_list([{"input_ids": [7] * 16, "labels": [7] * 16}] * 8)
        Trainer(AutoModelForCausalLM.from_config(small(AutoConfig)), args, train_dataset=rows).train()
    return {"result": "works"}


def small(auto, family: str = "llama"):
    return auto.for_model(family, vocab_size=256, num_hidden_layers=2, **JOBS["families"][family])


def recipe() -> dict:
    """`make train`'s job, five steps of it: export, launch, predicted beside measured."""
    with tempfile.TemporaryDirectory() as folder:
        done = command("hf-memopt", "export", "auto", "setup", "--recipe", "pretrain", cwd=folder)
        if done.returncode:
            return outcome(done)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        argv = ["sh", "setup/launch.sh", "--output_dir", "run", "--max_steps", "5", "--eval_on_start", "false"]
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, timeout=900, env={**os.environ, "PATH": path}
        )
        if done.returncode:
            return outcome(done)
        report = json.loads((Path(folder) / "run" / "memory_report.json").read_text())
    measured = report["measured"]["peak_allocated_bytes"]
    if report["estimate"] is None:  # it says why on the screen
        note = next((line for line in done.stdout.splitlines() if "not predicted" in line), "")
        return {"result": "works", "says": note.strip(), "measured": measured}
    return {"result": "works", "predicted": report["estimate"]["peak_allocated_bytes"], "measured": measured}


def injected_oom() -> dict:
    """MemoryTrainer ends with the weights of an undisturbed run after an out-of-memory error in a step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

    from hf_memopt import MemoryTrainer

    rows = [{"input_ids": [number % 200] * 16, "labels": [number % 200] * 16} for number in range(16)]

    def train(fails: bool):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small(AutoConfig))
        forward, calls = model.forward, []

        @functools.wraps(forward)
        def failing(*args, **kwargs):
            calls.append(1)
            if fails and len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(*args, **kwargs)

        model.forward = failing
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, use_cpu=True, max_steps=3, per_device_train_batch_size=4, report_to="none", seed=1
            )
            trainer = MemoryTrainer(model=model, args=args, train_dataset=rows)
            trainer.train()
        return model, [event["event"] for event in trainer.memory_events]

    (plain, _), (recovered, events) = train(False), train(True)
    pairs = zip(plain.parameters(), recovered.parameters(), strict=True)
    apart = max((one - two).abs().max().item() for one, two in pairs)
    worked = "oom_recovered" in events and apart < 1e-5
    return {"result": "works" if worked else "failed", "says": f"{events}, weights {apart:.1e} apart"}


JOBS = tomllib.loads((HERE / "data" / "estimator_cpu.toml").read_text())


def truths():
    """Predicted and real peaks of CPU jobs, a result each."""
    from estimator_cpu import config_of, jobs, truth
    from jobs import lora, with_checkpointing

    from hf_memopt.estimator import estimate
    from hf_memopt.stack.versions import has
    from hf_memopt.stack.vocabulary import spelled

    known = [job for job in jobs() if job[3] <= LARGEST_VOCABULARY]
    for family, setting, length, vocabulary in (known[number * 5 % len(known)] for number in range(TRUTHS)):
        job = JOBS["settings"][setting]
        fields = {"per_device_train_batch_size": 2, **with_checkpointing(job.get("fields", {}))}
        adapters = lora(**job["lora"]) if "lora" in job else None
        name = f"{family}, {setting}, {length} tokens"
        made = (job.get("dtype", "float32"), adapters)
        try:
            config = config_of(family, vocabulary, job["layers"])
        except Exception as error:  # transformers 5.4 makes none of olmo2 beside huggingface_hub 1.33
            reason = f"transformers makes no configuration: {type(error).__name__}"
            yield name, lambda reason=reason: {"result": "not tried", "says": reason}
            continue

        if "8bit" in fields.get("optim", "") and not has("bitsandbytes", "0.50"):
            yield name, lambda: {"result": "not tried", "says": "bitsandbytes has no such optimizer on a CPU"}
            continue

        def measure(config=config, fields=fields, length=length, job=job, made=made):
            dtype, adapters = made
            attention = job.get("attention")
            predicted = estimate(config, fields, length, "cpu", adapters, dtype, attention).peak_allocated_bytes
            measured = truth(config, spelled(fields), length, dtype, adapters, attention)
            within = abs(predicted / measured - 1) <= 0.01
            return {"result": "works" if within else "failed", "predicted": predicted, "measured": measured}

        yield name, measure


def dry_run(name: str) -> dict:
    """A script of tests/scripts, up to train()."""
    from estimator_scripts import argv
    from script_inputs import main as write_inputs

    script = ROOT / "tests" / "scripts" / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        models = [Path(word).name for word in argv(script) if word.startswith("models/")]
        write_inputs(Path(folder), models)
        options = ("dry-run", str(script), "--hardware", "cpu", "--json", "--", *argv(script))
        return outcome(command("hf-memopt", *options, cwd=folder))


def attempt(name: str, check) -> None:
    """Run a check and print its line."""
    from hf_memopt.errors import IncompatibleLibrary, InputError

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result = check()
    except (InputError, IncompatibleLibrary) as refusal:
        result = {"result": "refused", "says": str(refusal)}
    except Exception as error:
        traceback.print_exc()
        result = {"result": "failed", "says": f"{type(error).__name__}: {error}"}
    print(json.dumps({"check": name, **result}), flush=True)


def main() -> None:
    """Run the checks that are named, or every one."""
    sys.path[:0] = [str(HERE), str(ROOT / "tests")]
    checks, asked = (doctor, cards, preset_script, recipe, injected_oom), sys.argv[1:]
    for check in checks:
        if not asked or check.__name__ in asked:
            attempt(check.__name__, check)
    if asked:
        return
    for name in SCRIPTS:
        attempt(f"dry-run {name}", lambda name=name: dry_run(name))
    for name, check in truths():
        attempt(name, check)


if __name__ == "__main__":
    main()
