"""What commands print of answers that are made for it, at several widths, whole and frozen."""

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import click
import frozen
from test_planned_answers import CHOICES, PLAIN, estimate, profile_of, settled

from hf_memopt.cli import answer_printed, cards, estimate_printed, output, parsing, plan_printed, speed_printed
from hf_memopt.cli.speed_printed import AmountOptions
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.planner.alternatives import Alternative, Rejected
from hf_memopt.planner.market.card_fits import CardChoice, Fit
from hf_memopt.planner.market.prices import Prices
from hf_memopt.planner.profiles import Plan
from hf_memopt.planner.proposals import Proposal
from hf_memopt.units import GIB, MIB

KINDS = {"parameters": 4 * GIB, "optimizer_states": 3 * GIB, "activations": 900 * MIB, "workspace": 2**20}
SPEED = {"step_seconds": 1.5, "tokens_per_second": 1365.4, "mfu": 0.41, "speed_kind": "dense", "speed_error": 0.15}
NOTES = (
    "speed: unknown FLOP/s of the card",
    "a note of some words that is longer than a line of a terminal is wide",
    "b",
)
TOLD = {
    **{"breakdown": KINDS, "notes": NOTES, "phase": "backward", "estimated": "bf16, adamw"},
    "capacity_bytes": 10 * GIB,
}
AMOUNTS = {
    "": AmountOptions(),
    "tokens": AmountOptions(tokens="10M", price=2.0),
    "samples": AmountOptions(samples="5k", epochs=3.0),
}


def printed(capsys, function, *args) -> list[str]:
    function(*args)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def of_size(size: int, host: int = 5 * GIB, **more):
    return estimate(size, host, **{**TOLD, **more})


def test_estimates_in_print(capsys, monkeypatch):
    found = {}
    saving = [
        SimpleNamespace(change=f"--set {word}=true", saved_bytes=size, fits=fits)
        for word, size, fits in (
            *(("a", GIB, True), ("b" * 50 + " and more words to break a line at", 3 * MIB, False), ("c", 7, None)),
        )
    ]
    rollout = {"generation": 3 * GIB, "rewards": 0, "log_probs": GIB, "forward": 5 * GIB}
    for width, (name, size, more, savings) in itertools.product(
        (40, 80, 200),
        (
            *(
                ("fits", 9 * GIB, SPEED, []),
                ("too large", 11 * GIB, {}, saving),
                ("none fits", 11 * GIB, SPEED, saving[1:]),
            ),
            *(
                ("unknown", 9 * GIB, {"capacity_bytes": None}, saving[:1]),
                ("paged", 9 * GIB, {"paged_bytes": GIB}, []),
            ),
            *(
                ("little paged", 10 * GIB, {"paged_bytes": 200 * MIB} | SPEED, []),
                ("at once", 9 * GIB, {"phases": rollout}, []),
            ),
            ("generated", 9 * GIB, {**SPEED, "generation_share": 0.37, "mfu": None, "tokens_per_second": None}, []),
        ),
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        made = of_size(size, **more)
        for asked, amount in AMOUNTS.items() if width == 80 else [("", AMOUNTS["tokens"])]:
            took = amount.time_and_cost(made, 64, 2)
            job = estimate_printed.EstimatedJob(
                **{"title": "a model on a card", "settings": asked or None, "estimate": made, "savings": savings},
                **{"took": took, "amount": amount},
            )
            found[f"{name} {width} {asked}"] = printed(capsys, job.print, False)
            if width == 80:
                found[f"{name} {asked} tables"] = printed(capsys, job.print, True)
    commands = (
        *("a --b c --d 'e f' --g --h i", "x" * 90 + " --y z", "one", "a " + "--word value " * 9),
        "a --long " + "v" * 80,
    )
    for width, text in itertools.product((30, 40, 60, 100, 300), commands):
        monkeypatch.setenv("COLUMNS", str(width))
        found[f"{width} {text[:20]}"] = [
            *answer_printed.command_lines(text, "go"),
            *answer_printed.paragraph(text, "label"),
            *answer_printed.one_each("each", [text, "short"])[1],
            answer_printed.width(),
        ]
    for host in (
        None,
        HostMemory(9 * GIB, "a box", assumed=True),
        HostMemory(9 * GIB, "--host-memory", assumed=False),
    ):
        found[f"host {host}"] = [answer_printed.host_lines(size, host) for size in (9 * GIB, 9 * GIB + 1)]
    found["bars"] = [output.bar(share, 10) for share in (0, 0.04, 0.06, 0.5, 0.96, 1.0, 1.7)]
    frozen.check("printed_estimates", found)


def test_plans_in_print(capsys, monkeypatch):
    monkeypatch.setattr(plan_printed, "missing_for", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "90")
    spec, found = settled(effective_batch_size=64), {}
    other = Alternative(
        **{
            **{"method": "full", "settings": "micro-batch 1 × 64", "device_bytes": 20 * GIB, "estimated": False},
            "fits": True,
        },
        **{"relative_time": 0.8, "tokens_per_second": 1700.0},
    )
    qlora = replace(other, method="qlora", relative_time=1.2, estimated=True, tokens_per_second=None)
    own = replace(other, method="lora", relative_time=1.0)
    rejected = [
        Rejected("zero2", "needs a lot"),
        Rejected("full", "full is far too large"),
        Rejected("slow", "slower", True),
    ]
    rows = [PLAIN, PLAIN, CHOICES["kept"], CHOICES["in host memory"]]
    shares = [share for _, share in PLAN_PROFILES.values()]

    def profiles(first: int, **more):
        made = [
            replace(profile_of(spec, choice), name=name, share=share)
            for name, share, choice in zip(PLAN_PROFILES, shares, rows, strict=True)
        ]
        sizes = [replace(one, estimate=of_size((8 + n) * GIB, (5 + n) * GIB, **more)) for n, one in enumerate(made)]
        return sizes[first:]

    for name, made in {
        "usual": Plan(spec, profiles(0, **SPEED), rejected, plain=other, methods=[own, other, qlora]),
        "no speed": Plan(spec, profiles(1), [], plain=replace(other, fits=False), methods=[own]),
        "maximum": Plan(replace(spec, quick=True), profiles(3, **SPEED), rejected[:1]),
        "one method": Plan(replace(spec, task="kto"), profiles(2, **SPEED), [], methods=[own, qlora]),
        "nothing": Plan(spec, [], rejected, 3 * GIB, [Proposal(["--seq-len 128"], 9 * GIB, GIB)]),
        "nothing, probably": Plan(replace(spec, quick=True), [], rejected[1:]),
    }.items():
        for asked, amount in AMOUNTS.items():
            for verbose in (False, True):
                lines = printed(capsys, plan_printed.print_plan, made, amount, verbose, ["after: this"])
                found[f"{name} {asked} {verbose}"] = [
                    line for line in lines if "accelerate" not in line and ".py" not in line
                ]
    names = [*PLAN_PROFILES]
    groups = [
        [SimpleNamespace(name=name) for name in names[slice(*part)]] for part in ((4,), (1, 4), (0, 2), (3, 4), (1, 2))
    ]
    found["names"] = [speed_printed.profile_names(group) for group in groups]
    frozen.check("printed_plans", found)


def test_cards_in_print(capsys, monkeypatch):
    found = {}
    names = (
        *("t4", "rtx_3060", "v100_32gb", "rtx_4090", "l4", "a100_80gb", "mi300x", "apple_m2_16gb", "h100_80gb", "cpu"),
    )
    names += ("rtx_3090", "a2", "rtx_4080")
    host = CHOICES["in host memory"]

    def fit(number: int, price: float | None, tokens: int | None) -> Fit:
        near = number % 3 == 1
        return Fit(
            **{"device": catalog()[names[number]], "devices": 1 + number % 2, "method": "lora", "share": 0.9},
            **{"choice": host if number == 5 else CHOICES["every second"] if near else PLAIN, "host_bytes": GIB},
            device_bytes=int(catalog()[names[number]].memory * (0.89 if near else 0.4)),
            **{"estimated": number % 4 == 0, "tokens_per_second": None if number == 2 else 150.0 * (number % 7 + 1)},
            **{"price": None if price is None else price * (1 + number) if number != 3 else 150.0, "tokens": tokens},
        )

    for columns, prices, tokens, every, methods in (
        *(
            (80, None, None, False, 1),
            (100, None, 10**7, False, 2),
            (100, Prices({}, "€", "mine.toml"), 10**7, False, 2),
        ),
        *((120, Prices({}, "", "x"), None, True, 1), (80, None, 10**7, True, 2), (80, None, None, False, 2)),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        rows = [fit(number, prices and 0.5, tokens) for number in range(len(names)) if names[number] != "cpu"]
        fits = {"lora": rows} if methods == 1 else {"full": [], "lora": rows, "qlora": rows[1:3]}
        answer = CardChoice(
            **{"model": "a model", "seq_len": 512, "effective_batch_size": 32, "prices": prices, "tokens": tokens},
            fits=fits,
        )
        found[f"{columns} {prices} {tokens} {every} {methods}"] = printed(
            capsys, cards._print_answer, answer, cards.CardOptions(every=every)
        )
        for instead, least in (([], None), (rows[:2], ("t4", 20 * GIB, "micro-batch 1 × 32"))):
            nothing = replace(answer, fits={"lora": []}, instead=instead, least=least)
            found[f"{columns} {tokens} nothing {len(instead)}"] = printed(
                capsys, cards._print_answer, nothing, cards.CardOptions()
            )
    brief = (
        *CHOICES.values(),
        replace(PLAIN, strategy="zero2", shared=2),
        replace(PLAIN, knobs=frozenset({"activation_offload"})),
    )
    found["brief"] = [cards._brief(choice) for choice in brief]
    found["money"] = [cards._money(amount) for amount in (0.005, 99.994, 99.999, 100, 12345.6)]
    frozen.check("printed_cards", found)


def test_sentences_about_words(monkeypatch):
    found = {}
    for argv in (
        *("plan a b --x", "plan --dataset my file", "plan --dataset my file name", "plan x", "my file"),
        "a --b c d c d",
    ):
        monkeypatch.setattr(sys, "argv", ["hf-memopt", *argv.split()])
        for extra in (["file"], ["file", "name"], ["b"], ["c", "d"], ["x"]):
            found[f"{argv}: {extra}"] = parsing._unquoted(extra, sys.argv[1:])
    options = [click.Option(["--hardware"]), click.Option(["--seq-len"]), click.Option(["--all"], is_flag=True)]
    for more, word in itertools.product(
        ([], [click.Option(["--set"])]), ("hardwear", "lr", "batch_size", "zzz", "seq_length", "al")
    ):
        command = click.Command("plan", params=[*options, *more])
        error = click.NoSuchOption(f"--{word}", ctx=click.Context(command))
        error.message = f"No such option: --{word}"
        found[f"{word} {bool(more)}"] = parsing.usage_sentence(error)
    frozen.check("printed_sentences", {key: str(value) for key, value in found.items()})
