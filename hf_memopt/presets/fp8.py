"""fp8: matmuls in 8 bits through accelerate's torchao backend. It saves time, not memory.

Weights, gradients, optimizer states and what autograd saves stay what they are in bf16; only the factors of linear
layers' matmuls are cast. TrainingArguments has no field for it: accelerate reads the environment, and `bf16=True`
would go over that.
"""

from dataclasses import replace
from types import MappingProxyType

from hf_memopt.errors import InputError
from hf_memopt.packages import require
from hf_memopt.presets.environment import PRECISION
from hf_memopt.presets.preset import Preset, retrained

ENVIRONMENT = {PRECISION: "fp8", "ACCELERATE_FP8_BACKEND": "AO"}


def in_fp8(preset: Preset) -> Preset:
    """The preset with its matmuls in fp8.

    Raises:
        InputError: the card, the method or the engine cannot, or torchao is missing.
    """
    if not preset.hardware.fp8:
        raise InputError(f"precision=fp8: {preset.hardware.label} has no fast fp8 matmuls; leave it out")
    if preset.method != "full":
        raise InputError(f"precision=fp8 converts trained linear layers: use method=full, not {preset.method}")
    if preset.deepspeed_config():
        raise InputError(
            f"precision=fp8 under {preset.strategy}: accelerate always computes in bf16 under DeepSpeed; use fsdp2"
        )
    require("torchao", "precision=fp8")
    environment = MappingProxyType({**preset.environment, **ENVIRONMENT})
    return replace(retrained(preset, bf16=None, fp16=None), environment=environment)
