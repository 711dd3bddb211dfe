"""How a command's words are parsed, where typer's own way would take a slip for an answer, and what is said of words
that cannot be: which option or command was meant."""

import re
import shlex
import sys
from itertools import pairwise

import typer
from typer.core import TyperCommand

from hf_memopt.errors import closest
from hf_memopt.other_names import meant_by


class Command(TyperCommand):
    """A command that takes no other option for an option's value."""

    def parse_args(self, ctx, args):
        for option, value in pairwise(args):
            if option == "--":
                break
            if self.takes_value(option) and value.startswith("--"):
                ctx.fail(f"{option} needs a value, and {value} follows it")
        return super().parse_args(ctx, args)

    def takes_value(self, word: str) -> bool:
        """True if a word is an option with a value in the word after it."""
        name = word.replace("_", "-")
        return any(name in item.opts and not getattr(item, "is_flag", True) for item in self.params)


class TakesLauncher(Command):
    """A command whose argument may be a launcher's whole command, with its own options and the script's."""

    def parse_args(self, ctx, args):
        from hf_memopt.foreign.launchers import is_launcher

        before = 0
        while before < len(args) and args[before].startswith("-") and args[before] != "--":
            before += 2 if self.takes_value(args[before]) else 1
        if before < len(args) and is_launcher(args[before]):
            args = [*args[:before], "--", *args[before:]]
        return super().parse_args(ctx, args)


class CommandLine(typer.Typer):
    """A program whose commands are parsed so."""

    def command(self, *args, **settings):
        return super().command(*args, **{"cls": Command, **settings})


_UNKNOWN = re.compile(r"No such (option|command):? ?'?(?:--)?([^\s']+)")  # click's and typer's own words

_EXTRA = re.compile(r"Got unexpected extra argument\S* \((.*)\)")


def usage_sentence(error) -> str:
    """The sentence for one of click's usage errors, whose own "possible options" are near in letters only."""
    message = error.format_message()
    if extra := _EXTRA.fullmatch(message):
        return _unquoted(extra[1].split(), sys.argv[1:]) or message
    if not (unknown := _UNKNOWN.match(message)):
        return message
    kind, name = unknown.groups()
    command = error.ctx.command
    if kind == "command":
        known = command.list_commands(error.ctx)
        close = meant_by(kind, name, known) or closest(name, known)
        return f"no command {name!r}." + (f" Did you mean {close!r}?" if close else f" Commands: {', '.join(known)}.")
    options = [word for parameter in command.params for word in parameter.opts if word.startswith("--")]
    sentence = f"{command.name} has no option --{name}."
    if close := meant_by(kind, name, options):
        return f"{sentence} Did you mean {close}?"
    if "--set" in options and (field := meant_by("setting", name, ())):
        return f"{sentence} Did you mean {field if field.startswith('--') else f'--set {field}=VALUE'}?"
    if close := closest(f"--{name}", options):
        return f"{sentence} Did you mean {close}?"
    if "--set" in options:
        return f"{sentence} Settings of the training are written --set {name.replace('-', '_')}=VALUE."
    return f"{sentence} Options: {', '.join(options)}."


def _unquoted(extra: list[str], argv: list[str]) -> str | None:
    """The sentence about words that belong to the value before them; None where nothing stands before."""
    places = [place for place in range(1, len(argv)) if argv[place : place + len(extra)] == extra]
    if not places or argv[places[-1] - 1].startswith("-"):
        return None
    if all(re.fullmatch(r"[\w.]+=.*", word) for word in extra):
        return f"{' '.join(extra)!r} stands alone: settings are written {' '.join(f'--set {word}' for word in extra)}"
    place = places[-1]
    option = argv[place - 2] if place > 1 and argv[place - 2].startswith("--") else ""
    value = shlex.quote(" ".join([argv[place - 1], *extra]))
    return f"{' '.join(extra)!r} stands alone: quote a value of several words, {option} {value}".replace(",  ", ", ")
