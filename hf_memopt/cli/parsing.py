"""How a command's words are parsed, where typer's own way would take a slip for an answer."""

from itertools import pairwise

import typer
from typer.core import TyperCommand


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
