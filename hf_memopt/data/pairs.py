"""Pairs of answers, and prompts, in the forms that TRL's trainers take."""

from hf_memopt.data.columns import MEDIA, Form
from hf_memopt.data.turns import is_blank
from hf_memopt.errors import InputError

# https://huggingface.co/docs/trl/dataset_formats: preference, with the prompt in a column or at the start of both.
PAIRS = Form(("chosen", "rejected"), ("prompt", "tools", "chat_template_kwargs"))


def check_pair_columns(names: list[str], source) -> list[str]:
    """Columns that are not used.

    Raises:
        InputError: a needed column is missing, or there are images.
    """
    missing = [name for name in PAIRS.needed if name not in names]
    if missing:
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


def check_pair(row: dict, where, has_template: bool = True) -> None:
    """Refuse a row that TRL could not tokenize, or would train on without a difference.

    Args:
        where: names the row in errors.
        has_template: the tokenizer has a chat template.

    Raises:
        InputError: names the row.
    """
    kinds = {_kind(row[name], f"{where}: {name}") for name in ("prompt", *PAIRS.needed) if name in row}
    if len(kinds) > 1:
        raise InputError(f"{where}: some of {', '.join(PAIRS.needed)} and prompt are texts, others messages")
    if kinds == {"messages"} and not has_template:
        raise InputError(f"{where}: it has messages, and the tokenizer has no chat template")
    if row["chosen"] == row["rejected"]:
        raise InputError(f"{where}: chosen and rejected are the same")


def check_prompt(row: dict, where, needed: tuple[str, ...] = ("prompt", "completion")) -> None:
    """Refuse a prompt that is completed in training, or its right answer, where either is missing.

    Raises:
        InputError: names the row.
    """
    for name in needed:
        _kind(row[name], f"{where}: {name}")


def _kind(value, where: str) -> str:
    if is_blank(value):
        raise InputError(f"{where} is empty: fill it, or remove the row")
    if isinstance(value, str):
        return "text"
    good = isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and not is_blank(turn.get("content"))
        for turn in value
    )
    if not good:
        raise InputError(f"{where} must be a text, or messages with `role` and `content`")
    return "messages"
