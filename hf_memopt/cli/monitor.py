"""`hf-memopt monitor`: the machine's memory as it is, and a run's steps as they come."""

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from hf_memopt.cli.output import print_json
from hf_memopt.errors import InputError, choose
from hf_memopt.levers.arguments import PROFILES
from hf_memopt.monitor.devices import Device, devices
from hf_memopt.monitor.monitor import status_at
from hf_memopt.reports.events import told
from hf_memopt.reports.page import size
from hf_memopt.reports.run import LOG, Run, read_run

_RECENT = 600  # seconds: a log that was written to since then is of a running job
_COLOURS = {"normal": "green", "warning": "yellow", "critical": "red", "emergency": "bold red"}


def run_monitor(directory: str | None, interval: float, profile: str, once: bool, json: bool) -> None:
    """Show devices and a run's last figures, until Ctrl-C or once.

    Raises:
        InputError: an unknown profile, an interval below 0.1, or a folder without a run.
    """
    if profile not in PROFILES:
        raise choose("profile", profile, PROFILES)
    if interval < 0.1:
        raise InputError(f"--interval {interval} must be 0.1 seconds or more")
    psutil.cpu_percent(None)  # counts from here
    time.sleep(0.1)
    if json:
        print_json(_facts(directory, profile))
    elif once or not sys.stdout.isatty():
        from rich.console import Console

        Console().print(_shown(directory, profile))
    else:
        _live(directory, interval, profile)


def _live(directory: str | None, interval: float, profile: str) -> None:
    from rich.live import Live

    try:
        with Live(_shown(directory, profile, waits=True), screen=False, auto_refresh=False) as live:
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
            device.to_dict() | {"status": status_at(device.utilization, *thresholds)} for device in devices()
        ],
        "run": run and {"folder": str(run.folder), "last": run.readings[-1] if run.readings else None,
                        "events": run.events[-5:]},
    }  # fmt: skip


def _run(directory: str | None) -> Run | None:
    """The run that was named, or the newest below out/ that is being written to."""
    if directory is not None:
        return read_run(directory)
    recent = [log for log in (*Path().glob(f"out/*/{LOG}"), *Path().glob(LOG))
              if time.time() - log.stat().st_mtime < _RECENT]  # fmt: skip
    newest = max(recent, key=lambda log: log.stat().st_mtime, default=None)
    return read_run(newest.parent) if newest else None


def _shown(directory: str | None, profile: str, waits: bool = False):
    """Devices, and a run's steps; one that has not logged anything yet is waited for."""
    from rich.console import Group

    parts = [_devices(devices(), profile)]
    try:
        run = _run(directory)
    except InputError:
        if not waits:
            raise
        return Group(*parts, f"waiting for {directory}/{LOG}: a recipe writes it at its first logging step")
    if run is not None:
        parts.append(_steps(run))
    return Group(*parts)


def _devices(found: list[Device], profile: str):
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"memory at {datetime.now():%H:%M:%S}", title_justify="left", expand=True)
    for column in ("device", "used", "of", "", "busy", "status", "largest processes"):
        table.add_column(column, no_wrap=column in ("used", "of", "busy"))
    _, *thresholds = PROFILES[profile]
    for device in found:
        status = status_at(device.utilization, *thresholds)
        processes = ", ".join(f"{one.name} {one.pid}: {size(one.memory)}" for one in device.processes[:3])
        busy = "" if device.busy is None else f"{device.busy:.0%}"
        table.add_row(device.label, size(device.used), size(device.total), _bar(device.utilization), busy,
                      Text(f"{device.utilization:.0%} {status}", style=_COLOURS[status]), processes)  # fmt: skip
    return table


def _bar(share: float, cells: int = 12) -> str:
    full = round(min(1.0, share) * cells)
    return "█" * full + "░" * (cells - full)


def _steps(run: Run):
    from rich.table import Table

    age = f", {time.time() - run.readings[-1]['time']:.0f} s ago" if run.readings else ""
    table = Table(title=f"{run.folder}{age}", title_justify="left", expand=True)
    for column in ("step", "phase", "allocated", "peak so far", "free", "tokens/s", "status"):
        table.add_column(column)
    for one in run.readings[-6:]:
        speed = one.get("tokens_per_second")
        table.add_row(str(one["step"]), one.get("phase", ""), size(one["allocated"]), size(one["peak_allocated"]),
                      size(one.get("free")), f"{speed:,.0f}" if speed else "", one.get("status", ""))  # fmt: skip
    for event in run.events[-3:]:
        table.caption = told(event).splitlines()[0]
    return table
