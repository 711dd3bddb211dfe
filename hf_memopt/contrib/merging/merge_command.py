"""`hf-memopt merge`: an adapter and its base as one model."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hf_memopt.cli.options import Json
from hf_memopt.cli.output import print_json, working
from hf_memopt.terminal import plain
from hf_memopt.units import gib

if TYPE_CHECKING:
    from hf_memopt.contrib.merging.merge import MergeResult

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples: hf-memopt merge out/my-run my-model · hf-memopt merge out/my-run my-model --base ./llama-3.1-8b "
    "--dtype bfloat16 · hf-memopt merge out/qlora my-model --quantize nf4 · "
    "hf-memopt merge out/qlora my-model --base ./llama-3.1-8b-bnb-4bit --reference ./llama-3.1-8b"
)
def merge(
    adapter: Annotated[str, typer.Argument(help="Folder or hub id of a LoRA, rsLoRA or DoRA adapter.")],
    directory: Annotated[str, typer.Argument(metavar="OUT", help="An empty or new folder to write the model to.")],
    base: Annotated[
        str | None, typer.Option(help="Folder or hub id of the base model. Default: the one that the adapter names.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32. Default: the base's.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="nf4 or fp4: first round the base as QLoRA's training did, and report what that changes.",
        ),
    ] = None,
    double_quant: Annotated[
        bool, typer.Option(help="With --quantize: as bnb_4bit_use_double_quant was in training.")
    ] = True,
    reference: Annotated[
        str | None,
        typer.Option(help="The unquantized model, to report what a base in 4 bits differs by. Folder or hub id."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file: 500MB, 5GB.")] = "5GB",
    json: Json = False,
) -> None:
    """Merge a LoRA adapter into its base model, tensor by tensor: host memory never holds the model."""
    from hf_memopt.contrib.merging.merge import merge_adapter  # imports torch, which help must not wait for

    working(f"reading {adapter}")
    result = merge_adapter(
        adapter,
        directory,
        base=base,
        dtype=dtype,
        quantize=quantize,
        double_quant=double_quant,
        reference=reference,
        max_shard_size=max_shard_size,
        progress=_show if sys.stderr.isatty() else None,
    )
    if json:
        print_json(result.to_dict())
    else:
        print("\n".join(_describe(result)))


def _show(number: int, total: int, name: str) -> None:
    """Overwrite one line of the terminal; the last one ends it."""
    line = f"{number}/{total} {plain(name)}"[:78]
    print(f"\r{line:<78}", end="\n" if number == total else "", file=sys.stderr, flush=True)


def _describe(result: "MergeResult") -> list[str]:
    lines = [
        f"wrote {len(result.files)} files to {result.directory}: {result.tensors} tensors, {gib(result.bytes)}, "
        f"{result.merged_tensors} of them merged"
    ]
    if (rounding := result.dequantized) is not None:
        line = f"{rounding['quant_type']} rounded {rounding['tensors']} tensors of the base"
        if rounding["max_difference"] is None:
            lines.append(f"{line}; --reference names the unquantized model to compare with")
        else:
            lines.append(
                f"{line}: mean |difference| {rounding['mean_difference']:.3g}, max {rounding['max_difference']:.3g}"
            )
    return lines
