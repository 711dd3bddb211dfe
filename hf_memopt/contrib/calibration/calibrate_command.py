"""`hf-memopt calibrate`: measure on this machine's device what predictions assume of it."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from hf_memopt.cli.options import Json, positive
from hf_memopt.cli.output import print_json, print_table, working
from hf_memopt.contrib.calibration.measurements import predicted_reserved, trained
from hf_memopt.contrib.calibration.session import Session, export_path
from hf_memopt.hardware.constants import TABLE, assumed
from hf_memopt.hardware.measured import MEASURABLE, show_value
from hf_memopt.units import GIB

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples: hf-memopt calibrate · hf-memopt calibrate --budget 120 (run it again for the rest) · "
    "hf-memopt calibrate --export my-card.json · hf-memopt calibrate --rehearse"
)
def calibrate(
    export: Annotated[
        str | None,
        typer.Option(metavar="FILE.json", help="Also write a file to share: figures and versions, no paths or names."),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", callback=positive, help="No measurement begins that might outlast it.")
    ] = 300.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier call has measured.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Run every measurement on the CPU with tiny models; no prediction uses the results."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Measure on this machine's card, in about five minutes, what estimate, plan and report assume of it."""
    target = export_path(export) if export else None
    working("starting; every measurement has a process of its own")
    session = Session(rehearse, target, fresh)
    done = session.count - len(session.waiting)
    _say(f"{session.device.label}: {session.count} measurements, {done} of them done by an earlier call")
    stopped = False
    try:
        session.run(budget, _say)
    except KeyboardInterrupt:
        stopped = True
        hint = " and kept: the same command continues" if not rehearse or target else ""
        _say(f"stopped: {session.count - len(session.waiting)} of {session.count} are measured{hint}")
    if target is not None:
        session.export(target)
    if json:
        print_json(session.content() | {"left": [measurement.name for measurement in session.waiting]})
    else:
        _print(session, target)
    failed = any(row["outcome"] == "failed" for row in session.rows.values())
    raise typer.Exit(_INTERRUPTED if stopped else int(failed))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(session: Session, target) -> None:
    content = session.content()
    rows = [
        (MEASURABLE[name].label, show_value(name, value), _before(session, name))
        for name, value in content["constants"].items()
    ]
    if rows:
        print_table(session.device.label, ("constant", "measured", "before"), rows)
    jobs = [_job(name.removeprefix("job: "), row) for name, row in trained(session.rows).items()]
    if jobs:
        columns = ("job", "reserved" if session.device.backend != "cpu" else "allocated", "predicted", "tokens/s")
        print_table("training jobs", columns, jobs)
    for line in _checks(session.rows):
        print(line)
    if session.rehearsal:
        print("note: rehearsed on a CPU; no prediction uses these figures")
    elif content["constants"]:
        print("note: estimate, plan and report use these constants for this device from now on")
    if target is not None:
        print(f"wrote {target}")


def _checks(measurements: dict[str, dict]) -> Iterator[str]:
    """The settings that did not do what the package takes for granted, and what the figures suffer from."""
    attention, allocator, context = (measurements.get(name, {}) for name in ("attention", "allocator", "context"))
    if attention.get("chosen") != attention.get("ran"):
        yield f"problem: attention {attention['chosen']} was chosen and {attention['ran']} ran"
    if allocator.get("expandable") is False and "expandable_segments:True" in allocator["setting"]:
        yield f"problem: PYTORCH_ALLOC_CONF={allocator['setting']} was not taken by the allocator"
    if (idle := context.get("idle_bytes") or 0) > GIB:
        yield f"note: other programs had {idle / GIB:.1f} GiB of the card; rates may be low"


def _before(session: Session, name: str) -> str:
    """The value assumed before; of rates that are stored as they are, from the catalog and an assumed share of it."""
    device = session.device
    if any(row.name == name for row in TABLE):
        return show_value(name, assumed(name, device).value)
    catalog, share = {
        "matmul_flops_per_second": (device.bf16_flops or device.fp16_flops, "matmul_efficiency"),
        "bandwidth_bytes_per_second": (device.bandwidth, "copy_efficiency"),
        "host_link_bytes_per_second": (device.host_link, "link_efficiency"),
    }[name]
    return show_value(name, catalog * assumed(share, device).value) if catalog else "unknown"


def _job(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    measured, predicted = row["reserved_bytes"], predicted_reserved(row)
    if not measured:
        measured, predicted = row["allocated_bytes"], row["predicted"]["allocated_bytes"]
    off = f" ({predicted / measured - 1:+.1%})" if measured else ""
    speed = f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else ""
    return name, f"{(measured or 0) / GIB:.3f} GiB", f"{predicted / GIB:.3f} GiB{off}", speed
