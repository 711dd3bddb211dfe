"""`hf-memopt snapshot`: a file of recorded allocations, analyzed."""

from pathlib import Path

from hf_memopt import charts
from hf_memopt.cli.output import print_json, print_table, working
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import user_path, write_whole
from hf_memopt.packages import require
from hf_memopt.reports.page import render_page
from hf_memopt.reports.snapshot_analysis import Snapshot, analyze_snapshot
from hf_memopt.reports.snapshot_recording import KINDS
from hf_memopt.terminal import plain
from hf_memopt.units import size


def run_snapshot(file: str, top: int, plot: str | None, json: bool) -> None:
    """Read a snapshot and print it; draw it too.

    Raises:
        InputError: the file is not a snapshot, or the picture cannot be written.
    """
    if top < 1:
        raise InputError(f"--top {top} must be 1 or more")
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
        charts.stacked(axes, narrow, found.timeline, KINDS)

    if path.suffix not in (".html", ".htm"):
        charts.save(path, f"{plain(Path(file).name)}: {verdict(found)}", draw)
        return
    if not path.parent.is_dir():
        raise InputError(f"plot {path}: there is no folder {path.parent}")
    text = render_page(
        "snapshot",
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
