"""The part of recipes/sft.py that other recipes lack: TRL's arguments, rows in TRL's forms, tokens of the loss."""

import logging
from dataclasses import dataclass, field

from hf_memopt.data.chat import answer_judge, find_answer_kind, to_trl
from hf_memopt.data.columns import Judge
from hf_memopt.data.sample_batches import sample_lengths
from hf_memopt.data.sources import say_once
from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError
from hf_memopt.packages import how_to_install
from hf_memopt.recipe.job import Job, remove_new_folders
from hf_memopt.recipe.recipe_arguments import RecipeArguments
from hf_memopt.recipe.rows import evaluate_nothing, fill_stream, load_job_rows
from hf_memopt.stack.versions import has

logger = logging.getLogger(__name__)


# Fields of SFTConfig that the recipe decides otherwise -> what to use instead. TRL would ignore them, or rows would
# not be what was checked.
_NOT_TAKEN = {
    "chat_template_path": "save the tokenizer with the template, and name its folder by tokenizer_name",
    "dataset_text_field": "name the column text",
    "dataset_kwargs": "rows are checked and tokenized here",
    "model_init_kwargs": "set dtype, attn_implementation and quantization.KEY",
}


@dataclass
class AnswerArguments(RecipeArguments):
    """The recipe's arguments; the loss is on answers unless it is said otherwise."""

    assistant_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Loss on the assistant's messages only. Default: true. false: on all of a conversation."},
    )


def load_answers(job: Job, tokenizer):
    """Rows to train on and rows held out (None where there are none), in TRL's forms, checked row by row.

    Raises:
        InputError: names what cannot be trained on.
    """
    for name, instead in _NOT_TAKEN.items():
        if getattr(job.args, name) not in (None, "text"):
            raise InputError(f"{name} is not taken by this recipe: {instead}")
    source, kind = job.recipe.dataset_name or "builtin:questions", ""

    def judge(source: str, rows, form: str) -> Judge:
        nonlocal kind
        kind = find_answer_kind(rows, form)
        return answer_judge(form, kind, tokenizer)

    with job.args.main_process_first(desc="preparing data"):
        train, held_out, form = load_job_rows(job, source, judge)
        split = _choose_loss(job, kind, tokenizer)
        train, held_out = (rows and to_trl(rows, form, kind, split) for rows in (train, held_out))
        if job.recipe.streaming:
            train = fill_stream(train, job, source)
    return train, held_out


def _choose_loss(job: Job, kind: str, tokenizer) -> bool:
    """Set the tokens that the loss is on; true if each answer has to be a sample of its own for that.

    Raises:
        InputError: the tokenizer cannot write the rows.
    """
    if "messages" not in kind:
        if tokenizer.eos_token is None:
            raise InputError("the tokenizer has no end-of-text token (eos_token), with which TRL ends every text")
        job.args.assistant_only_loss = bool(job.recipe.assistant_only_loss)
        return False
    choice = job.recipe.assistant_only_loss
    marked = kind == "messages" and choice is None and _marks_answers(tokenizer)
    job.args.assistant_only_loss = marked or bool(choice)
    if kind != "messages" or choice is not None or marked:
        return False
    logger.warning("the chat template does not mark answers: each answer is a sample, behind what was said before it")
    return True


def _marks_answers(tokenizer) -> bool:
    """True if the chat template has {% generation %}, or TRL knows one that has and writes the same."""
    if not has("trl", "1.6"):
        raise InputError(f"recipes/sft.py needs trl 1.6 or newer: {how_to_install('trl')}")
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    try:
        return has_generation_markers(tokenizer.chat_template) or get_training_chat_template(tokenizer) is not None
    except ValueError:  # TRL knows none
        return False


def check_samples(job: Job, trainer, rows: int | None) -> None:
    """Say which rows TRL dropped, whose answer begins beyond max_length, and how many it cut.

    Args:
        rows: that the trainer was given; None of a stream.

    Raises:
        InputError: too few samples are left.
    """
    source, length = job.recipe.dataset_name or "the built-in data", job.args.max_length
    if rows is None:
        trainer.train_dataset = fill_stream(trainer.train_dataset, job, source)
        return
    for samples in (trainer.train_dataset, trainer.eval_dataset):
        if hasattr(samples, "__len__") and len(samples) == 0:
            if samples is trainer.eval_dataset and "held_out" not in job.given:
                say_once("note: held_out: no row of it has an answer within %d tokens; nothing is evaluated", length)
                trainer.eval_dataset = None
                evaluate_nothing(trainer.args)
                continue
            remove_new_folders(job)
            raise InputError(f"no row of data set {source!r} has an answer within {length} tokens: raise max_length")
    if getattr(job.args, "packing", False):
        _drop_unanswered(job, trainer, length)
        return
    if dropped := rows - len(trainer.train_dataset):
        say_once("%d of %d rows dropped: no answer within max_length=%d", dropped, rows, length)
        job.bad_rows.counts[f"no answer within max_length={length}"] = dropped
    if "input_ids" not in trainer.train_dataset.column_names:
        return
    lengths = sample_lengths(trainer.train_dataset)
    if full := sum(tokens >= length for tokens in lengths):
        say_once("note: %d of %d rows fill max_length=%d: what they have beyond it is cut", full, len(lengths), length)


def _drop_unanswered(job: Job, trainer, length: int) -> None:
    """Leave out packed samples without a token of an answer, which TRL (1.16) drops of rows that are not packed alone.

    Raises:
        InputError: none is left.
    """
    packed = trainer.train_dataset
    answered = packed.filter(lambda labels: any(label != IGNORED for label in labels), input_columns=["labels"])
    if not (dropped := len(packed) - len(answered)):
        return
    if not len(answered):
        raise InputError(f"no packed sample has an answer within {length} tokens: raise max_length")
    trainer.train_dataset = answered
    say_once("%d of %d packed samples dropped: no answer within max_length=%d", dropped, len(packed), length)
    job.bad_rows.counts[f"packed samples without an answer within max_length={length}"] = dropped
