"""`hf-memopt merge`: an adapter and its base as one model."""

import sys
from typing import Any

from hf_memopt.cli.output import print_json, working
from hf_memopt.merging.merge import MergeResult, merge_adapter
from hf_memopt.terminal import plain
from hf_memopt.units import gib


def run_merge(adapter: str, directory: str, options: dict[str, Any], as_json: bool) -> None:
    """Write the model, count its tensors on a terminal, and say what was written."""
    working(f"reading {adapter}")
    result = merge_adapter(adapter, directory, progress=_show if sys.stderr.isatty() else None, **options)
    if as_json:
        print_json(result.to_dict())
    else:
        print("\n".join(_describe(result)))


def _show(number: int, total: int, name: str) -> None:
    """Overwrite one line of the terminal; the last one ends it."""
    line = f"{number}/{total} {plain(name)}"[:78]
    print(f"\r{line:<78}", end="\n" if number == total else "", file=sys.stderr, flush=True)


def _describe(result: MergeResult) -> list[str]:
    lines = [
        f"wrote {len(result.files)} files to {result.directory}: {result.tensors} tensors, {gib(result.bytes)}, "
        f"{result.merged_tensors} of them merged"
    ]
    if (found := result.dequantized) is not None:
        line = f"{found['quant_type']} rounded {found['tensors']} tensors of the base"
        if found["max_difference"] is None:
            lines.append(f"{line}; --reference names the unquantized model to compare with")
        else:
            lines.append(
                f"{line}: mean |difference| {found['mean_difference']:.3g}, max {found['max_difference']:.3g}"
            )
    return lines
