"""Where a well-kept library does what the package does itself: python benchmarks/libraries.py

Packing of answers against trl.pack_dataset(strategy="bfd"), and answer spans against the `{% generation %}` masks of
TRL's training templates. Times are ratios of medians; the two sides alternate.
"""

import logging
import statistics
import time
from importlib import metadata, resources

import transformers
from datasets import disable_caching, disable_progress_bars
from record import record
from transformers import AutoTokenizer

from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.data.chat import Chat
from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import IGNORED, answered, pack_samples
from hf_memopt.errors import InputError

ROUNDS = 7
CONVERSATIONS = {
    "one answer": ["user", "assistant"],
    "two answers": ["user", "assistant", "user", "assistant"],
    "system": ["system", "user", "assistant"],
}


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def packing(length: int) -> dict:
    """Blocks, padding and time of the two, on the same tokenized rows."""
    import trl

    tokenizer = AutoTokenizer.from_pretrained(builtin_model())
    rows, _, form = load_rows("builtin:questions")
    samples = answered(rows, form, tokenizer, length)
    columns = samples.select_columns(["input_ids", "labels"])
    sides = {
        "hf_memopt": lambda: pack_samples(samples, length, tokenizer.pad_token_id),
        "trl": lambda: trl.pack_dataset(columns, length, strategy="bfd"),
    }
    blocks = {name: pack() for name, pack in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, pack in sides.items():
            times[name].append(seconds(pack))
    tokens = sum(map(len, samples["input_ids"]))
    answers = sum(label != IGNORED for labels in samples["labels"] for label in labels)
    labels = {
        name: sum(label != IGNORED for row in packed["labels"] for label in row) for name, packed in blocks.items()
    }
    return {
        "compared": "packing",
        "length": length,
        "rows": len(samples),
        "tokens": tokens,
        "answer_tokens": answers,
        "answer_labels": labels,
        "blocks": {name: len(packed) for name, packed in blocks.items()},
        "padding_share": {name: 1 - tokens / (len(packed) * length) for name, packed in blocks.items()},
        "trl_seconds_ratio": statistics.median(times["trl"]) / statistics.median(times["hf_memopt"]),
    }


def generation_masks(name: str, template: str) -> dict:
    """Characters that are answers by the template's own marks only, by prefixes only, and by both."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_model())
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token  # which some templates write
    tokenizer.chat_template = template
    characters = {}
    for case, roles in CONVERSATIONS.items():
        messages = [{"role": role, "content": f"text {number} of the {role}"} for number, role in enumerate(roles)]
        try:
            text, marked = Chat(tokenizer).text_and_answers(messages)
            prefixes = Chat(tokenizer).answers_by_prefix(text, messages)
        except InputError as error:
            characters[case] = {"refused": str(error)[:120]}
            continue
        marked_characters, prefix_characters = (
            {place for start, end in spans for place in range(start, end)} for spans in (marked, prefixes)
        )
        characters[case] = {
            "only_marked": len(marked_characters - prefix_characters),
            "only_by_prefix": len(prefix_characters - marked_characters),
            "both": len(marked_characters & prefix_characters),
        }
    return {"compared": "answer spans", "template": name, "characters": characters}


def main() -> None:
    disable_caching()
    disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("hf_memopt").setLevel(logging.ERROR)  # the same warning for every template
    rows = [packing(length) | {"trl": metadata.version("trl")} for length in (512, 2048)]
    for file in sorted(resources.files("trl").joinpath("chat_templates").iterdir(), key=lambda file: file.name):
        if file.name.endswith("_training.jinja"):
            rows.append(generation_masks(file.name, file.read_text(encoding="utf-8")))
    for row in rows:
        print(row)
    record("libraries", rows)


if __name__ == "__main__":
    main()
