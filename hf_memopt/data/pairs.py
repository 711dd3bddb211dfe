"""Pairs of answers, and prompts, in the forms that TRL's trainers take."""

from functools import partial

from hf_memopt.data.chat import Chat
from hf_memopt.data.columns import MEDIA, SYSTEM, Form, Judge, is_empty
from hf_memopt.data.turns import is_blank, read_messages, read_tools
from hf_memopt.errors import InputError, brief

# https://huggingface.co/docs/trl/dataset_formats: preference, with the prompt in a column or at the start of both.
PAIRS = Form(("chosen", "rejected"), ("prompt", "tools", "chat_template_kwargs"))


def check_pair_columns(names: list[str], source) -> list[str]:
    """Columns that are not used.

    Raises:
        InputError: a needed column is missing, or there are images.
    """
    if any(name not in names for name in PAIRS.needed):
        raise InputError(
            f"data set {source!r} has the columns {', '.join(names) or 'none'}; preferences need "
            f"{' and '.join(PAIRS.needed)}, with their prompt in `prompt` or at the start of both"
        )
    for name in names:
        if name in MEDIA:
            raise InputError(
                f"data set {source!r}: the column {name!r} would not be trained on: this recipe reads texts. Train "
                f"without it by --ignore_columns {name}"
            )
    return sorted(set(names) - {*PAIRS.needed, *PAIRS.optional})


def pair_judge(tokenizer) -> Judge:
    """What refuses rows that TRL's trainers of pairs cannot train on.

    Args:
        tokenizer: whose chat template has to write all of a row; None where it is not known.
    """
    if tokenizer is None:
        return check_pair
    return partial(check_pair, chat=Chat(tokenizer), has_template=bool(tokenizer.chat_template))


def check_pair(row: dict, where, chat: Chat | None = None, has_template: bool = True) -> None:
    """Refuse a row that TRL could not tokenize, would change, or would train on without a difference.

    Args:
        where: names the row in errors.
        chat: the template that has to write all of the row; None where that is not known.
        has_template: there is one.

    Raises:
        InputError: names the row.
    """
    names = [
        name for name in ("prompt", *PAIRS.needed) if name in row and not (name == "prompt" and row[name] is None)
    ]
    kinds = {_kind(row[name], f"{where}: {name}") for name in names}
    if len(kinds) > 1:
        raise InputError(f"{where}: some of {', '.join(PAIRS.needed)} and prompt are texts, others messages")
    if row["chosen"] == row["rejected"]:
        raise InputError(f"{where}: chosen and rejected are the same")
    if kinds == {"messages"} and not has_template:
        raise InputError(f"{where}: it has messages, and the tokenizer has no chat template")
    if kinds == {"messages"}:
        _check_answers(row, where, chat)


def _check_answers(row: dict, where, chat: Chat | None) -> None:
    """Check both conversations of a row of messages."""
    prompt, tools = row.get("prompt") or [], read_tools(row, where)
    if not prompt and row["chosen"][0] != row["rejected"][0]:
        raise InputError(f"{where}: chosen and rejected begin differently, and there is no prompt: put it before both")
    if prompt and prompt[-1]["role"] == "assistant":
        raise InputError(f"{where}: prompt ends with an answer: put it into chosen and rejected, or remove the row")
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        raise InputError(f"{where}: chat_template_kwargs must be a mapping, not {brief(row['chat_template_kwargs'])}")
    for name in PAIRS.needed:
        if row[name][-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} does not end with an answer (a message of the assistant)")
        messages = read_messages({"messages": [*prompt, *row[name]]}, "messages", where)
        if chat is not None:
            chat.check(messages, tools, where)


def check_prompt(row: dict, where, needed: tuple[str, ...] = ("prompt", "completion")) -> None:
    """Refuse a prompt that is completed in training, or its right answer, where either is missing.

    Raises:
        InputError: names the row.
    """
    for name in needed:
        if _kind(row[name], f"{where}: {name}") == "messages" and is_blank(
            [turn.get("content") for turn in row[name]]
        ):
            raise InputError(f"{where}: {name} is empty: fill it, or remove the row")
    for name in (*SYSTEM, "tools", *MEDIA):
        if not is_empty(row.get(name)):
            raise InputError(f"{where}: the column {name!r} does not reach the model: put it into the prompt")


def _kind(value, where: str) -> str:
    """Whether a column is a text or messages, with nothing but texts as their content."""
    if is_blank(value):
        raise InputError(f"{where} is empty: fill it, or remove the row")
    if isinstance(value, str):
        return "text"
    good = isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str | None)
        for turn in value
    )
    if not good:
        raise InputError(f"{where} must be a text, or messages with `role` and a text as `content`")
    return "messages"
