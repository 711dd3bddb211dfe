"""The commands and their options. What each does is in a file of its own, imported when the command runs."""

import sys
from contextlib import nullcontext
from typing import Annotated

import typer
from typer.core import TyperGroup

from hf_memopt.cli import plan_command
from hf_memopt.cli.options import (
    Epochs,
    Json,
    Length,
    Method,
    Overwrite,
    Plot,
    Precision,
    Price,
    Samples,
    SequenceParallel,
    Settings,
    Stack,
    Strategy,
    Tokens,
    Verbose,
    WorldSize,
    answer_for,
    count,
    method_names,
    model_names,
    positive,
    preset_names,
)
from hf_memopt.cli.parsing import CommandLine, TakesLauncher, usage_sentence
from hf_memopt.contributed import load_contributed
from hf_memopt.disk import write_failure
from hf_memopt.errors import ImpossibleEstimate, IncompatibleLibrary, InputError, one_line
from hf_memopt.noise import quiet
from hf_memopt.packages import require
from hf_memopt.terminal import only_plain_text


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


app = CommandLine(
    name="hf-memopt",
    cls=_Commands,
    help="Predict the memory of a Hugging Face training job, and find the settings that make it fit.",
    pretty_exceptions_enable=False,
    # --seq_len is --seq-len: TrainingArguments' fields, which stand beside these options, have underscores.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


@app.command(epilog="Example: hf-memopt presets --method qlora")
def presets(method: Method = "full", json: Json = False) -> None:
    """List the hardware presets with their batch, sequence length and reference model."""
    from hf_memopt.cli.presets import list_all

    list_all(method, json)


@app.command(epilog="Example: hf-memopt show rtx_4090 --method qlora")
def show(
    preset: Annotated[str, typer.Argument(help="A preset's name, or auto.", autocompletion=preset_names)],
    method: Method = "full",
    strategy: Strategy = None,
    precision: Precision = None,
    json: Json = False,
) -> None:
    """Show every setting of a preset, and its hardware's figures with their sources."""
    from hf_memopt.cli.presets import show_one

    show_one(preset, method, strategy, precision, json)


@app.command(epilog="Example: hf-memopt estimate llama-3.1-8b --preset a100_80gb --method lora --seq-len 4096")
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A bundled architecture's name (llama-3.1-8b, …), hub id, folder or config.json; or a YAML of "
            "axolotl, LLaMA-Factory, ms-swift, torchtune or TRL, or its command.",
            autocompletion=model_names,
        ),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            help="A name from `hf-memopt presets`, or auto. Default: that of --hardware; without either plain "
            "TrainingArguments.",
            autocompletion=preset_names,
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="full, lora or qlora. Default: full, or a file's.", autocompletion=method_names)
    ] = None,
    seq_len: Length = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            callback=count,
            help="Samples of a forward pass on each device: per_device_train_batch_size. Default: the preset's.",
        ),
    ] = None,
    world_size: WorldSize = None,
    strategy: Strategy = None,
    sequence_parallel: SequenceParallel = "1",
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
    log: Annotated[
        str | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            help="What any Trainer printed of such a run, or its trainer_state.json: its speed scales later answers.",
        ),
    ] = None,
    plot: Plot = None,
    stack: Stack = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Predict a job's peak memory and speed, without weights and without a GPU; exit code 1 if it does not fit."""
    from hf_memopt.cli.estimate import run_estimate
    from hf_memopt.cli.foreign import read_job
    from hf_memopt.cli.speed_printed import AmountOptions

    answer_for(stack)
    spec, _ = read_job(
        model,
        "full",
        [*(settings or []), *([f"per_device_train_batch_size={batch_size}"] if batch_size else [])],
        preset=preset,
        method=method,
        seq_len=seq_len,
        world_size=world_size,
        strategy=strategy,
        sequence_parallel=sequence_parallel,
        hardware=hardware,
        task=task,
    )
    amount = AmountOptions(tokens=tokens, epochs=epochs, samples=samples, price=price)
    raise typer.Exit(run_estimate(spec, levers, plot, json, amount, verbose, log))


app.command(epilog=plan_command.EXAMPLES)(plan_command.plan)


@app.command(epilog="Example: hf-memopt migrate qlora.yml my-run, then sh my-run/launch.sh")
def migrate(
    file: Annotated[
        str,
        typer.Argument(help="A YAML of axolotl, LLaMA-Factory, ms-swift, torchtune or TRL, or its command in quotes."),
    ],
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="A folder for recipe.yaml and launch.sh.")
    ] = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
) -> None:
    """Write another tool's job as a command of the recipes, with the same settings."""
    from hf_memopt.cli.foreign import run_migrate

    run_migrate(file, directory, overwrite, settings)


@app.command(
    epilog="Examples: hf-memopt advise out/my-run · hf-memopt advise train.log --model llama-3.1-8b --preset rtx_4090 "
    "--method lora · python train.py 2>&1 | hf-memopt advise -"
)
def advise(
    source: Annotated[str, typer.Argument(help="A run's folder, a log file, the error itself, or - for stdin.")],
    model: Annotated[str | None, typer.Option(help="The run's model, to predict what each change saves.")] = None,
    preset: Annotated[str, typer.Option(help="The run's preset, with --model.")] = "auto",
    method: Method = "full",
    seq_len: Length = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Explain an out-of-memory error or a slow run, and what to change; exit code 1 if there is neither."""
    from hf_memopt.cli.advise import run_advise
    from hf_memopt.cli.settings import command_spec
    from hf_memopt.cli.words import check_words

    run = {"model": model, "preset": preset, "method": method, "seq_len": seq_len}
    job = check_words(command_spec(settings, **run)) if model else None
    raise typer.Exit(run_advise(source, job, json))


@app.command(
    cls=TakesLauncher,
    epilog="Examples: hf-memopt dry-run train.py --hardware rtx_4090 -- --output_dir out --bf16 · "
    "hf-memopt dry-run --hardware a100_80gb accelerate launch --config_file zero3.yaml train.py --output_dir out",
)
def dry_run(
    script: Annotated[
        str,
        typer.Argument(
            help="A training script that uses transformers' Trainer, unchanged; or the whole command that starts it, "
            "of accelerate launch, torchrun or deepspeed, after this command's own options."
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    hardware: Annotated[
        str, typer.Option(help="Device to fit on, or several: a100_80gb_x8. Default: this machine's.")
    ] = "auto",
    world_size: WorldSize = None,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config-file",
            "--config_file",
            metavar="FILE.yaml",
            help="accelerate's: as `accelerate launch --config_file FILE.yaml SCRIPT`.",
        ),
    ] = None,
    price: Price = None,
    plot: Plot = None,
    allow_unconfined: Annotated[
        bool,
        typer.Option(
            "--allow-unconfined", help="Run it where the system cannot keep it from changing files and sending."
        ),
    ] = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Run a script up to trainer.train() without loading weights, and predict the job's peak memory and time."""
    from hf_memopt.cli.estimate import DryRunOptions, run_dry_run
    from hf_memopt.foreign.launchers import is_launcher, split_launch

    words = [script, *(arguments or [])]
    if config_file and is_launcher(script):
        raise InputError("--config_file belongs to accelerate launch, which the command names: write it there")
    if config_file:
        words = ["accelerate", "launch", "--config_file", config_file, *words]
    launch, own, (script, *arguments) = split_launch(words)
    asked = {"hardware": hardware, "world_size": world_size, "price": price, "verbose": verbose}
    options = DryRunOptions(script=script, arguments=arguments, launch=launch, launcher_words=own, **asked)
    run_dry_run(options, plot, json, allow_unconfined)


@app.command(
    epilog="Examples: hf-memopt export rtx_4090 my-run --method qlora, then sh my-run/launch.sh · hf-memopt export "
    "a100_80gb_x8 my-run --target skypilot -- --model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/Capybara"
)
def export(
    preset: Annotated[str, typer.Argument(help="A preset's name, or auto.", autocompletion=preset_names)],
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
        str | None,
        typer.Option(
            metavar="N",
            callback=count,
            help="Number of machines, each with the preset's devices; also writes slurm.sbatch.",
        ),
    ] = None,
    sequence_parallel: SequenceParallel = "1",
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
            metavar="RUN_DIR", help="A run's output_dir, to show its steps. Default: one that is running in ./out."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(callback=positive, help="Seconds between readings.")] = 2.0,
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
    from hf_memopt.cli.output import print_json, working
    from hf_memopt.trainer.checkpoints import consolidation

    working(f"merging the shards of {checkpoint}")
    files = consolidation.consolidate(checkpoint, directory, trusted)
    if json:
        print_json({"directory": directory, "files": files})
    else:
        print(f"wrote {', '.join(files)} to {directory}")


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
    require("gradio", "hf-memopt ui")
    from hf_memopt.ui.limits import Limits
    from hf_memopt.ui.page import build_page, launch_page

    try:
        launch_page(build_page(Limits(public=public or share)), host, port, share=share)
    except OSError as error:
        raise InputError(
            f"host={host}, port={port}: {one_line(error)}; choose another with --host or --port"
        ) from None


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


def _print_version(value: bool) -> None:
    if value:
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
        # click (8.2) would raise NoArgsIsHelpError, whose message is the help, with exit code 2.
        sys.argv.append("--help")
    own = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv  # of a script, the others
    for option, value in zip(own, [*own[1:], None], strict=True):
        if option.startswith("--") and (value == "" or option.endswith("=")):
            _fail(f"{option.rstrip('=')} is empty: give it a value, or leave it out")
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
        # click's usage errors know their own message, a disk's refusals are the user's to mend; anything else is a
        # fault of ours and keeps its traceback.
        reason = usage_sentence(error) if hasattr(error, "format_message") else write_failure(error)
        if reason is None:
            raise
        _fail(one_line(ValueError(reason)))


def _fail(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
