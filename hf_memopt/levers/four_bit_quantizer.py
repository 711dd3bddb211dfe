"""transformers' quantizer of bitsandbytes' 4-bit weights, extended while a model is loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_METHOD = "bitsandbytes_4bit"


@contextmanager
def quantizer_replaced(extend: Callable[[type], type]) -> Iterator[None]:
    """from_pretrained() in here quantizes to 4 bits with another class.

    Args:
        extend: makes it of the one that is in force.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING  # the table that register_quantizer() fills

    plain = AUTO_QUANTIZER_MAPPING[_METHOD]
    AUTO_QUANTIZER_MAPPING[_METHOD] = extend(plain)
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[_METHOD] = plain
