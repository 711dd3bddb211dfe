"""Pairs of answers, in the forms that TRL's DPO and reward trainers take."""

from hf_memopt.data.columns import MEDIA, Form, is_empty, row_number
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


def check_pairs(rows, source, has_template: bool) -> None:
    """Refuse rows that TRL could not tokenize, or would train on without a difference.

    Args:
        has_template: the tokenizer has a chat template.

    Raises:
        InputError: names the row.
    """
    for index, row in enumerate(rows):
        where = f"data set {source!r}, row {row_number(rows._indices, index)}"
        kinds = set()
        for name in ("prompt", *PAIRS.needed):
            if name == "prompt" and name not in row:
                continue
            if is_empty(row[name]):
                raise InputError(f"{where}: {name} is empty")
            kinds.add(_kind(row[name], f"{where}: {name}"))
        if len(kinds) > 1:
            raise InputError(f"{where}: some of {', '.join(PAIRS.needed)} and prompt are texts, others messages")
        if kinds == {"messages"} and not has_template:
            raise InputError(f"{where}: it has messages, and the tokenizer has no chat template")
        if row["chosen"] == row["rejected"]:
            raise InputError(f"{where}: chosen and rejected are the same")


def _kind(value, where: str) -> str:
    if isinstance(value, str):
        return "text"
    good = isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and not is_empty(turn.get("content"))
        for turn in value
    )
    if not good:
        raise InputError(f"{where} must be a text, or messages with `role` and `content`")
    return "messages"
