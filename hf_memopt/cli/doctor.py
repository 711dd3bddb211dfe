"""`hf-memopt doctor`: this machine, what would be used on it, what is missing; and faults of configuration files."""

import contextlib
import logging
import platform
import shutil
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from hf_memopt.cli.foreign import examine_foreign
from hf_memopt.cli.output import print_json, print_table
from hf_memopt.compatibility.config_files import examine_files
from hf_memopt.errors import InputError
from hf_memopt.hardware.compiler import abandoned_locks, compiler, has_libaio
from hf_memopt.hardware.measured import measured_on
from hf_memopt.packages import EXTRAS, how_to_install, is_installed
from hf_memopt.stack.versions import MPS_4BIT, TRIED, beyond_tried, has
from hf_memopt.units import gib

# What setup.cfg always installs: without it something is wrong.
_REQUIRED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
# Package -> what needs it.
_PACKAGES = {
    "torch": "everything",
    "transformers": "everything",
    "accelerate": "everything",
    "peft": "methods lora and qlora",
    "bitsandbytes": "method qlora and 8-bit optimizers",
    "datasets": "the recipes",
    "matplotlib": "reports and --plot",
    "deepspeed": "the zero strategies",
    "trl": "recipes sft, dpo and grpo, --task",
    "av": "recipe video_sft",
    "gradio": "hf-memopt ui",
    "torchao": "precision fp8, optim adamw_torch_8bit and adamw_torch_4bit",
    "flash_attn": "attention flash_attention_2",
    "flash_attn_interface": "attention flash_attention_3",
    "liger_kernel": "use_liger_kernel",
    "kernels": "attention kernels from the hub",
}
# Packages of which one version was tried (constraints.txt); of others a range (stack.versions), or none.
_TESTED = {"matplotlib": "3.11.2", "av": "18.1.0", "gradio": "6.31.0", "torchao": "0.18.0"}


def check_files(files: list[str], as_json: bool) -> int:
    """Print every fault of each file: 0 if there is none, 2 if there is any."""
    foreign = {file: examined for file in files if (examined := examine_foreign(file))}
    checked = examine_files(file for file in files if file not in foreign) | foreign
    faulty = any(examined.faults for examined in checked.values())
    if as_json:
        faults = [(file, fault) for file, examined in checked.items() for fault in examined.faults]
        print_json(
            {
                "checked": {file: examined.kind for file, examined in checked.items()},
                "faults": [{"file": file, "line": fault.line, "message": fault.text} for file, fault in faults],
                "notes": {file: "; ".join(examined.notes) for file, examined in checked.items() if examined.notes},
            }
        )
        return 2 if faulty else 0
    for file, examined in checked.items():
        for fault in examined.faults:
            print(f"error: {fault}", file=sys.stderr)
        for note in examined.notes if not examined.faults else ():
            print(f"note: {file}: {note}", file=sys.stderr)
        if not faulty:
            print(f"{file}: a valid {examined.kind} configuration")
    return 2 if faulty else 0


def examine(as_json: bool) -> None:
    """Report on this machine."""
    logging.getLogger("hf_memopt").setLevel(logging.ERROR)  # the tables name every fallback that the log would
    report = _report()
    if as_json:
        print_json(report)
        return
    device, used = report["device"], report["would_use"]
    print_table(
        "this machine",
        ("item", "value"),
        [
            ("device", f"{device['label']} ({device['name']}) × {report['device_count']}"),
            ("memory usable", gib(device["memory"]) + ", shared with the system" * device["unified_memory"]),
            ("memory free", gib(report["free_memory_bytes"])),
            ("host memory", gib(report["host_memory_bytes"])),
            ("data loading", report["data_loading"]["words"]),
            ("constants", report["calibration"] or "assumed, see docs/memory.md; hf-memopt calibrate measures them"),
            ("bfloat16", "native" if device["native_bf16"] else "emulated or not supported"),
            ("Python, system", f"{report['python']}, {report['system']}"),
        ],
    )
    print_table("what hf-memopt would use", ("item", "value"), list(used.items()))
    rows = [
        (name, package["version"] or "missing", package["tested"] or "–", package["needed_for"])
        for name, package in report["packages"].items()
    ]
    print_table("packages", ("package", "version", "tested", "needed for"), rows)
    for kind in ("problem", "note"):
        for sentence in report[f"{kind}s"]:
            print(f"{kind}: {sentence}")


def _report() -> dict[str, Any]:
    import psutil
    import torch

    from hf_memopt.estimator.private_names import Part, faults
    from hf_memopt.estimator.tracing.process_state import quiet
    from hf_memopt.hardware import configure_allocator, detect, resolve_attention
    from hf_memopt.presets import get_preset

    allocator = configure_allocator()
    device = detect()
    preset = get_preset("auto")
    methods, problems = _methods_that_work()
    packages = {
        name: {
            "version": _version(name),
            "tested": "–".join(TRIED[name]) if name in TRIED else _TESTED.get(name),
            "needed_for": f"{use} (extra {EXTRAS[name]})" if name in EXTRAS else use,
        }
        for name, use in _PACKAGES.items()
    }
    loading = _data_loading(preset)
    problems += [*beyond_tried(), *_package_problems(packages)]
    with quiet(), contextlib.redirect_stdout(sys.stderr):  # DeepSpeed 0.19.8 logs to stdout while it is imported
        problems += _refused_predictions(faults, Part)
    if loading.warning:
        problems.append(loading.warning)
    on_card = device.backend in ("cuda", "rocm")
    # What a job started now could use, with other programs running.
    free = torch.cuda.mem_get_info()[0] if on_card else psutil.virtual_memory().available
    shown = ("name", "label", "backend", "memory", "unified_memory", "native_bf16", "fp8", "architecture")
    return {
        "device": {name: getattr(device, name) for name in shown},
        "device_count": max(1, torch.accelerator.device_count()) if device.backend != "cpu" else 1,
        "free_memory_bytes": free,
        "calibration": calibration.source if (calibration := measured_on(device)) else None,
        "data_loading": {**asdict(loading), "total": loading.total, "words": str(loading)},
        "host_memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "would_use": {
            "preset": preset.name,
            "methods": ", ".join(methods),
            "precision": preset.precision,
            "attention": resolve_attention(device),
            "optimizer": preset.training["optim"],
            "allocator": allocator or "default",
        },
        "packages": packages,
        "problems": problems,
        "notes": _system_notes(),
    }


def _system_notes() -> list[str]:
    """What this system limits, that no size of its memory shows."""
    if "microsoft" in platform.release().lower():
        return [
            "WSL sees a share of Windows' memory, half unless memory= in .wslconfig says more, and can pin little of "
            "it: where pinning fails, dataloader_pin_memory=false (docs/quickstart.md#windows)"
        ]
    if platform.system() == "Windows":
        return ["Windows has no NCCL: one GPU trains; several need WSL or Linux (docs/quickstart.md#windows)"]
    return []


def _refused_predictions(faults, parts) -> list[str]:
    """One line for each part of predictions for which the installed libraries lack names."""
    lines = []
    for part in parts:
        reasons = list(faults(part))
        more = f", and {len(reasons) - 1} more names" if reasons[1:] else ""
        if reasons and part is parts.EVERY_JOB:
            return [f"no predictions: {reasons[0]}{more}"]
        lines += [f"no predictions of {part.label}: {reasons[0]}{more}"] if reasons else []
    return lines


def _methods_that_work() -> tuple[list[str], list[str]]:
    """The methods that train here, and why others do not."""
    from hf_memopt.compatibility.setup import check
    from hf_memopt.presets import METHODS, get_preset

    methods, problems = [], []
    for method in METHODS:
        try:
            preset = get_preset("auto", method)
            check(preset.setup())
            if (method, preset.hardware.backend) == ("qlora", "mps") and not has("bitsandbytes", MPS_4BIT):
                raise InputError(f"method=qlora needs bitsandbytes {MPS_4BIT} on a Mac: pip install -U bitsandbytes")
            methods.append(method)
        except InputError as error:
            problems.append(str(error))
    return methods, problems


def _data_loading(preset):
    """Host memory that data loading takes with the preset's settings."""
    from hf_memopt.monitor.loader import TOKEN_BYTES, loader_memory
    from hf_memopt.presets.training_arguments import resolve

    batch = preset.micro_batch_size * preset.seq_len * TOKEN_BYTES
    return loader_memory({"dataloader_num_workers": 1, **resolve(preset, preset.processes, {})}, batch)


def _package_problems(packages: dict) -> list[str]:
    """Packages that are missing, and what DeepSpeed lacks, which compiles its host optimizer and disk access at first
    use."""
    problems = [
        f"{name} is not installed, for {packages[name]['needed_for']}: {how_to_install(name)}"
        for name in _REQUIRED
        if not packages[name]["version"]
    ]
    if not packages["deepspeed"]["version"]:
        return problems
    if compiler() is None:
        problems.append("no C++ compiler: DeepSpeed cannot build its CPU optimizer for the offload strategies")
    elif sys.platform == "linux" and not has_libaio():
        problems.append("libaio is missing (package libaio-dev): strategy zero3_offload_nvme cannot be built")
    if not is_installed("ninja") and not shutil.which("ninja"):
        problems.append("ninja is not installed (pip install ninja): DeepSpeed cannot build its operators")
    problems += [
        f"{lock} is left of a compilation that was killed, and DeepSpeed waits for it for ever: delete it"
        for lock in abandoned_locks()
    ]
    return problems


def _version(package: str) -> str | None:
    if not is_installed(package):
        return None
    return metadata.version(metadata.packages_distributions().get(package, [package])[0])
