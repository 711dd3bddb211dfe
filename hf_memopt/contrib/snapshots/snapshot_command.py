"""`hf-memopt snapshot`: a file of recorded allocations, analyzed."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memopt import charts
from hf_memopt.cli.options import Json, at_least_one
from hf_memopt.cli.output import print_json, print_table, working
from hf_memopt.contrib.snapshots.snapshot_analysis import Snapshot, analyze_snapshot
from hf_memopt.contrib.snapshots.snapshot_recording import KINDS
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import user_path, write_whole
from hf_memopt.packages import require
from hf_memopt.reports.page import render_page
from hf_memopt.terminal import plain
from hf_memopt.units import size

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples: hf-memopt snapshot out/my-run/memory_snapshot_step_2.pickle · "
    "hf-memopt snapshot memory_snapshot_oom_1.pickle --plot oom.html · record with --snapshot_steps 2-4 in a recipe"
)
def snapshot(
    file: Annotated[
        str,
        typer.Argument(
            help="A file that --snapshot_steps, SnapshotCallback or torch.cuda.memory._dump_snapshot wrote."
        ),
    ],
    top: Annotated[int, typer.Option(callback=at_least_one, help="How many blocks and modules to list.")] = 10,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png|.html", help="Draw memory over time, by kind.")] = None,
    json: Json = False,
) -> None:
    """Analyze recorded allocations: the peak by kind and module, the largest, fragmentation, growth."""
    if plot:
        require("matplotlib", "--plot")
    working(f"reading {file}")
    found = analyze_snapshot(file, top)
    if plot:
        _draw(found, user_path(plot), file)
    if json:
        print_json(found.to_dict() | ({"plot": plot} if plot else {}))
        return
    print(verdict(found))
    _print(found)
    if plot:
        print(f"drawn: {plain(plot)}")


def verdict(found: Snapshot) -> str:
    """The peak in one sentence."""
    where = f" in {found.peak_phase}" if found.peak_phase else ""
    where += f" of step {found.peak_step}" if found.peak_step else ""
    of = f" of {size(found.about['capacity'])}" if found.about.get("capacity") else ""
    text = f"peak {size(found.peak_bytes)}{of}{where}"
    for one in found.out_of_memory[-1:]:
        text += f"; out of memory: {size(one['asked'])} requested, {size(one['free'])} free"
    return text


def _print(found: Snapshot) -> None:
    whole = found.peak_bytes
    rows = [
        (kind.replace("_", " "), size(taken), f"{taken / whole:.1%}") for kind, taken in found.by_kind.items() if taken
    ]
    print_table("memory at the peak, by kind", ["kind", "size", "share"], rows)
    if found.by_module:
        rows = [(module, size(taken)) for module, taken in found.by_module.items()]
        print_table("activations at the peak, by module (* stands for every layer)", ["module", "size"], rows)
    rows = [
        (size(one["size"]), one["count"], one["kind"].replace("_", " "), one["name"], "\n".join(one["stack"][:2]))
        for one in found.largest
    ]
    print_table("largest allocations at the peak", ["size", "blocks", "kind", "tensor", "allocated in"], rows)
    if found.fragmentation:
        print_table("fragmentation at the end", ["figure", "value"], _fragments(found))
    if found.growth:
        print_table("growth between steps", ["step", "held after it", "growth", "largest that stayed"], _grown(found))


def _fragments(found: Snapshot) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), f"{value:.1%}" if name == "share" else size(value))
        for name, value in (found.fragmentation or {}).items()
    ]


def _grown(found: Snapshot):
    for one in found.growth:
        kept = one["kept"][0] if one["kept"] else None
        place = f"{size(kept['size'])} {next(iter(kept['stack'][1:]), kept['name'])}" if kept else ""
        yield one["step"], size(one["resting"]), size(one["grown"]), place


def _draw(found: Snapshot, path: Path, file: str) -> None:
    def draw(axes, narrow=False):
        _stack_kinds(axes, narrow, found.timeline)

    if path.suffix not in (".html", ".htm"):
        charts.save(path, f"{plain(Path(file).name)}: {verdict(found)}", draw)
        return
    if not path.parent.is_dir():
        raise InputError(f"plot {path}: there is no folder {path.parent}")
    text = render_page(
        "snapshot",
        Path(__file__).parent / "templates",
        reason=found.about.get("reason", plain(Path(file).name)),
        verdict=verdict(found),
        failed=bool(found.out_of_memory),
        timeline=charts.both(draw, "kinds"),
        colours=charts.COLOURS,
        by_kind=found.by_kind,
        modules=[(module, size(taken)) for module, taken in found.by_module.items()],
        largest=found.largest,
        fragmentation=_fragments(found),
        growth=list(_grown(found)),
    )
    with as_input_error(f"plot {path}", OSError):
        write_whole(path, text)


def _stack_kinds(axes, narrow: bool, timeline: list[tuple[float, dict[str, int]]]) -> None:
    """Bytes by kind against seconds, on top of each other."""
    there = [kind for kind in KINDS if any(sizes.get(kind) for _, sizes in timeline)]
    unit, name = charts.axis_unit(max((sum(sizes.get(kind, 0) for kind in there) for _, sizes in timeline), default=0))
    rows = [[sizes.get(kind, 0) / unit for _, sizes in timeline] for kind in there]
    if rows:
        axes.stackplot(
            [at for at, _ in timeline],
            rows,
            labels=[kind.replace("_", " ") for kind in there],
            colors=[charts.COLOURS[kind] for kind in there],
            lw=0,
        )
    axes.set(xlabel="seconds", ylabel=name)
    axes.set_ylim(bottom=0)
    charts.legend(axes, 2 if narrow else 4)
