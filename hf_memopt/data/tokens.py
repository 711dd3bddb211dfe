"""From rows to token ids: packed blocks for pretraining, answers with masked questions for fine-tuning."""

import logging
from collections.abc import Iterable

from hf_memopt.data.conversations import role_of
from hf_memopt.errors import InputError

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that PyTorch's cross entropy leaves out
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def packed(rows, columns: str, tokenizer, length: int, source: str = ""):
    """Texts laid end to end, each closed by the end-of-text token, and cut into blocks of `length` tokens.

    No position is padding. What is left over of each 1,000 texts is dropped. Labels equal the input ids (the model
    shifts them).

    Raises:
        InputError: the texts together are shorter than one block.
    """

    def tokenize(batch):
        texts = [_text(row, columns, tokenizer)[0] for row in _rows(batch)]
        ids = tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
        return {"ids": [[*tokens, tokenizer.eos_token_id] for tokens in ids]}

    def block(batch):
        stream = [token for ids in batch["ids"] for token in ids]
        blocks = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
        return {"input_ids": blocks, "labels": [list(ids) for ids in blocks]}

    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-text token (eos_token), which packing puts between texts")
    plain = _prepare_template(rows, columns, tokenizer)
    described = _describe(rows)
    tokenized = rows.map(tokenize, batched=True, remove_columns=rows.column_names, **described("tokenizing"))
    blocks = tokenized.map(block, batched=True, remove_columns=["ids"], **described("packing"))
    if hasattr(blocks, "__len__") and len(blocks) == 0:
        raise InputError(
            f"data set {source!r} is shorter than one block of {length} tokens; lower max_length or add text"
        )
    return blocks


def answered(rows, columns: str, tokenizer, length: int, source: str = ""):
    """Rows as token ids whose labels are the answers alone; all else is ignored by the loss.

    A row is cut after `length` tokens, and left out if no answer remains.

    Raises:
        InputError: no row keeps an answer.
    """

    def encode(row):
        text, spans = _text(row, columns, tokenizer)
        return _encode(text, spans, tokenizer, length, plain)

    plain = _prepare_template(rows, columns, tokenizer)
    described = _describe(rows)
    encoded = rows.map(encode, remove_columns=rows.column_names, **described("tokenizing"))
    kept = encoded.filter(
        lambda row: any(label != IGNORED for label in row["labels"]), **described("checking answers")
    )
    if hasattr(kept, "__len__"):
        if len(kept) == 0:
            raise InputError(f"no row of data set {source!r} has an answer within {length} tokens; raise max_length")
        if len(kept) < len(encoded):
            logger.warning(
                "%d of %d rows left out: no answer within max_length=%d",
                len(encoded) - len(kept),
                len(encoded),
                length,
            )
    return kept


def packed_answers(rows, columns: str, tokenizer, length: int, source: str = ""):
    """What answered() gives, several rows to a block of `length` tokens, with next to no padding.

    `position_ids` begin anew with each row, by which transformers' attention keeps rows apart: with masks, or as rows
    of their own where flash attention runs. (Not beside a cache, which the Trainer turns off.) Each 1,000 rows are put
    into as few blocks as fit them in order of length. What is left of a block is padding, and counts as a row without
    labels.

    Raises:
        InputError: no row keeps an answer.
    """

    def block(batch):
        blocks = _filled(list(zip(batch["input_ids"], batch["labels"], strict=True)), length)
        return {
            "input_ids": [_padded([ids for ids, _ in block], length, tokenizer.pad_token_id) for block in blocks],
            # The first token of a row would be predicted from the row before it.
            "labels": [_padded([[IGNORED, *labels[1:]] for _, labels in block], length, IGNORED) for block in blocks],
            "position_ids": [_positions([len(ids) for ids, _ in block], length) for block in blocks],
        }

    kept = answered(rows, columns, tokenizer, length, source)
    names = list(next(iter(kept)))
    return kept.map(block, batched=True, remove_columns=names, **_describe(kept)("packing"))


def _filled(rows: list[tuple], length: int) -> list[list[tuple]]:
    """Rows in blocks of at most `length` tokens: the longest first, each into the fullest block that has room."""
    blocks: list[list[tuple]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: -len(row[0])):
        size = len(row[0])
        fitting = [number for number, left in enumerate(room) if left >= size]
        chosen = min(fitting, key=room.__getitem__) if fitting else len(blocks)
        if chosen == len(blocks):
            blocks.append([])
            room.append(length)
        blocks[chosen].append(row)
        room[chosen] -= size
    return blocks


def _padded(parts: list[list[int]], length: int, filling: int) -> list[int]:
    joined = [token for part in parts for token in part]
    return joined + [filling] * (length - len(joined))


def _positions(sizes: list[int], length: int) -> list[int]:
    return [place for size in (*sizes, length - sum(sizes)) for place in range(size)]


def _encode(text: str, spans: list[tuple[int, int]], tokenizer, length: int, add_special_tokens: bool) -> dict:
    """Token ids and labels; a token is a label if any of its characters is an answer's."""
    tokens = tokenizer(
        text, truncation=True, max_length=length, return_offsets_mapping=True, add_special_tokens=add_special_tokens
    )
    labels = [
        token if any(first < end and start < last for start, end in spans) else IGNORED
        for token, (first, last) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    ]
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "labels": labels}


def _text(row: dict, columns: str, tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """The text of a row, and the character spans of the answers in it."""
    if columns == "text":
        text = row["text"] or ""
        return text, [(0, len(text))]
    if columns == "messages":
        return answer_spans(row["messages"], tokenizer)
    if columns == "conversations":
        return answer_spans([_turn(role_of(turn), turn["value"]) for turn in row["conversations"]], tokenizer)
    if columns == "alpaca":
        question = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
        return answer_spans([_turn("user", question), _turn("assistant", row["output"])], tokenizer)
    if isinstance(row["prompt"], list):
        return answer_spans(row["prompt"] + row["completion"], tokenizer)
    text = row["prompt"] + row["completion"]
    if tokenizer.eos_token and not text.endswith(tokenizer.eos_token):
        text += tokenizer.eos_token
    return text, [(len(row["prompt"]), len(text))]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def answer_spans(messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """The chat template's text, and the spans of what the assistant says, its end marker included.

    Each span is found by rendering the conversation up to and after the answer. Some templates rewrite earlier
    turns (they drop reasoning); then only the last answer has a certain place, and only it is trained.
    """

    def render(upto: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompt)

    whole = render(len(messages), prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(index, prompt=True), render(index + 1, prompt=False)
            if after.startswith(before) and whole.startswith(after):
                spans.append((len(before), len(after)))
    return whole, spans


def _prepare_template(rows, columns: str, tokenizer) -> bool:
    """Whether the rows are plain text, which takes the tokenizer's special tokens; a chat template writes its own.

    A tokenizer that needs a template and has none gets a plain one, loudly; the model is saved with it.
    """
    first = next(iter(rows), {})
    if columns == "text" or isinstance(first.get("prompt"), str):
        return True
    if not tokenizer.chat_template:
        logger.warning("the tokenizer has no chat template: turns are written as 'User: …', 'Assistant: …'")
        tokenizer.chat_template = _PLAIN_TEMPLATE
    return False


def _rows(batch: dict[str, list]) -> Iterable[dict]:
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _describe(rows):
    """Progress bars exist for data sets of known length only."""
    return (lambda text: {"desc": text}) if hasattr(rows, "__len__") else (lambda text: {})
