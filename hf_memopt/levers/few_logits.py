"""The logits of a video model's job: of answers alone, whatever its head takes for that."""

import inspect
from dataclasses import replace

from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.change import CHUNK
from hf_memopt.levers.language_model import uses_loss_function


def with_few_logits(memory_args: MemoryArguments, config, answer_tokens: int = 0) -> MemoryArguments:
    """Keep a video model from computing the logits of all positions.

    Sets logits_to_keep where its forward takes that and answers are known to be short, else loss_chunk_size. An
    explicit loss_chunk_size stays.
    """
    from transformers import AutoModelForImageTextToText

    kind = AutoModelForImageTextToText._model_mapping[type(config)]
    if memory_args.loss_chunk_size is not None or not uses_loss_function(kind):
        return memory_args
    if answer_tokens <= CHUNK and "logits_to_keep" in inspect.signature(kind.forward).parameters:
        return replace(memory_args, logits_to_keep=True)
    return replace(memory_args, loss_chunk_size=CHUNK)
