"""What recipes print and exports write, whole and frozen: each row, each file, each sentence."""

import json
import re
from types import SimpleNamespace

import frozen
import pytest
import torch
from conftest import ROOT
from transformers import TrainingArguments

from hf_memopt import MemoryArguments
from hf_memopt.data.bad_rows import BadRows
from hf_memopt.estimator.result import Estimate
from hf_memopt.presets import get_preset
from hf_memopt.units import GIB, MIB

ESTIMATE = Estimate(
    *(5 * GIB, 6 * GIB, 7 * GIB, 3 * GIB, "backward"),
    {"parameters": 2 * GIB, "activations": 3 * GIB, "workspace": 2**20, "other": 2**20 + 1},
    *({}, 8 * GIB, {}, ("a note",)),
    timeline=tuple(("forward: layer" if n % 3 else "backward", n * MIB) for n in range(1300)),
)


def trained(folder, rows=100, **fields):
    """A job and a trainer as a recipe's summary sees them."""
    args = TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to="none", **fields)
    weight = torch.nn.Parameter(torch.zeros(30, 40), requires_grad=False)
    model = SimpleNamespace(
        parameters=lambda: [weight, torch.nn.Parameter(torch.zeros(1000))],
        config=SimpleNamespace(_attn_implementation="sdpa"),
    )
    recipe = SimpleNamespace(dry_run=True, streaming=False, shuffle_buffer_size=1000, samples=0)
    job = SimpleNamespace(
        args=args,
        recipe=recipe,
        memory_args=MemoryArguments(),
        preset=get_preset("rtx_4090", "lora"),
        profile=None,
        planned=None,
        bad_rows=BadRows(),
        model_name="a/model",
        argv=["sft.py", "--hub_token", "secret", "--n", "3"],
        new_folders=(),
        given=set(),
    )
    state = SimpleNamespace(global_step=12, log_history=[{"loss": 1.0}, {"train_runtime": 34.5}, {"train_runtime": 1}])
    trainer = SimpleNamespace(
        args=args,
        later_steps=(11, 11_000, 22.0),
        train_dataset=list(range(rows)),
        eval_dataset=None,
        model=model,
        batches=2,
        packing=None,
        state=state,
        memory_events=[],
        data_wait_share=None,
        get_train_dataloader=lambda: range(rows // 8),
    )
    return job, trainer


def test_what_a_recipe_says_of_its_job(tmp_path, monkeypatch, capsys):
    from hf_memopt.recipe import summary

    monkeypatch.setattr("hf_memopt.recipe.summary.remove_new_folders", lambda job: None)
    monkeypatch.setattr("hf_memopt.recipe.summary.predict", lambda *args, **about: predicted)
    found = {}
    full = {"capacity_bytes": 4 * GIB}
    for name, fields, changes, estimate in (
        ("plain", {}, {}, ESTIMATE),
        ("not predicted", {}, {}, None),
        ("too large", {}, {}, Estimate(**{**vars(ESTIMATE), **full})),
        ("few rows", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, {"rows": 30}, None),
        ("odd rows", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, {"rows": 101}, None),
        ("dropped", {"per_device_train_batch_size": 4, "dataloader_drop_last": True}, {"rows": 101}, None),
        ("packed", {}, {"packing": 512}, None),
        ("stream", {"dataloader_num_workers": 3}, {"stream": True}, None),
        ("budget", {}, {"budget": 4096}, None),
        ("profile", {}, {"profile": "balanced", "held_out": 5}, None),
    ):
        predicted = estimate
        job, trainer = trained(tmp_path, changes.get("rows", 100), **fields)
        job.profile, trainer.packing = changes.get("profile"), changes.get("packing")
        if "stream" in changes:
            trainer.train_dataset, job.recipe.streaming = iter(()), True
        if "budget" in changes:
            job.memory_args = MemoryArguments(max_tokens_per_batch=4096, loss_chunk_size=512)
        if "held_out" in changes:
            trainer.eval_dataset, job.planned = [1] * 5, SimpleNamespace(summary="a plan")
        assert summary.announce(job, trainer, 256, [("clips", "of 8 frames")]) is estimate
        lines = capsys.readouterr().out.splitlines()
        found[name] = [line for line in lines if not line.startswith(" loading")]  # of this machine's memory
    frozen.check("announced", found)


@pytest.mark.slow
def test_what_a_recipe_reports(tmp_path, capsys, monkeypatch):
    """memory_report.json without what is of the day or the machine, and the lines that are printed."""
    from hf_memopt.recipe import summary

    monkeypatch.setenv("COLUMNS", "100")
    measured = {"peak_host_bytes": 2 * GIB, "peak_allocated_bytes": 4 * GIB, "peak_reserved_bytes": 0}
    monkeypatch.setattr("hf_memopt.recipe.summary.measured_peaks", measured.copy)
    found = {}
    events = [
        {"event": "oom_recovered", "stage": "train", "micro_batch_after": 4, "step": 1, "message": "out of memory"},
        {"event": "oom_recovered", "stage": "eval", "micro_batch_after": 1, "step": 2, "message": "out of memory"},
        {"event": "oom_recovered", "stage": "train", "micro_batch_after": 2, "step": 3, "message": "out of memory"},
    ]
    for name, estimate, losses, answered, waited, counted in (
        ("plain", ESTIMATE, {0: 2.0, 12: 1.5}, [], None, 0),
        ("short of memory", ESTIMATE, {5: 2.0}, events, 0.256, 3 * GIB),
        ("not predicted", None, {}, events[1:2], 0.0, 0),
    ):
        job, trainer = trained(tmp_path / name.replace(" ", "_"))
        trainer.memory_events, trainer.data_wait_share = answered, waited
        peaks = SimpleNamespace(bytes=counted, batch=None, phases={"forward": 5})
        (tmp_path / name.replace(" ", "_") / "out").mkdir(parents=True)
        summary.finish(job, trainer, losses, estimate, peaks)
        report = json.loads((tmp_path / name.replace(" ", "_") / "out" / "memory_report.json").read_text())
        for today in ("date", "versions", "settings", "memory_arguments"):
            report.pop(today)
        timeline = report["predicted_timeline"]
        report["predicted_timeline"] = [len(timeline), timeline[:3], timeline[-2:]]
        printed = capsys.readouterr().out.replace(str(tmp_path), "").splitlines()
        found[name] = {"report": report, "printed": [re.sub(r"\s+", " ", line) for line in printed]}
    frozen.check("reported", found)


EXPORTS = (
    ("t4",),
    ("t4", "--target", "slurm", "--recipe", "dpo", "--method", "lora"),
    ("rtx_4090", "--yaml-only"),
    ("h100_80gb_x8", "--strategy", "zero3", "--sequence-parallel", "4", "--method", "lora"),
    ("h100_80gb_x8", "--strategy", "zero2", "--machines", "2"),
    ("a100_80gb_x8", "--strategy", "fsdp2", "--yaml-only"),
    ("a100_80gb_x8", "--strategy", "zero3", "--yaml-only"),
    ("a100_80gb", "--target", "skypilot", "--", "--max_steps", "3"),
    ("t4", "--target", "hf-jobs"),
    ("cpu_x2", "--recipe", "pretrain"),
    ("rtx_4090", "--recipe", "sfft"),
    ("rtx_4090", "--target", "slurm", "--yaml-only"),
    ("rtx_4090", "--sequence-parallel", "2"),
    ("rtx_4090", "--machines", "2"),
    ("h100_80gb_x8", "--machines", "0"),
    ("rtx_4090", "--nvme-path", "/nowhere"),
)


def test_what_an_export_writes(command, tmp_path):
    found = {}
    for number, (preset, *options) in enumerate(EXPORTS):
        folder = tmp_path / str(number)
        code, out, err = command("export", preset, folder, *options)
        lines = [
            line for line in out.splitlines() if not line.startswith("note:")
        ]  # of packages that are missing here
        files = {path.name: path.read_text().splitlines() for path in sorted(folder.glob("*"))}
        text = json.dumps([code, lines, err, files]).replace(str(tmp_path), "HERE").replace(str(ROOT), "PROJECT")
        found[" ".join((preset, *options))] = json.loads(text)
    frozen.check("exports", found)
