"""What `hf-memopt plan` prints: the answer, or with --verbose its tables."""

import itertools

from hf_memopt.cli.answer_printed import (
    command_lines,
    host_lines,
    memory_bar,
    note_lines,
    one_each,
    paragraph,
    print_answer,
    speed_lines,
)
from hf_memopt.cli.output import print_table
from hf_memopt.cli.speed_printed import AmountOptions, print_profile_speeds, profile_names
from hf_memopt.packages import missing_for
from hf_memopt.terminal import say
from hf_memopt.units import gib, size

_ALTERNATIVES = 4
# What a method gives up for memory.
_LESS = {"lora": "trains adapters alone", "qlora": "with weights in 4 bits"}


def print_plan(plan, amount: AmountOptions, verbose: bool, after: list[str]) -> None:
    """Print a plan: its usual profile, what else would do, why not the rest, and the command.

    Args:
        after: lines that follow: what was written, the diff of another tool's file, what to ask next.
    """
    if verbose:
        _print_tables(plan, amount)
        print("".join(f"{line}\n" for line in after), end="")
    elif plan.profiles:
        spec, profile = plan.spec, plan.usual
        estimate = profile.estimate
        took = amount.time_and_cost(estimate, spec.effective_batch_size, spec.preset.processes)
        head = [
            *paragraph(f"YES, {'probably, ' * spec.quick}with {spec.preset.method}: {_asked(spec)}"),
            *memory_bar(estimate),
            *paragraph(profile.summary, "with"),
            *speed_lines(estimate, took, amount, spec.effective_batch_size),
            *host_lines(max(one.estimate.host_bytes for one in plan.profiles), spec.host_memory),
        ]
        others = one_each("or", itertools.islice(_alternatives(plan), _ALTERNATIVES))
        tail = note_lines(plan.notes)
        if spec.tool is None:
            start, notes = _start(spec, profile)
            tail = [*start, *tail, *note_lines(notes)]
        reasons = [_why_not(rejected) for rejected in plan.rejected if not rejected.slower]
        print_answer(head, [*others, *one_each("not", reasons)], [*tail, *after])
    else:
        _print_nothing(plan, after)


def _print_nothing(plan, after: list[str]) -> None:
    head = [
        *paragraph(f"NO{', probably' * plan.spec.quick}: {_asked(plan.spec)}: {_missing(plan)}"),
        *(line for change in plan.nearest for line in paragraph(change, "fits")),
    ]
    print_answer(head, one_each("not", map(_why_not, plan.rejected)), [*note_lines(plan.notes), *after])


def _asked(spec) -> str:
    preset = spec.preset
    devices = f"{preset.processes} × " if preset.processes > 1 else ""
    length = f"{spec.video.kind}s" if spec.video is not None else f"{spec.seq_len} tokens"
    return f"{spec.model} on {devices}{preset.hardware.label}, {length}"


def _alternatives(plan):
    """Other profiles, methods and the plain settings: a line each."""
    for group in _by_settings(plan.profiles):
        if plan.usual not in group:
            first = group[0]
            yield _alternative(profile_names(group), size(first.estimate.device_bytes), first, first.summary)
    for row in plan.methods:
        if row.method != plan.spec.preset.method:
            name = ", ".join(filter(None, (row.method, _why_second(row))))
            yield _alternative(name, _memory(row), row, row.settings)
    if plan.plain and plan.plain.fits:
        yield _alternative("plain", _memory(plan.plain), plan.plain, plan.plain.settings)


def _alternative(name: str, memory: str, row, settings: str) -> str:
    speed = "" if row.tokens_per_second is None else f", {_speed(row.tokens_per_second)} tokens/s"
    return f"{name}: {memory}{speed}: {settings}"


def _why_second(row) -> str:
    """The reason that a faster method is not planned: what is trained, and its precision, come before speed."""
    return f"faster but {_LESS[row.method]}" if row.relative_time < 1 and row.method in _LESS else ""


def _why_not(rejected) -> str:
    """A reason in a line, whose subject is not said twice."""
    named = rejected.reason.startswith(rejected.settings)
    return rejected.reason if named else f"{rejected.settings}: {rejected.reason}"


def _missing(plan) -> str:
    if plan.missing_bytes:
        return f"nothing fits, {gib(plan.missing_bytes)} missing"
    return "nothing fits, and no estimate says how much memory is missing"


def _print_tables(plan, amount: AmountOptions) -> None:
    spec = plan.spec
    method = f", {spec.preset.method}" if plan.profiles else ""
    say(f"{_asked(spec)}{method}, {spec.effective_batch_size} samples a step ({gib(spec.memory)} each)")
    if plan.profiles:
        _print_profiles(plan)
        print_profile_speeds(_by_settings(plan.profiles), amount, spec.effective_batch_size, spec.preset.processes)
        _print_methods(plan)
        print("\n".join(host_lines(max(one.estimate.host_bytes for one in plan.profiles), spec.host_memory)))
    if plan.rejected:
        print_table("left out", ("settings", "reason"), [(one.settings, one.reason) for one in plan.rejected])
    if not plan.profiles:
        print(_missing(plan))
        for change in plan.nearest:
            print(f"  would fit: {change}")
    notes = plan.notes
    if plan.profiles and spec.tool is None:
        start, own = _start(spec, plan.usual)
        print("\n".join(start))
        notes = [*notes, *own]
    for note in notes:
        say(f"note: {note}")


def _start(spec, profile) -> tuple[list[str], list[str]]:
    """The command that starts a profile, in lines, and notes on it; where there is no recipe, the fields for a script
    of one's own."""
    from hf_memopt.estimator.trl_tasks import TRL_TASKS
    from hf_memopt.planner.launch import (
        has_recipe,
        launch_command,
        memory_settings,
        recipe_name,
        training_arguments,
    )

    if has_recipe(spec):
        recipe = recipe_name(spec)
        texts = "for texts; --task sft plans recipes/sft.py, for chats and answers" if recipe == "pretrain" else ""
        notes = filter(None, (missing_for(recipe, profile.preset.strategy), texts))
        return command_lines(launch_command(spec, profile)), [*notes]
    config = TRL_TASKS[spec.task].config if spec.task in TRL_TASKS else "TrainingArguments"
    lines = []
    for name, fields in ((config, training_arguments(spec, profile)), ("MemoryArguments", memory_settings(profile))):
        values = ", ".join(f"{key}={value!r}" for key, value in sorted(fields.items()))
        lines += paragraph(f"{name}({values})", "script")
    return lines, []


def _by_settings(profiles) -> list[list]:
    """The profiles, those with the same settings together."""
    return [list(group) for _, group in itertools.groupby(profiles, lambda profile: profile.choice)]


def _print_profiles(plan) -> None:
    """Print what each profile sets and is predicted to need; profiles with the same settings are one row."""
    groups = _by_settings(plan.profiles)
    rows = [
        (
            profile_names(group),
            " ".join(f"{profile.share:.0%}" for profile in group),
            group[0].summary,
            size(group[0].estimate.device_bytes),
            _speed(group[0].tokens_per_second),
        )
        for group in groups
    ]
    if plan.plain:
        rows.append(_plain_row(plan.plain))
    print_table("", ("profile", "fills", "settings", "predicted", "tokens/s"), rows)
    first = [group[0] for group in groups]
    kinds = [
        kind
        for kind in first[0].estimate.breakdown
        if any(profile.estimate.breakdown[kind] > 2**20 for profile in first)
    ]
    rows = [("phase", *(profile.estimate.phase for profile in first))]
    whole = max(profile.estimate.device_bytes for profile in first)
    rows += [
        (kind.replace("_", " "), *(size(profile.estimate.breakdown[kind], whole) for profile in first))
        for kind in kinds
    ]
    print_table("at the peak", ("memory", *map(profile_names, groups)), rows)


def _plain_row(plain) -> tuple[str, ...]:
    """The row of the settings without host memory and rounding, and what they lose."""
    if not plain.fits:
        return "plain alternative", "", plain.settings, f"{_memory(plain)}: does not fit", ""
    speed = f"{_speed(plain.tokens_per_second)} ({plain.relative_time:.2f} × the time)"
    return "plain alternative", "", plain.settings, _memory(plain), speed


def _print_methods(plan) -> None:
    """The methods that fit, beside each other, where the plan chose one."""
    if len(plan.methods) < 2:
        return
    rows = [
        (
            f"{row.method} (planned)" if row.method == plan.spec.preset.method else row.method,
            row.settings,
            _memory(row),
            _speed(row.tokens_per_second),
        )
        for row in plan.methods
    ]
    print_table("methods that fit", ("method", "settings", "predicted", "tokens/s"), rows)
    for row in plan.methods:
        if row.method != plan.spec.preset.method and (reason := _why_second(row)):
            print(f"not {row.method}: {reason}")


def _speed(tokens_per_second: float | None) -> str:
    from hf_memopt.estimator.timing.duration import two_digits

    return "unknown" if tokens_per_second is None else two_digits(tokens_per_second)


def _memory(row) -> str:
    return ("" if row.estimated else "about ") + size(row.device_bytes)
