"""What libraries say while they are imported, about things that are optional and that nobody asked for."""

import logging

_LOGGERS = (
    "torchao",  # kernels for other cards that its wheel brings
    "torch.utils._pytree",  # a deprecation between torch and torchao
    "bitsandbytes",  # a faster kernel that it could fetch from the hub
)


def quiet() -> None:
    """Let these loggers say errors alone. For programs; a library leaves its user's logging as it is."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
