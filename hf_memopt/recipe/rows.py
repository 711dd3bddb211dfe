"""A recipe's rows: to train on and held out, as blocks of tokens, and long enough a stream."""

import itertools

from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import packed
from hf_memopt.errors import InputError
from hf_memopt.recipe.job import Job


def load_texts(job: Job, tokenizer, length: int):
    """Blocks of tokens to train on and held-out ones (None where nothing is held out).

    Raises:
        InputError: rows without texts, or too few of them.
    """
    source = job.recipe.dataset_name or "builtin:documents"
    with job.args.main_process_first(desc="preparing data"):
        train, held_out, form = load_job_rows(job, source)
        if form != "text":
            raise InputError(f"data set {source!r} has {form}, and pretraining takes `text`: use recipes/sft.py")
        train, held_out = (rows and packed(rows, tokenizer, length, source) for rows in (train, held_out))
        if job.recipe.streaming:
            check_stream(train, job.args, source)
    return train, held_out


def check_stream(samples, args, source: str) -> None:
    """Raise where a stream ends before its first optimizer step.

    The Trainer (transformers 5.23) does not know that a stream's batch is its last, so that what an epoch leaves of a
    step is dropped. An epoch shorter than one step would restart forever, silently.

    Raises:
        InputError: too few samples.
    """
    batch = args.per_device_train_batch_size * args.world_size
    needed = batch * (args.gradient_accumulation_steps - 1) + (batch if args.dataloader_drop_last else 1)
    count = sum(1 for _ in itertools.islice(samples, needed))
    if count < needed:
        raise InputError(
            f"data set {source!r} streams {count} samples, and a step of {args.gradient_accumulation_steps} batches "
            f"of {batch} needs {needed} at least: lower effective_batch_size, or leave streaming out"
        )


def load_job_rows(job: Job, source: str, **what):
    """Rows to train on, rows held out (None where there are none, and nothing is evaluated) and their form.

    Args:
        what: with_media or pairs, as load_rows() takes them.
    """
    recipe = job.recipe
    train, held_out, columns = load_rows(
        source,
        config=recipe.dataset_config,
        split=recipe.dataset_train_split,
        held_out_split=recipe.dataset_test_split,
        held_out=recipe.held_out,
        streaming=recipe.streaming,
        buffer=recipe.shuffle_buffer_size,
        seed=job.args.seed,
        ignore=recipe.ignore_columns or (),
        **what,
    )
    if held_out is None:
        job.args.set_evaluate(strategy="no")
        job.args.eval_on_start = False
    return train, held_out, columns
