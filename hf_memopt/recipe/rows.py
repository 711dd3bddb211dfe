"""A recipe's rows: to train on and held out, as blocks of tokens, and long enough a stream.

A default that counts rows follows the data where they have fewer, and says so; what the user set is refused.
"""

import itertools
from collections.abc import Callable
from typing import Any

from hf_memopt.data.bad_rows import sift
from hf_memopt.data.columns import Judge
from hf_memopt.data.sources import load_rows, say_once
from hf_memopt.data.tokens import check_text, packed
from hf_memopt.errors import InputError
from hf_memopt.recipe.job import Job
from hf_memopt.recipe.recipe_arguments import BATCH


def load_texts(job: Job, tokenizer, length: int):
    """Blocks of tokens to train on, held-out ones (None where nothing is held out), and the tokens of a block.

    Args:
        length: tokens of a block; texts that fill none become a shorter one, unless the user set max_length.

    Raises:
        InputError: rows without texts, or too few of them.
    """
    source = job.recipe.dataset_name or "builtin:documents"
    with job.args.main_process_first(desc="preparing data"):
        rows, held_out_rows, _ = load_job_rows(job, source, _text_judge)
        train = packed(rows, tokenizer, length, source, shorter="max_length" not in job.given)
        if (tokens := len(next(iter(train))["input_ids"])) < length:
            say_once("note: max_length: one block of %d tokens, all that the data have, instead of %d", tokens, length)
        held_out = held_out_rows and packed(held_out_rows, tokenizer, tokens, source, shorter=True)
        if job.recipe.streaming:
            train = fill_stream(train, job, source)
    return train, held_out, tokens


def fill_stream(samples, job: Job, source: str):
    """A stream that lasts for its first optimizer step at least: a shorter one is repeated.

    The Trainer (transformers 5.23) does not know that a stream's batch is its last, so that what an epoch leaves of a
    step is dropped. An epoch shorter than one step would restart forever, silently.

    Raises:
        InputError: too few samples, or too few for the batch that the user set.
    """
    args = job.args
    batch = args.per_device_train_batch_size * args.world_size
    needed = batch * (args.gradient_accumulation_steps - 1) + (batch if args.dataloader_drop_last else 1)
    count = sum(1 for _ in itertools.islice(samples, needed))
    if count >= needed:
        return samples
    if count == 0 or job.given.intersection(BATCH):
        raise InputError(
            f"data set {source!r} streams {count} samples, and a step of {args.gradient_accumulation_steps} batches "
            f"of {batch} needs {needed} at least: lower effective_batch_size, or leave streaming out"
        )
    times = -(-needed // count)
    say_once("note: streaming: the %d samples are repeated %d times to fill a step", count, times)
    return samples.repeat(times)


def _text_judge(source: str, rows, form: str) -> Judge:
    if form != "text":
        raise InputError(f"data set {source!r} has {form}, and pretraining takes `text`: use recipes/sft.py")
    return check_text


def load_job_rows(job: Job, source: str, judge: Callable[[str, Any, str], Judge], **what):
    """Good rows to train on, rows held out (None where there are none, and nothing is evaluated) and their form; the
    job remembers the others.

    Args:
        judge: (source, rows, form) -> what refuses rows.
        what: with_media or pairs, as load_rows() takes them.

    Raises:
        InputError: rows that cannot be trained on, unless the user skips them.
    """
    recipe = job.recipe

    def keep(parts: list, form: str) -> list:
        kept, job.bad_rows = sift(parts, judge(source, parts[0], form), source, recipe.skip_bad_rows)
        if job.bad_rows.count:
            say_once("note: skip_bad_rows: %s", job.bad_rows)
        return [kept[0], None if hasattr(kept[1], "__len__") and not len(kept[1]) else kept[1]]

    train, held_out, form = load_rows(
        source,
        config=recipe.dataset_config,
        split=recipe.dataset_train_split,
        held_out_split=recipe.dataset_test_split,
        held_out=recipe.held_out,
        adapt_held_out="held_out" not in job.given,
        streaming=recipe.streaming,
        buffer=recipe.shuffle_buffer_size,
        seed=job.args.seed,
        ignore=recipe.ignore_columns or (),
        keep=keep,
        **what,
    )
    if held_out is None:
        evaluate_nothing(job.args)
    return train, held_out, form


def evaluate_nothing(args) -> None:
    """Let TrainingArguments evaluate at no step."""
    args.set_evaluate(strategy="no")
    args.eval_on_start = False
