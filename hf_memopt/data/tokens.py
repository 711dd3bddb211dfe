"""Texts as blocks of token ids for pretraining."""

from hf_memopt.data.columns import check_columns
from hf_memopt.data.turns import read_text
from hf_memopt.errors import InputError

IGNORED = -100  # ignore_index of PyTorch's cross entropy


def check_text(row: dict, where) -> None:
    """Refuse a row whose text cannot be trained on; of an empty one, its end-of-text token is.

    Raises:
        InputError: names the row.
    """
    check_columns(row, "text", where)
    read_text(row, "text", where, may_be_blank=True)


def packed(rows, tokenizer, length: int, source: str = "", shorter: bool = False):
    """Texts, each followed by the end-of-text token, concatenated and split into blocks of `length` tokens.

    There is no padding; the remainder of every 1,000 texts is dropped. Labels equal the input ids (the model shifts
    them).

    Args:
        rows: that check_text() accepts.
        shorter: texts that fill no block of `length` become one block of all their tokens.

    Raises:
        InputError: the texts together are shorter than one block.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-text token (eos_token), which packing needs between texts")

    def tokenize(batch):
        ids = tokenizer(batch["text"], verbose=False)["input_ids"]
        return {"ids": [[*tokens, tokenizer.eos_token_id] for tokens in ids]}

    def block(batch, shorter=False):
        stream = [token for ids in batch["ids"] for token in ids]
        size = min(length, len(stream)) if shorter else length
        blocks = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
        return {"input_ids": blocks, "labels": [list(ids) for ids in blocks]}

    described = [{"desc": "tokenizing"}, {"desc": "packing"}] if hasattr(rows, "__len__") else [{}, {}]
    tokenized = rows.map(tokenize, batched=True, remove_columns=rows.column_names, **described[0])
    blocks = tokenized.map(block, batched=True, remove_columns=["ids"], **described[1])
    if shorter and next(iter(blocks), None) is None:
        whole = {"batched": True, "batch_size": None, "fn_kwargs": {"shorter": True}}
        blocks = tokenized.map(block, **whole, remove_columns=["ids"], **described[1])
    if next(iter(blocks), None) is None:  # the Trainer would repeat a stream's empty epochs forever
        raise InputError(
            f"data set {source!r} is shorter than one block of {length} tokens: lower max_length, or add text"
        )
    return blocks
