"""Bad inputs, one table: what is given, and a fragment of the one line that refuses it.

Most entries are generated: every field of every dataclass that a user fills × every kind of value that it does not
take, every form of a row × every way to spoil it, every kind of file × every way to break it. A new field or form is
in the table by itself.
"""

import dataclasses
import io
import json
import math
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from hf_memopt.errors import InputError

HUGE = 10**30


@dataclass(frozen=True)
class BadInput:
    """One entry.

    Attributes:
        name: of the test.
        act: what the user does, given an empty folder for the files that it needs.
        expected: a fragment of the error; None where either an error or working on is right.
    """

    name: str
    act: Callable[[Path], Any]
    expected: str | None = None


# ---- settings: every field × the values that it does not take

VALUES = {
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "huge": HUGE,
    "a word": "abc",
    "an empty text": "",
    "a switch": True,
    "a fraction": 1.5,
    "a list": [1],
    "an empty list": [],
    "a mapping": {"a": 1},
    "minus one": -1,
    "zero": 0,
    "nothing": None,
}
# What none of the fields of a type takes; anything else may be right for one of them.
REFUSED = {
    float: ("nan", "inf", "minus inf", "huge", "a word", "an empty text", "a switch", "a list", "a mapping"),
    int: (
        "nan",
        "inf",
        "minus inf",
        "huge",
        "a word",
        "an empty text",
        "a switch",
        "a fraction",
        "a list",
        "a mapping",
    ),
    bool: ("nan", "inf", "huge", "a word", "a fraction", "a list", "an empty list", "a mapping", "minus one"),
    str: ("nan", "inf", "a switch", "a fraction", "a mapping"),
}
_LISTS = {"a list", "an empty list"}


def settings() -> Iterator[BadInput]:
    """Every field of a recipe's `--config` file."""
    from transformers import TrainingArguments

    from hf_memopt.levers.arguments import MemoryArguments
    from hf_memopt.recipe.recipe_arguments import RecipeArguments
    from hf_memopt.recipe.video import VideoArguments

    seen: set[str] = {"config"}
    for kind in (TrainingArguments, MemoryArguments, RecipeArguments, VideoArguments):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in seen or not field.init:
                continue
            seen.add(field.name)
            for name, value in VALUES.items():
                refused = _refuses(hints[field.name], name)
                yield BadInput(f"{field.name}: {name}", _in_file(field.name, value), field.name if refused else None)


def _refuses(hint: Any, name: str) -> bool:
    """Whether every type of a union refuses a value."""
    kinds = [one for one in typing.get_args(hint) or (hint,) if one is not type(None)]
    if not all(one in REFUSED for one in kinds):
        return False
    return all(name in REFUSED[one] for one in kinds)


def _in_file(name: str, value: Any) -> Callable[[Path], Any]:
    def act(folder: Path):
        (folder / "run.yaml").write_text(yaml.safe_dump({name: value}))
        return built(["--config", str(folder / "run.yaml")], folder)

    return act


def built(argv: list[str], folder: Path):
    """TrainingArguments as a recipe on the CPU builds them."""
    from hf_memopt.presets import get_preset
    from hf_memopt.recipe.recipe_arguments import parse
    from hf_memopt.recipe.video import VideoArguments

    parsed = parse(argv, own=VideoArguments)
    fields = {"output_dir": str(folder / "out"), "use_cpu": True, **parsed.training}
    if parsed.recipe.effective_batch_size is not None:
        fields["effective_batch_size"] = parsed.recipe.effective_batch_size
    preset = get_preset("cpu", "qlora")
    preset.peft_config(**parsed.lora)
    return preset.training_arguments(world_size=1, **fields)


def command_line() -> Iterator[BadInput]:
    """Every number and switch as a word of the command line."""
    from transformers import TrainingArguments

    from hf_memopt.levers.arguments import MemoryArguments

    for kind in (TrainingArguments, MemoryArguments):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            kinds = {one for one in typing.get_args(hints[field.name]) or (hints[field.name],)} - {type(None)}
            for word in ("nan", "inf", "abc", "") if kinds <= {int, float} else ("abc",) if kinds == {bool} else ():
                argv = [f"--{field.name}={word}"]
                yield BadInput(f"--{field.name}={word}", lambda folder, argv=argv: built(argv, folder), field.name)


def nested() -> Iterator[BadInput]:
    """Fields of LoraConfig and BitsAndBytesConfig, and words that are not YAML."""
    bad = {
        "lora.r": ("abc", "0", "-8", ".nan", "1.5", "true", "[8]", "1e30", "null"),
        "lora.lora_alpha": ("abc", "-1", ".inf", "[16]", "true"),
        "lora.lora_dropout": ("abc", "-0.1", "1.5", ".nan"),
        "lora.target_modules": ("true", "{a: 1}", "[1, 2]"),
        "lora.use_dora": ("abc", "5", "[true]"),
        "lora.bias": ("some", "5"),
        "lora.modules_to_save": ("5", "true"),
        "lora.rank_pattern": ("abc", "[1]"),
        "quantization.load_in_4bit": ("abc", "5", "[1]", "false"),
        "quantization.bnb_4bit_quant_type": ("nf5", "5.5", "[nf4]"),
        "quantization.bnb_4bit_compute_dtype": ("float99", "[1]", "true"),
        "quantization.bnb_4bit_use_double_quant": ("abc", "5"),
        "quantization.llm_int8_threshold": (".nan", "abc", "-1"),
    }
    not_yaml = (
        "[",
        "{a: ",
        "a: b: c",
        "!!python/object:os.system x",
        "*alias",
        "\x00",
        "2024-13-45",
        "'open",
        "@",
        "`",
    )
    for key, texts in bad.items():
        field = key.partition(".")[2]
        for text in (*texts, *(not_yaml if key in ("lora.r", "quantization.load_in_4bit") else ())):
            argv = [f"--{key}={text}"]
            yield BadInput(f"--{key}={text!r}", lambda folder, argv=argv: built(argv, folder), field)
    yield BadInput("--lora.r without a value", lambda folder: built(["--lora.r"], folder), "a value is missing")
    for text in not_yaml:
        yield BadInput(
            f"--set learning_rate={text!r}", lambda folder, text=text: _set(f"learning_rate={text}"), "learning_rate"
        )
    for word in (
        "max_frames=abc",
        "max_frames=true",
        "dtype=float99",
        "dtype=null",
        "padded=abc",
        "frame_size=[1]",
        "max_pixels_per_frame=.nan",
        "answer_tokens=0",
        "loss_chunk_size=abc",
        "sparse_block_size=0",
        "num_local_blocks=-1",
        "checkpoint_ratio=.nan",
        "oom_recovery=5",
        "max_memory_gib=.inf",
        "quantization.nf5=1",
    ):
        name = word.partition("=")[0].rpartition(".")[2]
        yield BadInput(f"--set {word}", lambda folder, word=word: _set(word), name)


def _set(word: str):
    from hf_memopt.cli.settings import parse_settings
    from hf_memopt.presets import get_preset
    from hf_memopt.presets.training_arguments import resolve

    return resolve(get_preset("cpu"), 1, parse_settings([word])["training"])


# ---- rows: every form × every way to spoil it, in every format that can hold it

ASK, SAY = {"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four."}
GOOD = {
    "messages": {"messages": [ASK, SAY]},
    "conversations": {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4."}]},
    "prompt/completion": {"prompt": "Two plus two?", "completion": " Four."},
    "alpaca": {"instruction": "Two plus two?", "output": "Four."},
    "text": {"text": "Two plus two is four."},
}
_WRONG = {
    "null": None,
    "empty": "",
    "blank": " \n",
    "a number": 5,
    "a switch": True,
    "a mapping": {"a": 1},
    "a list of numbers": [5],
}
_MESSAGES = {
    "an empty list": [],
    "a message that is null": [None],
    "a message that is a text": ["Hello"],
    "no role": [{"content": "Hello"}],
    "a role that is null": [{"role": None, "content": "Hello"}],
    "a role that is a number": [{"role": 5, "content": "Hello"}],
    "an unknown role": [{"role": "asistant", "content": "Hello"}, SAY],
    "content that is a number": [ASK, {"role": "assistant", "content": 5}],
    "content that is a mapping": [ASK, {"role": "assistant", "content": {"a": 1}}],
    "a part with a picture": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, SAY],
    "a part whose text is a number": [{"role": "user", "content": [{"type": "text", "text": 5}]}, SAY],
    "a part that is a number": [{"role": "user", "content": [5]}, SAY],
    "an answer first": [SAY],
    "an answer first, behind instructions": [{"role": "system", "content": "Be brief."}, SAY],
    "a call of nothing": [ASK, {"role": "assistant", "content": "", "tool_calls": [{}]}],
    "an answer that cannot be seen": [ASK, {"role": "assistant", "content": "\u200b"}],
    "no answer": [ASK],
    "an answer that is empty": [ASK, {"role": "assistant", "content": ""}],
    "an answer that is blank": [ASK, {"role": "assistant", "content": " \n"}],
    "an answer that is null": [ASK, {"role": "assistant", "content": None}],
    "an answer without content": [ASK, {"role": "assistant"}],
    "an answer of no parts": [ASK, {"role": "assistant", "content": []}],
    "an answer of an empty part": [ASK, {"role": "assistant", "content": [{"type": "text", "text": ""}]}],
    "an answer of a part that is null": [ASK, {"role": "assistant", "content": [{"type": "text", "text": None}]}],
    "an empty answer before a good one": [ASK, {"role": "assistant", "content": ""}, ASK, SAY],
    "a question that is empty": [{"role": "user", "content": ""}, SAY],
    "a question that is null": [{"role": "user", "content": None}, SAY],
    "instructions that are null": [{"role": "system", "content": None}, ASK, SAY],
}


def spoilt_rows() -> Iterator[tuple[str, str, dict]]:
    """Form, what is wrong, and the row."""
    for form, good in GOOD.items():
        for column in good:
            for name, value in _WRONG.items():
                yield form, f"{column} is {name}", {**good, column: value}
    for name, messages in _MESSAGES.items():
        yield "messages", name, {"messages": messages}
        turns = [
            {"from": one.get("role"), "value": one.get("content")} if isinstance(one, dict) else one
            for one in messages
        ]
        yield "conversations", name, {"conversations": turns}
    for name, value in {"a number": 5, "a list": ["Be brief."], "a mapping": {"a": 1}}.items():
        yield "messages", f"system is {name}", {**GOOD["messages"], "system": value}
        yield "alpaca", f"input is {name}", {**GOOD["alpaca"], "input": value}
        yield "alpaca", f"history is {name}", {**GOOD["alpaca"], "history": value}
        yield "messages", f"tools are {name}", {**GOOD["messages"], "tools": value}


def rows() -> Iterator[BadInput]:
    """Rows that are read and cannot be trained on: file and line stand in the error."""
    for form, wrong, row in spoilt_rows():
        yield BadInput(f"{form}.jsonl: {wrong}", _trained(form, row), "rows.jsonl: line 2")
        yield BadInput(f"{form}, streamed: {wrong}", _trained(form, row, streaming=True), "rows.jsonl: line 2")
        if (table := _table(GOOD[form], row)) is not None:
            yield BadInput(f"{form}.parquet: {wrong}", _trained_table(table), "rows.parquet: row")


def _trained(form: str, row: dict, streaming: bool = False) -> Callable[[Path], Any]:
    def act(folder: Path):
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in (GOOD[form], row)))
        return samples(path, streaming)

    return act


def _table(good: dict, row: dict):
    """A good row and another as Arrow's table; the other alone where a column would have two types; None where it has
    two in itself or a mapping of nothing, which no file of Parquet can hold."""
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys([*good, *row])
    for pair in ([good, row], [row]):
        try:
            table = pyarrow.Table.from_pylist([{name: one.get(name) for name in names} for one in pair])
            parquet.write_table(table, pyarrow.BufferOutputStream())
            return table
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            continue
    return None


def _trained_table(table) -> Callable[[Path], Any]:
    def act(folder: Path):
        from pyarrow import parquet

        parquet.write_table(table, folder / "rows.parquet")
        return samples(folder / "rows.parquet")

    return act


def samples(path: Path, streaming: bool = False) -> list:
    """The rows of a file as recipes/sft.py gives them to TRL's trainer."""
    from transformers import AutoTokenizer

    from hf_memopt.data.builtin_model import builtin_model
    from hf_memopt.data.chat import find_answer_kind, to_trl

    rows, form = good_answers(str(path), AutoTokenizer.from_pretrained(builtin_model()), streaming=streaming)
    return list(to_trl(rows, form, find_answer_kind(rows, form)))


def good_answers(source: str, tokenizer, skip: bool = False, **load):
    """The rows that recipes/sft.py keeps of a source, and their form."""
    from hf_memopt.data.bad_rows import sift
    from hf_memopt.data.chat import answer_judge, find_answer_kind
    from hf_memopt.data.sources import load_rows

    def keep(parts, form):
        judge = answer_judge(form, find_answer_kind(parts[0], form), tokenizer)
        return sift(parts, judge, source, skip)[0]

    rows, _, form = load_rows(source, keep=keep, **{"held_out": 0, **load})
    return rows, form


# ---- commands


COMMANDS = {
    "estimate gpt2 --seq-len 0": "--seq-len",
    "estimate gpt2 --seq-len -5": "--seq-len",
    "estimate gpt2 --seq-len abc": "--seq-len",
    "estimate gpt2 --seq-len 1.5": "--seq-len",
    "estimate gpt2 --world-size 0": "--world-size",
    "estimate gpt2 --world-size nan": "--world-size",
    "plan gpt2 --seq-len 0": "--seq-len",
    "plan gpt2 --effective-batch-size 0": "--effective-batch-size",
    "plan gpt2 --effective-batch-size 1000000000000": "--effective-batch-size",
    "plan gpt2 --memory 0": "--memory",
    "plan gpt2 --memory nan": "--memory",
    "plan gpt2 --memory inf": "--memory",
    "plan gpt2 --memory -1": "--memory",
    "plan gpt2 --host-memory nan": "--host-memory",
    "plan gpt2 --rung top": "profile",
    "plan gpt2 --quick --hardware any": "--quick",
    "plan gpt2 --quick --seq-len max": "--quick",
    "plan gpt2 --quick --frames max": "--quick",
    "plan gpt2 --quick --export run": "--quick",
    "advise log --seq-len 0": "--seq-len",
    "dry-run no.py --world-size 0": "--world-size",
    "export cpu_x2 run --sequence-parallel -8": "--sequence-parallel",
    "export cpu_x2 run --sequence-parallel 0": "--sequence-parallel",
    "export cpu_x2 run --machines 0": "--machines",
    "export cpu_x2 run --machines -1": "--machines",
    "monitor --interval 0": "--interval",
    "monitor --interval -1": "--interval",
    "monitor --interval nan": "--interval",
    "monitor --interval inf": "--interval",
    "snapshot file --top 0": "--top",
    "snapshot file --top -3": "--top",
    "show nothing": "unknown preset or hardware",
    "show cpu --precision fp9": "unknown precision",
    "presets --method fully": "unknown method",
}


def commands() -> Iterator[BadInput]:
    """Options of the command line."""
    for line, expected in COMMANDS.items():
        yield BadInput(line, lambda folder, line=line: typed(*line.split()), expected)


def typed(*words: str) -> None:
    """hf-memopt in this process.

    Raises:
        InputError: it ended with exit code 2; the text is what it wrote to stderr.
    """
    from hf_memopt.cli import main

    said = io.StringIO()
    with mock.patch.object(sys, "argv", ["hf-memopt", *words]), redirect_stderr(said), redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as ended:
            if ended.code != 2 or not said.getvalue().startswith("error: "):
                raise RuntimeError(f"ended with {ended.code}: {said.getvalue()[-300:]}") from ended
            raise InputError(said.getvalue()) from ended
