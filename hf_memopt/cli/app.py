"""The commands and their options. What each does is in a file of its own, imported when the command runs."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from hf_memopt.cli.options import Json, at_least_one
from hf_memopt.contributed import load_contributed
from hf_memopt.errors import ImpossibleEstimate, IncompatibleLibrary, InputError, one_line
from hf_memopt.noise import quiet
from hf_memopt.terminal import only_plain_text
from hf_memopt.units import GIB


class _Commands(TyperGroup):
    """The commands of this file, and contributed ones once help or a command that is not here is asked for."""

    def list_commands(self, ctx):
        for name, contributed in load_contributed("commands").items():
            self.commands[name] = typer.main.get_command(contributed)
        return super().list_commands(ctx)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in self.commands:
            self.list_commands(ctx)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="hf-memopt",
    cls=_Commands,
    help="Predict the memory of a Hugging Face training job, and find the settings that make it fit.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _presets(incomplete: str) -> list[str]:
    """Preset names that begin so, for the shell's completion."""
    from hf_memopt.presets import list_presets

    return [name for name in ["auto", *list_presets()] if name.startswith(incomplete)]


def _methods(incomplete: str) -> list[str]:
    from hf_memopt.presets import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def _models(incomplete: str) -> list[str]:
    """Bundled architectures that begin so."""
    folder = Path(__file__).parents[1] / "estimator" / "architectures"  # asking the estimator would import torch
    return sorted(file.stem for file in folder.glob("*.json") if file.stem.startswith(incomplete))


def _hardware(incomplete: str) -> list[str]:
    from hf_memopt.hardware import list_hardware

    return [name for name in list_hardware() if name.startswith(incomplete)]


def _positive(value: float | None) -> float | None:
    """A number of GiB or seconds, unchanged.

    Raises:
        typer.BadParameter: it is 0 or less, or infinite or NaN, which click's own ranges accept.
    """
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} must be above 0, and finite")
    return value


def _length(value: str | None) -> int | str | None:
    """A number of tokens, or "max".

    Raises:
        typer.BadParameter: neither.
    """
    if value is None or value == "max":
        return value
    if not value.lstrip("-").isdecimal():
        raise typer.BadParameter(f"{value!r} is neither a number of tokens nor max")
    return at_least_one(int(value))


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the files of another export.")]
Method = Annotated[str, typer.Option("--method", help="full, lora or qlora.", autocompletion=_methods)]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy", help="How several devices train together: ddp, fsdp2, zero1, zero2, zero3, tp8, hsdp8, …"
    ),
]

Precision = Annotated[
    str | None, typer.Option("--precision", help="fp8: matmuls in 8 bits, on GPUs with fp8 units; needs torchao.")
]


@app.command(epilog="Example: hf-memopt presets --method qlora")
def presets(method: Method = "full", json: Json = False) -> None:
    """List the hardware presets with their batch, sequence length and reference model."""
    from hf_memopt.cli.presets import list_all

    list_all(method, json)


@app.command(epilog="Example: hf-memopt show rtx_4090 --method qlora")
def show(
    preset: Annotated[str, typer.Argument(help="A name from `hf-memopt presets`, or auto.", autocompletion=_presets)],
    method: Method = "full",
    strategy: Strategy = None,
    precision: Precision = None,
    json: Json = False,
) -> None:
    """Show every setting of a preset, and its hardware's figures with their sources."""
    from hf_memopt.cli.presets import show_one

    show_one(preset, method, strategy, precision, json)


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A TrainingArguments or MemoryArguments field, dtype, attn_implementation, task, packed, padded, "
        "lora.KEY, quantization.KEY, model.KEY (a field of config.json; estimate and advise), or deepspeed (a "
        "shipped JSON's name, or a file). For videos: max_frames, frame_size (640x360), max_pixels_per_frame, "
        "answer_tokens, freeze_vision, freeze_projector. Repeat it for several.",
    ),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="N", help="Tokens to train on, to predict the time: 10M, 2.5B.")
]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", callback=_positive, help="Instead: passes over --samples, each as long as --seq-len."),
]
Samples = Annotated[str | None, typer.Option("--samples", metavar="N", help="Samples of the data set: 5000, 52k.")]
Price = Annotated[
    float | None,
    typer.Option("--price", callback=_positive, help="Price of one device for an hour, to predict the cost."),
]
Plot = Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw memory over the step into a picture.")]


@app.command(epilog="Example: hf-memopt estimate llama-3.1-8b --preset a100_80gb --method lora --seq-len 4096")
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A bundled architecture's name (llama-3.1-8b, …), hub id, folder or config.json.",
            autocompletion=_models,
        ),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            help="A name from `hf-memopt presets`, or auto. Default: that of --hardware; without either plain "
            "TrainingArguments.",
            autocompletion=_presets,
        ),
    ] = None,
    method: Method = "full",
    seq_len: Annotated[
        int | None, typer.Option(callback=at_least_one, help="Tokens per sample. Default: the preset's.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(callback=at_least_one, help="Devices that train together. Default: the preset's.")
    ] = None,
    strategy: Strategy = None,
    hardware: Annotated[
        str | None, typer.Option(help="The device to fit on, as `plan` takes it. Default: the preset's.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="What the model is trained for: causal-lm, image-classification, …; sft, dpo, kto, reward, grpo or "
            "rloo with TRL's trainer, whose fields --set takes. Default: what the model is for."
        ),
    ] = None,
    settings: Settings = None,
    levers: Annotated[
        bool,
        typer.Option(
            "--levers",
            help="Also list the changes that save the most memory; a job that does not fit always gets them.",
        ),
    ] = False,
    tokens: Tokens = None,
    epochs: Epochs = None,
    samples: Samples = None,
    price: Price = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Predict a job's peak memory and speed, without weights and without a GPU; exit code 1 if it does not fit."""
    from hf_memopt.cli.estimate import run_estimate
    from hf_memopt.cli.settings import command_spec
    from hf_memopt.cli.speed import AmountOptions

    spec = command_spec(
        settings,
        model=model,
        preset=preset,
        method=method,
        seq_len=seq_len,
        world_size=world_size,
        strategy=strategy,
        hardware=hardware,
        task=task,
    )
    amount = AmountOptions(tokens=tokens, epochs=epochs, samples=samples, price=price)
    raise typer.Exit(run_estimate(spec, levers, plot, json, amount))


@app.command(
    epilog="Examples: hf-memopt plan llama-3.1-8b --hardware rtx_4090 --seq-len 2048 · "
    "hf-memopt plan llama-3.1-70b --hardware a100_80gbx8 --method lora --export my-run · "
    "hf-memopt plan qwen2.5-vl-7b --hardware rtx_4090 --method qlora --frames max · "
    "hf-memopt plan llama-3.1-8b --hardware rtx_4090 --method lora --seq-len max · "
    "hf-memopt plan qwen3-14b --hardware any --method lora --prices prices.toml --tokens 10M · "
    "hf-memopt plan qwen3-8b --hardware rtx_4090 --task grpo --seq-len 768 --set max_completion_length=512"
)
def plan(
    model: Annotated[
        str,
        typer.Argument(help="A bundled architecture's name, hub id, folder or config.json.", autocompletion=_models),
    ],
    hardware: Annotated[
        str,
        typer.Option(
            help="A device or several: rtx_4090, '2x RTX 3090', h100_80gbx128; auto: this machine's; a JSON object or "
            "TOML file describes another; any: compare the cards of the catalog.",
            autocompletion=_hardware,
        ),
    ] = "auto",
    seq_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            callback=_length,
            help="Tokens per sample; max: the longest that fits, with one memory feature after another. "
            "Default: the preset's, of several methods' the longest.",
        ),
    ] = None,
    effective_batch_size: Annotated[
        int | None,
        typer.Option(
            callback=at_least_one, help="Samples per optimizer step over all devices. Default: the preset's."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="full, lora or qlora; any: the first that fits, the others beside it.")
    ] = "any",
    strategy: Strategy = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", callback=_positive, help="GiB of each device that the job may use. Default: all."),
    ] = None,
    host_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            callback=_positive,
            help="GiB of host memory for each device. Default: what is free here, or a usual box's.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="What the model is trained for; dpo, kto, reward, grpo, rloo or sft with TRL's trainer, whose fields "
            "--set takes. Default: what the model is for."
        ),
    ] = None,
    settings: Settings = None,
    frames: Annotated[
        str | None, typer.Option(help="max: the most frames of a video that fit, for several frame sizes.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write a profile's files into a folder, as `export` does.")
    ] = None,
    overwrite: Overwrite = False,
    profile: Annotated[
        str,
        typer.Option(
            "--profile", "--rung", help="The profile that --export writes: safe, balanced, aggressive or maximum."
        ),
    ] = "balanced",
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.toml",
            help="With --hardware any: compare these cards by cost. A line a card, the price of one for an hour: "
            '"RTX 4090" = 0.40.',
        ),
    ] = None,
    max_price: Annotated[
        float | None,
        typer.Option(callback=_positive, help="With --prices: the most that an hour of all devices may cost."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="With --hardware any: list every card and box, not only the typical ones.")
    ] = False,
    tokens: Tokens = None,
    epochs: Epochs = None,
    samples: Samples = None,
    price: Price = None,
    json: Json = False,
) -> None:
    """Find the fastest settings that fit, for profiles from safe to maximum; exit code 1 if nothing fits."""
    from hf_memopt.cli.cards import ANY, CardOptions
    from hf_memopt.cli.plan import ExportOptions, run_frames, run_lengths, run_plan, run_which_card
    from hf_memopt.cli.settings import command_spec
    from hf_memopt.cli.speed import AmountOptions
    from hf_memopt.hardware.host_memory import HostMemory

    amount = AmountOptions(tokens=tokens, epochs=epochs, samples=samples, price=price)
    cards = CardOptions(prices=prices, max_price=max_price, every=every, amount=amount)
    any_card, longest = hardware.lower() == ANY, seq_len == "max"
    if not any_card:
        cards.refuse()
    elif frames is not None or longest:
        limit = "--frames" if frames is not None else "--seq-len"
        raise InputError(f"{limit} max is counted for one card: name it with --hardware")
    if frames is not None and task is not None:
        raise InputError(f"--frames max counts the frames of videos: leave --task {task} out")
    one_card = {"--memory": memory, "--strategy": strategy, "--export": export, "--price": price} if any_card else {}
    for name in (name for name, value in one_card.items() if value is not None):
        raise InputError(f"{name} belongs to one card: name it with --hardware, or leave {name} out")
    for name in (name for name, value in (("--export", export), ("--strategy", strategy)) if longest and value):
        raise InputError(f"--seq-len max is a question of one device's memory: leave {name} out")
    spec = command_spec(
        settings,
        model=model,
        hardware=hardware,
        seq_len=None if longest else seq_len,
        effective_batch_size=effective_batch_size,
        method=method,
        strategy=strategy,
        memory=memory and int(memory * GIB),
        host_memory=host_memory and HostMemory(int(host_memory * GIB), "--host-memory", assumed=False),
        task=task,
    )
    if any_card:
        raise typer.Exit(run_which_card(spec, cards, json))
    if frames is not None:
        raise typer.Exit(run_frames(spec, frames, json))
    if longest:
        raise typer.Exit(run_lengths(spec, json))
    raise typer.Exit(run_plan(spec, ExportOptions(export, overwrite, profile), amount, json))


@app.command(
    epilog="Examples: hf-memopt advise out/my-run · hf-memopt advise train.log --model llama-3.1-8b --preset rtx_4090 "
    "--method lora · python train.py 2>&1 | hf-memopt advise -"
)
def advise(
    source: Annotated[str, typer.Argument(help="A run's folder, a log file, the error itself, or - for stdin.")],
    model: Annotated[str | None, typer.Option(help="The run's model, to predict what each change saves.")] = None,
    preset: Annotated[str, typer.Option(help="The run's preset, with --model.")] = "auto",
    method: Method = "full",
    seq_len: Annotated[
        int | None, typer.Option(callback=at_least_one, help="Tokens per sample, with --model.")
    ] = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Explain an out-of-memory error or a slow run, and what to change; exit code 1 if there is neither."""
    from hf_memopt.cli.advise import run_advise
    from hf_memopt.cli.settings import command_spec

    job = None
    if model:
        job = command_spec(settings, model=model, preset=preset, method=method, seq_len=seq_len)
    raise typer.Exit(run_advise(source, job, json))


@app.command(epilog="Example: hf-memopt dry-run train.py --hardware rtx_4090 -- --output_dir out --bf16")
def dry_run(
    script: Annotated[str, typer.Argument(help="A training script that uses transformers' Trainer, unchanged.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    hardware: Annotated[str, typer.Option(help="Device to fit on. Default: this machine's.")] = "auto",
    world_size: Annotated[
        int | None, typer.Option(callback=at_least_one, help="Devices that train together. Default: the script's.")
    ] = None,
    price: Price = None,
    plot: Plot = None,
    allow_unconfined: Annotated[
        bool,
        typer.Option(
            "--allow-unconfined", help="Run it where the system cannot keep it from changing files and sending."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Run a script up to trainer.train() without loading weights, and predict the job's peak memory and time."""
    from hf_memopt.cli.estimate import DryRunOptions, run_dry_run

    options = DryRunOptions(
        script=script, arguments=arguments or [], hardware=hardware, world_size=world_size, price=price
    )
    run_dry_run(options, plot, json, allow_unconfined)


@app.command(
    epilog="Examples: hf-memopt export rtx_4090 my-run --method qlora, then sh my-run/launch.sh · hf-memopt export "
    "a100_80gb_x8 my-run --target skypilot -- --model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/Capybara"
)
def export(
    preset: Annotated[str, typer.Argument(help="A name from `hf-memopt presets`, or auto.", autocompletion=_presets)],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write to; created if missing.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="More arguments of the recipe, after --.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="slurm, skypilot, hf-jobs or kubernetes: the files of a job there. Default: launch.sh."),
    ] = None,
    method: Method = "full",
    strategy: Strategy = None,
    precision: Precision = None,
    recipe: Annotated[
        str, typer.Option(help="The recipe that launch.sh starts: pretrain, sft, video_sft, dpo or grpo.")
    ] = "sft",
    nvme_path: Annotated[str | None, typer.Option(help="A folder on the NVMe disk, for zero3_offload_nvme.")] = None,
    machines: Annotated[
        int | None,
        typer.Option(
            callback=at_least_one,
            help="Number of machines, each with the preset's devices; also writes slurm.sbatch.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        int | None,
        typer.Option(
            callback=at_least_one,
            help="Number of devices that split each sequence (Ulysses, needs ZeRO), for long samples.",
        ),
    ] = None,
    yaml_only: Annotated[
        bool, typer.Option("--yaml-only", help="Write accelerate.yaml alone, with DeepSpeed's settings inside.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a preset as files: training_arguments.json, accelerate.yaml, deepspeed.json (if used) and launch.sh."""
    from hf_memopt.cli.export import ExportOptions, export_preset

    options = ExportOptions(
        preset=preset,
        directory=directory,
        method=method,
        strategy=strategy,
        precision=precision,
        recipe=recipe,
        nvme_path=nvme_path,
        machines=machines,
        sequence_parallel=sequence_parallel,
        yaml_only=yaml_only,
        overwrite=overwrite,
        target=target,
        arguments=arguments or [],
    )
    export_preset(options, json)


@app.command(
    epilog="Examples: hf-memopt monitor · hf-memopt monitor out/my-run --interval 5 · hf-memopt monitor --once --json"
)
def monitor(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_DIR]", help="A run's output_dir, to show its steps. Default: one that is running in ./out."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(callback=_positive, help="Seconds between readings.")] = 2.0,
    profile: Annotated[str, typer.Option(help="Thresholds: aggressive, balanced or conservative.")] = "balanced",
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, as in a pipe.")] = False,
    json: Json = False,
) -> None:
    """Watch every device's memory and processes, and a running recipe's steps, until Ctrl-C."""
    from hf_memopt.cli.monitor import run_monitor

    run_monitor(directory, interval, profile, once, json)


@app.command(
    epilog="Examples: hf-memopt report out/my-run · hf-memopt report out/lora out/qlora --output compared.html"
)
def report(
    directories: Annotated[list[str], typer.Argument(metavar="RUN_DIR...", help="A run's output_dir, or several.")],
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.html",
            help="Default: memory_report.html in the run's folder, or memory_comparison.html here for several.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's report as an HTML page: memory over time, what happened, what to try next; or compare runs."""
    from hf_memopt.cli.report import run_report

    run_report(directories, output, json)


@app.command(epilog="Example: hf-memopt consolidate out/my-run/checkpoint-500 my-model --trusted")
def consolidate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint-N folder that ZeRO or FSDP2 wrote.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="An empty or new folder to write the model to.")],
    trusted: Annotated[
        bool, typer.Option("--trusted", help="You trust the checkpoint: its shards are pickles, which can run code.")
    ] = False,
    json: Json = False,
) -> None:
    """Merge a sharded checkpoint into one safetensors model, without the devices that wrote it."""
    from hf_memopt.cli.consolidate import run_consolidate

    run_consolidate(checkpoint, directory, trusted, json)


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
        float, typer.Option(metavar="SECONDS", callback=_positive, help="No measurement begins that might outlast it.")
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
    from hf_memopt.cli.calibrate import run_calibrate

    raise typer.Exit(run_calibrate(budget, export, rehearse, fresh, json))


@app.command(epilog="Examples: hf-memopt ui · hf-memopt ui --host 0.0.0.0 --port 8080 --public")
def ui(
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 7860,
    public: Annotated[bool, typer.Option("--public", help="Strangers ask: no files, few settings, no token.")] = False,
    share: Annotated[
        bool, typer.Option("--share/--no-share", help="Open gradio's tunnel to the page; implies --public.")
    ] = False,
) -> None:
    """Ask by clicking: a page in the browser; needs gradio."""
    from hf_memopt.cli.ui import run_ui

    run_ui(host, port, public or share, share)


@app.command(epilog="Example: hf-memopt doctor accelerate_configs/*.yaml")
def doctor(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="accelerate YAML or DeepSpeed JSON files to check for unknown keys and wrong values."),
    ] = None,
    json: Json = False,
) -> None:
    """Show this machine, what hf-memopt would use on it and what is missing; or check configuration files."""
    from hf_memopt.cli.doctor import check_files, examine

    if files:
        raise typer.Exit(check_files(files, json))
    examine(json)


@app.command(epilog="Example: hf-memopt schema estimate > estimate.schema.json")
def schema(
    command: Annotated[str, typer.Argument(help="advise, doctor, dry-run, estimate, export, plan, presets or show.")],
) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json."""
    from hf_memopt.cli.schema import run_schema

    run_schema(command)


@app.command(epilog="Example: hf-memopt register, then hf memopt estimate llama-3.1-8b --hardware rtx_4090")
def register(json: Json = False) -> None:
    """Make `hf memopt` a command of the hub's command line, which runs this installation."""
    from hf_memopt.cli.register import run_register

    run_register(json)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"hf-memopt {version('hf_memopt')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass  # its one option is handled by its callback; typer takes global options from a function only


def main() -> None:
    """Run the command line; bad input becomes one line on stderr and exit code 2."""
    quiet()
    if len(sys.argv) == 1:
        sys.argv.append(
            "--help"
        )  # click (8.2) would raise NoArgsIsHelpError, whose message is the help, with exit code 2
    try:
        # Help has typer's colours, and no text of others.
        with nullcontext() if {"--help", "-h"} & set(sys.argv) else only_plain_text():
            code = app(standalone_mode=False)  # without standalone mode an Exit is handed back as its code
        sys.exit(code if isinstance(code, int) else 0)
    except (InputError, IncompatibleLibrary, ImpossibleEstimate) as error:
        _fail(one_line(error))
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        # click's usage errors know their own message; anything else is a fault of ours and keeps its traceback.
        if not hasattr(error, "format_message"):
            raise
        _fail(one_line(ValueError(error.format_message())))


def _fail(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
