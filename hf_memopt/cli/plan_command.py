"""`hf-memopt plan`: its options, and which of its four answers they ask for."""

from dataclasses import replace
from typing import Annotated

import typer

from hf_memopt.cli.options import (
    Epochs,
    Json,
    Overwrite,
    Price,
    Samples,
    Settings,
    Stack,
    Strategy,
    Tokens,
    Verbose,
    WorldSize,
    answer_for,
    count,
    hardware_names,
    length_or_max,
    model_names,
    positive,
    size,
)
from hf_memopt.errors import InputError

EXAMPLES = (
    "Examples: hf-memopt plan llama-3.1-8b-instruct --hardware 'RTX 3060' --dataset my_chats.jsonl · "
    "hf-memopt plan llama-3.1-8b --hardware rtx_4090 --seq-len 2048 · "
    "hf-memopt plan llama-3.1-70b --hardware a100_80gbx8 --method lora --export my-run · "
    "hf-memopt plan qwen2.5-vl-7b --hardware rtx_4090 --method qlora --frames max · "
    "hf-memopt plan llama-3.1-8b --hardware rtx_4090 --method lora --seq-len max · "
    "hf-memopt plan qwen3-14b --hardware any --method lora --prices prices.toml --tokens 10M · "
    "hf-memopt plan qwen3-8b --hardware rtx_4090 --task grpo --seq-len 768 --set max_completion_length=512"
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A bundled architecture's name, hub id, folder or config.json; or a YAML or command of another "
            "training tool, which the plan answers in its own keys.",
            autocompletion=model_names,
        ),
    ],
    hardware: Annotated[
        str,
        typer.Option(
            help="A device or several: rtx_4090, '2x RTX 3090', h100_80gbx128; auto: this machine's; a JSON object or "
            "TOML file describes another; any: compare the cards of the catalog.",
            autocompletion=hardware_names,
        ),
    ] = "auto",
    seq_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            callback=length_or_max,
            help="Tokens per sample; max: the longest that fits, with one memory feature after another. "
            "Default: the preset's, of several methods' the longest.",
        ),
    ] = None,
    effective_batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="N", callback=count, help="Samples per optimizer step over all devices. Default: the preset's."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="full, lora or qlora; any: the first that fits, the others beside it. Default: any, or a file's."
        ),
    ] = None,
    world_size: WorldSize = None,
    strategy: Strategy = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="GIB", callback=size, help="GiB of each device that the job may use. Default: all."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            callback=size,
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
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="A jsonl file, whose rows say the task (answers: sft, pairs: dpo, texts) and, for the time, how many "
            "they are, each judged as the recipe judges it; or a hub name. Where a recipe runs the job, it stands in "
            "the command that is printed.",
        ),
    ] = None,
    ignore_columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Columns of DATA that are not looked at: label,weight"),
    ] = None,
    skip_bad_rows: Annotated[
        bool,
        typer.Option("--skip-bad-rows", help="Leave out rows that cannot be trained on; without it they are refused."),
    ] = False,
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
        typer.Option(callback=positive, help="With --prices: the most that an hour of all devices may cost."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="With --hardware any: list every card and box, not only the typical ones.")
    ] = False,
    tokens: Tokens = None,
    epochs: Epochs = None,
    samples: Samples = None,
    price: Price = None,
    stack: Stack = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Answer by a sketch, in a fraction of the time: YES or NO, probably. Without it every answer is "
            "estimated. Example: hf-memopt plan llama-3.1-8b --hardware rtx_4090 --quick",
        ),
    ] = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Find the fastest settings that fit, for profiles from safe to maximum; exit code 1 if nothing fits."""
    from hf_memopt.cli.cards import ANY, CardOptions, run_cards
    from hf_memopt.cli.foreign import read_job
    from hf_memopt.cli.plan import ExportOptions, check_frames, run_frames, run_lengths, run_plan
    from hf_memopt.cli.speed_printed import AmountOptions
    from hf_memopt.cli.words import check_words
    from hf_memopt.data.sources import local_path
    from hf_memopt.foreign.source import is_source
    from hf_memopt.hardware.host_memory import HostMemory
    from hf_memopt.hub_names import hub_name
    from hf_memopt.presets import METHODS

    answer_for(stack)
    any_card, longest = hardware.lower() == ANY, seq_len == "max"
    if any_card and (frames is not None or longest):
        limit = "--frames" if frames is not None else "--seq-len"
        raise InputError(f"{limit} max is counted for one card: name it with --hardware")
    estimated = {"--hardware any": any_card, "--frames max": frames, "--seq-len max": longest, "--export": export}
    for name in (name for name, value in estimated.items() if quick and value):
        raise InputError(f"--quick is for a first answer about one card, and {name} needs estimates: leave one out")
    if frames is not None:
        check_frames(frames)
    if frames is not None and task is not None:
        raise InputError(f"--frames max counts the frames of videos: leave --task {task} out")
    one_card = {
        "--world-size": world_size,
        "--memory": memory,
        "--strategy": strategy,
        "--export": export,
        "--price": price,
        "--dataset": dataset,
    }
    unused = {
        "--tokens": tokens,
        "--samples": samples,
        "--epochs": epochs,
        "--price": price,
        "--verbose": verbose or None,
    }
    lengths = {"--export": export or None, "--strategy": strategy or None, "--dataset": dataset or None}
    of_settings = {"--memory": memory, "--host-memory": host_memory, "--export": export, "--dataset": dataset}
    limit = "--seq-len" if longest else "--frames"
    for asked, options, reason in (
        (any_card, one_card, "{0} belongs to one card: name it with --hardware, or leave {0} out"),
        (longest or frames is not None, unused, limit + " max prints a table of limits: leave {0} out"),
        (longest, lengths, "--seq-len max is a question of one device's memory: leave {0} out"),
        (
            frames is not None,
            of_settings,
            "--frames max counts the frames of one device's whole memory: leave {0} out",
        ),
    ):
        for name in (name for name, value in options.items() if asked and value is not None):
            raise InputError(reason.format(name))
    if dataset and is_source(model):
        raise InputError("--dataset: the file names its own data; for the time, say --samples")
    of_data = {"--skip-bad-rows": skip_bad_rows, "--ignore-columns": ignore_columns}
    for name in (name for name, value in of_data.items() if value and not dataset):
        raise InputError(f"{name} is of the rows of --dataset: name it")
    if dataset:
        dataset = hub_name(dataset)
        local_path(dataset)
    spec, source = read_job(
        model,
        "any",
        settings,
        hardware=hardware,
        world_size=world_size,
        **({} if longest else {"seq_len": seq_len}),
        effective_batch_size=effective_batch_size,
        method=method,
        strategy=strategy,
        memory=memory,
        host_memory=host_memory and HostMemory(host_memory, "--host-memory", assumed=False),
        task=task,
    )
    if source is not None:
        if export:
            raise InputError("--export writes files of the recipes: hf-memopt migrate FILE DIR does so of a file")
        from hf_memopt.planner.settle import left_open

        spec = left_open(spec)
    # The rows of a data set are an amount, too, and are counted when they are read.
    counted = "1" if dataset and tokens is None and samples is None else samples
    AmountOptions(tokens=tokens, epochs=epochs, samples=counted, price=price).read()
    ignored = tuple(filter(None, map(str.strip, (ignore_columns or "").split(","))))
    data = {"dataset": dataset, "ignore_columns": ignored, "skip_bad_rows": skip_bad_rows}
    spec = check_words(replace(spec, **data, quick=quick), (*METHODS, "any"))
    if use := _use_of(spec):
        spec = replace(spec, task=use.task, clips=use.pictures | spec.clips)
        if use.samples and samples is None and tokens is None:
            samples = str(use.samples)
    amount = AmountOptions(tokens=tokens, epochs=epochs, samples=samples, price=price)
    amount.read()
    cards = CardOptions(prices=prices, max_price=max_price, every=every, amount=amount)
    if any_card:
        raise typer.Exit(run_cards(spec, cards, json))
    cards.refuse()
    if frames is not None:
        raise typer.Exit(run_frames(spec, json))
    if longest:
        raise typer.Exit(run_lengths(spec, json))
    raise typer.Exit(run_plan(spec, ExportOptions(export, overwrite, profile), amount, json, verbose, source, use))


def _use_of(spec):
    """What the data set of a job trains a model for; None without one, and of what is read when the job runs.

    Raises:
        InputError: its rows do not train this model.
    """
    if not spec.dataset:
        return None
    from hf_memopt.estimator.architectures import hub_id
    from hf_memopt.estimator.spec_job import read_model
    from hf_memopt.planner.samples.data_use import find_use, takes_media

    asked = read_model(spec)
    model = hub_id(spec.model) if spec.is_named else None
    clips = asked.video is not None
    media = clips or takes_media(asked.config)
    use = find_use(spec.dataset, spec.task, media, model, spec.skip_bad_rows, spec.ignore_columns, clips)
    if use is not None:
        use.check_model(spec.dataset, asked)
    return use
