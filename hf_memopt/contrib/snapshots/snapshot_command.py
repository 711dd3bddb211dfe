"""`hf-memopt snapshot`: a file of recorded allocations, analyzed."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memopt import charts
from hf_memopt.cli.options import Json, count
from hf_memopt.cli.output import print_json, print_table, working
from hf_memopt.contrib.snapshots.snapshot_analysis import Snapshot, analyze_snapshot
from hf_memopt.contrib.snapshots.snapshot_recording import KINDS
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import user_path, write_whole
from hf_memopt.packages import require
from hf_memopt.reports.run_report import render_page
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
    top: Annotated[str, typer.Option(metavar="N", callback=count, help="How many blocks and modules to list.")] = "10",
    plot: Annotated[str | None, typer.Option(metavar="FILE.png|.html", help="Draw memory over time, by kind.")] = None,
    json: Json = False,
) -> None:
    """Analyze recorded allocations: the peak by kind and module, the largest, fragmentation, growth."""
    if plot:
        require("matplotlib", "--plot")
    working(f"reading {file}")
    analysis = analyze_snapshot(file, top)
    if plot:
        _draw(analysis, user_path(plot), file)
    if json:
        print_json(analysis.to_dict() | ({"plot": plot} if plot else {}))
        return
    print(verdict(analysis))
    _print(analysis)
    if plot:
        print(f"drawn: {plain(plot)}")


def verdict(analysis: Snapshot) -> str:
    """The peak in one sentence."""
    where = f" in {analysis.peak_phase}" if analysis.peak_phase else ""
    where += f" of step {analysis.peak_step}" if analysis.peak_step else ""
    of = f" of {size(analysis.about['capacity'])}" if analysis.about.get("capacity") else ""
    text = f"peak {size(analysis.peak_bytes)}{of}{where}"
    for failure in analysis.out_of_memory[-1:]:
        text += f"; out of memory: {size(failure['asked'])} requested, {size(failure['free'])} free"
    return text


def _print(analysis: Snapshot) -> None:
    rows = [
        (kind.replace("_", " "), size(used), f"{used / analysis.peak_bytes:.1%}")
        for kind, used in analysis.by_kind.items()
        if used
    ]
    print_table("memory at the peak, by kind", ["kind", "size", "share"], rows)
    if analysis.by_module:
        rows = [(module, size(used)) for module, used in analysis.by_module.items()]
        print_table("activations at the peak, by module (* stands for every layer)", ["module", "size"], rows)
    rows = [
        (size(row["size"]), row["count"], row["kind"].replace("_", " "), row["name"], "\n".join(row["stack"][:2]))
        for row in analysis.largest
    ]
    print_table("largest allocations at the peak", ["size", "blocks", "kind", "tensor", "allocated in"], rows)
    if analysis.fragmentation:
        print_table("fragmentation at the end", ["figure", "value"], _fragments(analysis))
    if analysis.growth:
        print_table(
            "growth between steps", ["step", "held after it", "growth", "largest that stayed"], _grown(analysis)
        )


def _fragments(analysis: Snapshot) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), f"{value:.1%}" if name == "share" else size(value))
        for name, value in (analysis.fragmentation or {}).items()
    ]


def _grown(analysis: Snapshot):
    for row in analysis.growth:
        block = row["kept"][0] if row["kept"] else None
        place = f"{size(block['size'])} {next(iter(block['stack'][1:]), block['name'])}" if block else ""
        yield row["step"], size(row["resting"]), size(row["grown"]), place


def _draw(analysis: Snapshot, path: Path, file: str) -> None:
    def draw(axes, narrow):
        _stack_kinds(axes, narrow, analysis.timeline)

    if path.suffix not in (".html", ".htm"):
        charts.save(path, f"{plain(Path(file).name)}: {verdict(analysis)}", draw)
        return
    if not path.parent.is_dir():
        raise InputError(f"plot {path}: there is no folder {path.parent}")
    text = render_page(
        "snapshot",
        Path(__file__).parent / "templates",
        reason=analysis.about.get("reason", plain(Path(file).name)),
        verdict=verdict(analysis),
        failed=bool(analysis.out_of_memory),
        timeline=charts.both(draw, "kinds"),
        colours=charts.PARTS,
        by_kind=analysis.by_kind,
        modules=[(module, size(used)) for module, used in analysis.by_module.items()],
        largest=analysis.largest,
        fragmentation=_fragments(analysis),
        growth=list(_grown(analysis)),
    )
    with as_input_error(f"plot {path}", OSError):
        write_whole(path, text)


def _stack_kinds(axes, narrow: bool, timeline: list[tuple[float, dict[str, int]]]) -> None:
    """Bytes by kind against seconds, on top of each other."""
    kinds = [kind for kind in KINDS if any(sizes.get(kind) for _, sizes in timeline)]
    unit, name = charts.axis_unit(max((sum(sizes.get(kind, 0) for kind in kinds) for _, sizes in timeline), default=0))
    rows = [[sizes.get(kind, 0) / unit for _, sizes in timeline] for kind in kinds]
    if rows:
        axes.stackplot(
            [at for at, _ in timeline],
            rows,
            labels=[kind.replace("_", " ") for kind in kinds],
            colors=[charts.PARTS[kind] for kind in kinds],
            lw=0,
        )
    axes.set(xlabel="seconds", ylabel=name)
    axes.set_ylim(bottom=0)
    charts.legend(axes, 2 if narrow else 4)
