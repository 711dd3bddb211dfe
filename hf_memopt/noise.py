"""Messages of libraries about things that are optional and that nobody asked for, and bars that nobody sees move."""

import logging
import os
import sys
import warnings

_LOGGERS = (
    "torchao",  # kernels for other cards that its wheel brings
    "torch.utils._pytree",  # a deprecation between torch and torchao
    "bitsandbytes",  # a faster kernel that it could fetch from the hub
)
# Logger -> a part of the message that it may keep to itself.
_UNHELPFUL = {
    # 0.19.8 says so on every machine without a card, and sets its logger's level when it is imported.
    "DeepSpeed": "Setting accelerator to CPU",
    # transformers 5.23 does not know that rows are cut or packed after they are tokenized.
    "transformers.tokenization_utils_base": "will result in indexing errors",
}


def quiet() -> None:
    """Let these loggers say errors alone, and warnings that nobody can act on say nothing.

    For programs, whose process it is, from their start to their end; a library leaves its user's logging as it is.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs tracebacks of what it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for name in _UNHELPFUL:
        if _says_more not in (logger := logging.getLogger(name)).filters:
            logger.addFilter(_says_more)
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # its readers log what they raise
    # TRL 1.16 and peft 0.21 call models by the old name of activation checkpointing.
    warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing\w*` is deprecated", FutureWarning)
    # DeepSpeed 0.19.8 calls torch's old names at every step; nothing that a user could change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not sys.stderr.isatty():
        # A bar writes itself again for every step, which fills a log. tqdm (4.66) reads this when it is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")


def _says_more(record: logging.LogRecord) -> bool:
    return _UNHELPFUL[record.name] not in record.getMessage()
