"""`hf-memopt monitor`: the machine's memory as it is, and a run's steps as they come."""

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from hf_memopt.cli.output import bar, print_json, verbatim
from hf_memopt.errors import InputError, accepted, one_line
from hf_memopt.levers.arguments import PROFILES
from hf_memopt.monitor.device_usage import Device, read_devices
from hf_memopt.monitor.monitor import status_at
from hf_memopt.oom.events import describe_event
from hf_memopt.reports.run import LOG, Run, read_run
from hf_memopt.terminal import console
from hf_memopt.units import size

_LARGEST_LOG = 4 * 2**20  # bytes of a log's end; the last readings are shown, every few seconds anew
_RECENT = 600  # seconds: a log that was written to since then is of a running job
_COLOURS = {"normal": "green", "warning": "yellow", "critical": "red", "emergency": "bold red"}


def run_monitor(directory: str | None, interval: float, profile: str, once: bool, json: bool) -> None:
    """Show devices and a run's last figures, until Ctrl-C or once.

    Raises:
        InputError: an unknown profile, an interval below 0.1, or a folder without a run.
    """
    profile = accepted("profile", profile, PROFILES)
    if not 0.1 <= interval < 86_400:
        raise InputError(f"--interval {interval} must be 0.1 seconds or more, and less than a day")
    psutil.cpu_percent(None)  # counts from here
    time.sleep(0.1)
    if json:
        print_json(_facts(directory, profile))
    elif once or not sys.stdout.isatty():
        console().print(_shown(directory, profile))
    else:
        _live(directory, interval, profile)


def _live(directory: str | None, interval: float, profile: str) -> None:
    from rich.live import Live

    try:
        with Live(_shown(directory, profile, waits=True), console=console(), screen=False, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_shown(directory, profile, waits=True), refresh=True)
    except KeyboardInterrupt:
        return


def _facts(directory: str | None, profile: str) -> dict[str, Any]:
    _, *thresholds = PROFILES[profile]
    run = _run(directory)
    return {
        "devices": [
            device.to_dict() | {"status": status_at(device.utilization, *thresholds)} for device in read_devices()
        ],
        "run": run
        and {"folder": str(run.folder), "last": run.readings[-1] if run.readings else None, "events": run.events[-5:]},
    }


def _run(directory: str | None) -> Run | None:
    """The run that was named, or the newest below out/ that is being written to."""
    if directory is not None:
        return read_run(directory, _LARGEST_LOG)
    logs = {log: _modified(log) for log in (*Path().glob(f"out/*/{LOG}"), *Path().glob(LOG))}
    newest = max(logs, key=logs.get, default=None)
    return read_run(newest.parent, _LARGEST_LOG) if newest and time.time() - logs[newest] < _RECENT else None


def _modified(log: Path) -> float:
    """The time a file was written to, in seconds since 1970; 0 where it cannot be asked, or has just gone."""
    try:
        return log.stat().st_mtime
    except OSError:
        return 0.0


def _shown(directory: str | None, profile: str, waits: bool = False):
    """Devices, and a run's steps; one that has not logged anything yet is waited for."""
    from rich.console import Group

    parts = [_devices(read_devices(), profile)]
    try:
        run = _run(directory)
    except InputError as error:
        if not waits:
            raise
        return Group(*parts, verbatim(_waiting(directory, error)))
    if run is not None:
        parts.append(_steps(run))
    return Group(*parts)


def _waiting(directory: str | None, error: InputError) -> str:
    """The text of a live view that cannot show the run: that there is none yet, or what is wrong with it."""
    if directory is None or (Path(directory).expanduser() / LOG).exists():
        return one_line(error)
    return f"waiting for {directory}/{LOG}: a recipe writes it at its first logging step"


def _devices(devices: list[Device], profile: str):
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"memory at {datetime.now():%H:%M:%S}", title_justify="left", expand=True)
    for column in ("device", "used", "of", "", "busy", "status", "largest processes"):
        table.add_column(column, no_wrap=column in ("used", "of", "busy"))
    _, *thresholds = PROFILES[profile]
    for device in devices:
        status = status_at(device.utilization, *thresholds)
        processes = "\n".join(f"{task.name} {task.pid}: {size(task.memory)}" for task in device.processes[:3])
        busy = "" if device.busy is None else f"{device.busy:.0%}"
        share = Text(f"{device.utilization:.0%} {status}", style=_COLOURS[status])
        sizes = size(device.used), size(device.total), bar(device.utilization, 6)
        table.add_row(verbatim(device.label), *sizes, busy, share, verbatim(processes))
    return table


def _steps(run: Run):
    from rich.table import Table

    age = f", {time.time() - run.readings[-1]['time']:.0f} s ago" if run.readings else ""
    table = Table(title=verbatim(f"{run.folder}{age}"), title_justify="left", expand=True)
    for column in ("step", "phase", "allocated", "peak so far", "free", "tokens/s", "status"):
        table.add_column(column)
    for reading in run.readings[-6:]:
        speed = reading.get("tokens_per_second")
        phase, status = reading.get("phase", ""), reading.get("status", "")
        sizes = [size(reading["allocated"]), size(reading["peak_allocated"]), size(reading.get("free"))]
        row = (reading["step"], phase, *sizes, f"{speed:,.0f}" if speed else "", status)
        table.add_row(*map(verbatim, row))
    for event in run.events[-1:]:
        table.caption = verbatim(next(iter(describe_event(event).splitlines()), ""))
    return table
