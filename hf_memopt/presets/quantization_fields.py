"""The fields of quantization configurations that a command line sets; BitsAndBytesConfig takes its own unchecked."""

from typing import Any

from hf_memopt.errors import InputError, choose, respell
from hf_memopt.field_values import fit
from hf_memopt.stack.declared import declared_parameters

# BitsAndBytesConfig.__init__ (transformers 5.23) has no annotations, looks a dtype's name up in torch by getattr, and
# leaves the values of the other fields to bitsandbytes.
_HINTS = {
    "load_in_8bit": bool,
    "load_in_4bit": bool,
    "llm_int8_threshold": float,
    "llm_int8_skip_modules": list[str] | None,
    "llm_int8_enable_fp32_cpu_offload": bool,
    "llm_int8_has_fp16_weight": bool,
    "bnb_4bit_compute_dtype": str | None,
    "bnb_4bit_quant_type": str,
    "bnb_4bit_use_double_quant": bool,
    "bnb_4bit_quant_storage": str | None,
    "dequantize": bool,  # of the configurations of mxfp4, FP8 and compressed-tensors, while their weights are loaded
}
_CHOICES = {
    "bnb_4bit_compute_dtype": ("float32", "float16", "bfloat16", "float64"),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "bnb_4bit_quant_storage": ("float16", "float32", "int8", "uint8", "float64", "bfloat16"),
}


def check_quantization(quantization: dict[str, Any]) -> dict[str, Any]:
    """Fields of BitsAndBytesConfig that a user set, as it takes them.

    Raises:
        InputError: an unknown key, or a value that the field does not take.
    """
    if not quantization:
        return {}
    fields = declared_parameters("BitsAndBytesConfig") | {"dequantize"}
    for key in quantization.keys() - fields:
        raise choose("key of quantization", str(key), fields)
    fitted = fit(_HINTS, quantization, "quantization.")
    for name in _CHOICES.keys() & fitted.keys():
        names, fitted[name] = _CHOICES[name], respell("dtype", fitted[name], _CHOICES[name])
        if fitted[name] not in (None, *names):
            raise choose(f"quantization.{name}", fitted[name], names)
    if fitted.get("load_in_4bit") and fitted.get("load_in_8bit"):
        raise InputError("quantization.load_in_4bit and quantization.load_in_8bit exclude each other: set one of them")
    return fitted


def check_4bit(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of check_quantization() for what runs and plans on 4-bit weights alone.

    Raises:
        InputError: they ask for other weights.
    """
    if not fields.get("load_in_4bit", True) or fields.get("load_in_8bit") or fields.get("dequantize"):
        raise InputError(
            "method=qlora trains on 4-bit weights: leave quantization.load_in_4bit, load_in_8bit and dequantize out "
            "(estimate alone knows the last two)"
        )
    return fields
