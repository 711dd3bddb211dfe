"""Rows as token ids: packed blocks for pretraining, labels on the answers for fine-tuning."""

import bisect
import logging
from collections.abc import Iterable

from hf_memopt.data.chat import Chat
from hf_memopt.data.columns import SYSTEM, check_columns, row_number
from hf_memopt.data.row_places import Place
from hf_memopt.data.turns import joined_text, read_messages, read_tools
from hf_memopt.errors import InputError, brief

logger = logging.getLogger(__name__)

IGNORED = -100  # ignore_index of PyTorch's cross entropy
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def packed(rows, columns: str, tokenizer, length: int, source: str = ""):
    """Texts, each followed by the end-of-text token, concatenated and split into blocks of `length` tokens.

    There is no padding; the remainder of every 1,000 texts is dropped. Labels equal the input ids (the model shifts
    them).

    Raises:
        InputError: the texts together are shorter than one block.
    """

    def tokenize(batch, indices):
        texts = [text(row, index)[0] for row, index in zip(_rows(batch), indices, strict=True)]
        ids = tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
        return {"ids": [[*tokens, tokenizer.eos_token_id] for tokens in ids]}

    def block(batch):
        stream = [token for ids in batch["ids"] for token in ids]
        blocks = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
        return {"input_ids": blocks, "labels": [list(ids) for ids in blocks]}

    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-text token (eos_token), which packing needs between texts")
    plain = _prepare_template(rows, columns, tokenizer)
    text = _reader(rows, columns, tokenizer, plain, source)
    described = _describe(rows)
    tokenized = rows.map(
        tokenize, batched=True, with_indices=True, remove_columns=rows.column_names, **described("tokenizing")
    )
    blocks = tokenized.map(block, batched=True, remove_columns=["ids"], **described("packing"))
    if _is_empty(blocks):
        raise InputError(
            f"data set {source!r} is shorter than one block of {length} tokens: lower max_length, or add text"
        )
    return blocks


def answered(rows, columns: str, tokenizer, length: int, source: str = ""):
    """Rows as token ids, with labels on the answers only.

    A row is truncated to `length` tokens, and dropped if no answer token remains.

    Raises:
        InputError: no row keeps an answer.
    """

    def encode(row, index):
        return _encode(*text(row, index), tokenizer, length, plain)

    plain = _prepare_template(rows, columns, tokenizer)
    text = _reader(rows, columns, tokenizer, plain, source)
    described = _describe(rows)
    encoded = rows.map(encode, with_indices=True, remove_columns=rows.column_names, **described("tokenizing"))
    kept = encoded.filter(
        lambda row: any(label != IGNORED for label in row["labels"]), **described("checking answers")
    )
    if _is_empty(kept):
        raise InputError(f"no row of data set {source!r} has an answer within {length} tokens: raise max_length")
    if hasattr(kept, "__len__") and len(kept) < len(encoded):
        logger.warning(
            "%d of %d rows dropped: no answer within max_length=%d", len(encoded) - len(kept), len(encoded), length
        )
    return kept


def packed_answers(rows, columns: str, tokenizer, length: int, source: str = ""):
    """The rows of answered(), several in a block of `length` tokens, with little padding.

    `position_ids` restart with each row. From them transformers' attention keeps rows apart: by a block-diagonal mask,
    or as sequences of their own in flash attention. (Only without a KV cache, which the Trainer disables.) Every 1,000
    rows are packed by pack_best_fit(). Padding fills a block up, as a row without labels.

    Raises:
        InputError: no row keeps an answer.
    """

    return pack_samples(answered(rows, columns, tokenizer, length, source), length, tokenizer.pad_token_id)


def pack_samples(samples, length: int, pad_token_id: int):
    """Samples with `input_ids` and `labels`, packed into blocks; see packed_answers()."""

    def block(batch):
        blocks = pack_best_fit(list(zip(batch["input_ids"], batch["labels"], strict=True)), length)
        return {
            "input_ids": [_concatenate([ids for ids, _ in block], length, pad_token_id) for block in blocks],
            # The first token of a row would be predicted from the row before it.
            "labels": [
                _concatenate([[IGNORED, *labels[1:]] for _, labels in block], length, IGNORED) for block in blocks
            ],
            "position_ids": [position_ids([len(ids) for ids, _ in block], length) for block in blocks],
        }

    return samples.map(block, batched=True, remove_columns=list(next(iter(samples))), **_describe(samples)("packing"))


def pack_best_fit(rows: list[tuple], length: int) -> list[list[tuple]]:
    """Rows in blocks of at most `length` tokens by best-fit decreasing: longest first, into the fullest that fits.

    trl.pack_dataset(strategy="bfd") makes as many blocks with as much padding (benchmarks/libraries.py), and works on
    Arrow columns in about half the time. It is not used: trl is an optional dependency, packing takes seconds once a
    run, and blocks of one length with position_ids, whose memory an estimate knows, would still be made here.
    """
    blocks: list[list[tuple]] = []
    free: list[tuple[int, int]] = []  # (tokens left, index) of every block, sorted
    for row in sorted(rows, key=lambda row: -len(row[0])):
        size = len(row[0])
        fitting = bisect.bisect_left(free, (size, 0))
        if fitting == len(free):
            blocks.append([])
            tokens_left, index = length, len(blocks) - 1
        else:
            tokens_left, index = free.pop(fitting)
        blocks[index].append(row)
        bisect.insort(free, (tokens_left - size, index))
    return blocks


def _concatenate(parts: list[list[int]], length: int, padding: int) -> list[int]:
    joined = [token for part in parts for token in part]
    return joined + [padding] * (length - len(joined))


def position_ids(sizes: list[int], length: int) -> list[int]:
    return [place for size in (*sizes, length - sum(sizes)) for place in range(size)]


def _encode(text: str, spans: list[tuple[int, int]], tokenizer, length: int, add_special_tokens: bool) -> dict:
    """Token ids, and labels on the tokens that overlap an answer."""
    tokens = tokenizer(
        text, truncation=True, max_length=length, return_offsets_mapping=True, add_special_tokens=add_special_tokens
    )
    labels = label_spans(tokens["input_ids"], tokens["offset_mapping"], spans)
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "labels": labels}


def label_spans(ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """Labels: the id of every token that overlaps one of the spans, IGNORED for the others.

    Args:
        offsets: start and end of each token, in characters.
        spans: start and end of each answer, in characters.
    """
    return [
        token if any(start < last and first < end for first, last in spans) else IGNORED
        for token, (start, end) in zip(ids, offsets, strict=True)
    ]


def _reader(rows, form: str, tokenizer, plain: bool, source: str):
    """A function (row, index) -> the row's text, and the (start, end) of its answers in characters."""
    chat = Chat(tokenizer)
    numbers = getattr(rows, "_indices", None)
    streamed = not hasattr(rows, "__len__")

    def read(row: dict, index: int) -> tuple[str, list[tuple[int, int]]]:
        where = Place(source, row_number(numbers, index), dict(row) if streamed else None)
        check_columns(row, form, where)
        if plain:
            return _plain_text(row, form, tokenizer.eos_token, where)
        messages = [
            {**message, "content": joined_text(message["content"], where)}
            for message in read_messages(row, form, where)
        ]
        return chat.text_and_answers(messages, read_tools(row, where), where)

    return read


def _plain_text(row: dict, form: str, end: str | None, where: str) -> tuple[str, list[tuple[int, int]]]:
    """A plain text, all of it trained, or a prompt and its completion without a template."""
    if form == "text":
        text = row["text"]
        if not isinstance(text, str):
            raise InputError(f"{where}: text must be a text, not {brief(text)}")
        return text, [(0, len(text))]
    if read_tools(row, where):
        raise InputError(f"{where}: tools are for messages: write prompt and completion as lists of messages")
    if not (isinstance(row["prompt"], str) and isinstance(row["completion"], str)):
        raise InputError(f"{where}: prompt and completion must be two texts here, as in the first row")
    text = row["prompt"] + row["completion"]
    if end and not text.endswith(end):
        text += end
    return text, [(len(row["prompt"]), len(text))]


def _prepare_template(rows, columns: str, tokenizer) -> bool:
    """Whether the rows are plain text, which gets the tokenizer's special tokens; chat templates write their own.

    A prompt and a completion that are texts are concatenated, unless there is a system column: only chats have system
    messages. A tokenizer without a template gets a plain one, with a warning; it is saved with the model.
    """
    if columns == "text":
        return True
    first = next(iter(rows), {})
    if columns == "prompt/completion" and isinstance(first.get("prompt"), str):
        if not any(name in first for name in SYSTEM):
            return True
        logger.warning("prompt and completion have a system message: the chat template is used")
    if not tokenizer.chat_template:
        logger.warning("the tokenizer has no chat template: turns are written as 'User: …', 'Assistant: …'")
        tokenizer.chat_template = _PLAIN_TEMPLATE
    return False


def _rows(batch: dict[str, list]) -> Iterable[dict]:
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _is_empty(samples) -> bool:
    """Whether there is no sample. Of a stream the first one is read: the Trainer would repeat empty epochs forever."""
    return len(samples) == 0 if hasattr(samples, "__len__") else next(iter(samples), None) is None


def _describe(rows):
    """Arguments of `map` for a progress bar, which streams do not have."""
    return (lambda text: {"desc": text}) if hasattr(rows, "__len__") else (lambda text: {})
