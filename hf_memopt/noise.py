"""Messages of libraries while they are imported, about things that are optional and that nobody asked for."""

import logging
import warnings

_LOGGERS = (
    "torchao",  # kernels for other cards that its wheel brings
    "torch.utils._pytree",  # a deprecation between torch and torchao
    "bitsandbytes",  # a faster kernel that it could fetch from the hub
)


def quiet() -> None:
    """Let these loggers say errors alone, and warnings that nobody can act on say nothing.

    For programs, whose process it is, from their start to their end; a library leaves its user's logging as it is.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs tracebacks of what it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # DeepSpeed 0.19.8 warns on every machine without a card, and sets its logger's level when it is imported.
    if _says_more not in (deepspeed := logging.getLogger("DeepSpeed")).filters:
        deepspeed.addFilter(_says_more)
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # its readers log what they raise
    # TRL 1.16 and peft 0.21 call models by the old name of activation checkpointing.
    warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing\w*` is deprecated", FutureWarning)
    # DeepSpeed 0.19.8 calls torch's old names at every step; nothing that a user could change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _says_more(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")
