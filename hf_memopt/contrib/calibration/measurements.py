"""The measurements of calibrate, in their order, and the constants that follow from them."""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

from hf_memopt.contrib.calibration import device as on_device
from hf_memopt.contrib.calibration.processes import Processes
from hf_memopt.contrib.calibration.training import Setting, predict, train
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.measured import MEASURABLE, SWITCH, constant
from hf_memopt.units import MIB

_CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
# Within 6 GiB each, so that they fit an 8 GiB card beside a desktop.
_JOBS = {
    "full": Setting("full", "smollm2-135m", micro=2),
    "LoRA, checkpointed": Setting("LoRA", "qwen2.5-0.5b", _CHECKPOINTED, method="lora", dtype="bfloat16"),
    "chunked loss": Setting("lever", "smollm2-360m", _CHECKPOINTED, {"loss_chunk_size": 512}),
    "accumulation": Setting("full", "smollm2-135m", {"gradient_accumulation_steps": 4}, micro=4, length=512),
}
_DISTURBED = 64 * MIB  # of the driver's count before and after: a desktop's windows change by less


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One line of progress.

    Attributes:
        name: key in the file.
        limit: seconds after which its process is killed.
        function: what is measured, in a process of its own.
        setting: a training job that is also predicted; None for others.
    """

    name: str
    limit: int
    function: Callable[[], dict]
    setting: Setting | None = None


def measurements(device: Hardware, rehearse: bool) -> list[Measurement]:
    """All of them, most valuable first: predictions of device bytes rest on the context."""
    half_precision = {"fp16": True} if device.backend in ("cuda", "rocm") else {}
    precision = {"bf16": True} if device.native_bf16 else half_precision

    def fitted(setting: Setting) -> Setting:
        dtype = "float32" if setting.dtype == "bfloat16" and not device.native_bf16 else setting.dtype
        setting = dataclasses.replace(setting, fields={**setting.fields, **precision}, dtype=dtype)
        return setting.rehearsed() if rehearse else setting

    small = fitted(Setting("small", "smollm2-135m", length=256))
    rates = functools.partial(on_device.rates, 64, MIB) if rehearse else on_device.rates
    jobs = [
        Measurement(f"job: {name}", 90, functools.partial(train, fitted(setting)), fitted(setting))
        for name, setting in _JOBS.items()
    ]
    return [
        Measurement("context", 60, functools.partial(on_device.context_and_workspace, small)),
        Measurement("rates", 60, rates),
        *jobs,
        Measurement("attention", 60, functools.partial(on_device.attention, small)),
        Measurement("allocator", 30, on_device.allocator_setting),
    ]


def measure(
    processes: Processes, measurement: Measurement, device: Hardware, env: dict[str, str], limit: float
) -> dict:
    """The outcome of one: measured, with what was measured; skipped or failed, with `reason`.

    Args:
        env: of its process.
        limit: seconds.
    """
    before = on_device.driver_bytes()
    row = processes.run(measurement.function, limit, env)
    if row["outcome"] != "measured":
        return row
    if measurement.name == "context" and (card := row.pop("card", None)):
        after = on_device.driver_bytes()
        if abs(after.get(card, 0) - before.get(card, 0)) > _DISTURBED:
            return {"outcome": "failed", "reason": "another process took or gave back memory of the card meanwhile"}
    if measurement.setting is not None:
        predicted = processes.run(
            functools.partial(
                _predict, measurement.setting, dataclasses.asdict(dataclasses.replace(device, sources={}))
            ),
            limit,
            {"CUDA_VISIBLE_DEVICES": "", SWITCH: "on"},
        )
        if predicted["outcome"] != "measured":
            return {"outcome": "failed", "reason": f"not predicted: {predicted['reason']}"}
        row["predicted"] = {name: value for name, value in predicted.items() if name != "outcome"}
    return row


def _predict(setting: Setting, device: dict[str, Any]) -> dict:
    """Predict in a process that reads what was measured so far; the step's time as if none had been compared yet."""
    hardware = Hardware(**device)
    prediction = predict(setting, hardware)
    return prediction | {"step_seconds": prediction["step_seconds"] / constant("step_time_ratio", hardware).value}


def constants_from(rows: dict[str, dict], device: Hardware) -> dict[str, float]:
    """The constants that the measurements so far give predictions; a figure beyond MEASURABLE's bounds is left out."""
    context, rates = (_measured(rows, name) for name in ("context", "rates"))
    matmuls = rates.get("matmul_flops_per_second", {})
    steps = [(job["step_seconds"], job["predicted"]["step_seconds"]) for job in trained(rows).values()]
    ratios = [measured / predicted for measured, predicted in steps if measured]
    values = {
        "context_bytes": context.get("context_bytes"),
        "workspace_bytes": context.get("workspace_bytes"),
        "matmul_flops_per_second": matmuls.get("bfloat16" if device.native_bf16 else "float16"),
        "bandwidth_bytes_per_second": rates.get("bandwidth_bytes_per_second"),
        "host_link_bytes_per_second": rates.get("host_link_bytes_per_second"),
        "launch_seconds": rates.get("launch_seconds"),
        "step_time_ratio": statistics.median(ratios) if ratios else None,
    }
    return {
        name: value
        for name, value in values.items()
        if value is not None and MEASURABLE[name].lowest <= value <= MEASURABLE[name].highest
    }


def reserved_errors(rows: dict[str, dict]) -> list[float]:
    """The error of each job: predicted reserved bytes over measured, less 1; none where the device counts none."""
    pairs = [(predicted_reserved(job), job["reserved_bytes"]) for job in trained(rows).values()]
    return [round(predicted / measured - 1, 4) for predicted, measured in pairs if measured]


def predicted_reserved(job: dict) -> int:
    """The prediction for the allocator's setting that was in force."""
    expandable = "expandable_segments:True" in (job["allocator"] or "")
    return job["predicted"]["reserved_bytes"]["expandable" if expandable else "segments"]


def trained(rows: dict[str, dict]) -> dict[str, dict]:
    """The jobs that were trained to their end."""
    return {
        name: row
        for name, row in rows.items()
        if name.startswith("job: ") and row["outcome"] == "measured" and row["outcome_of_training"] == "trained"
    }


def _measured(rows: dict[str, dict], name: str) -> dict:
    row = rows.get(name, {})
    return row if row.get("outcome") == "measured" else {}
