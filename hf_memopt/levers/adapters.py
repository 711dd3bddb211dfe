"""LoRA adapters on a frozen base, 4-bit or not."""

import dataclasses
import os
import warnings
from unittest import mock

from hf_memopt.errors import MethodRefused


def add_adapters(model, config, autocast_adapter_dtype: bool = True):
    """A peft model whose base is frozen and whose adapters are trained in fp32, as peft does by default.

    4-bit bases get their adapters without peft's prepare_model_for_kbit_training, which copies embeddings, head and
    norms to fp32 (bitsandbytes issue 1569: 63.1 -> 81.1 GB).
    """
    from peft import get_peft_model

    keep_differentiable(model)
    # peft 0.21's BOFT sets CC and CXX for good where its kernel cannot be built (boft/layer.py, patch_environment).
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        # peft 0.21 asks for the old name of is_activation_checkpointing.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # It also names patterns of its own making for experts that `target_modules` leaves out.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        adapted = get_peft_model(model, by_names(config, model), autocast_adapter_dtype=autocast_adapter_dtype)
    _refuse_fp8_experts(adapted)
    return adapted


def by_names(config, model):
    """A peft configuration, or where it has all-linear and an empty `target_parameters`, one with the names of linear
    layers, as axolotl, LLaMA-Factory and ms-swift list them: peft 0.21 takes all-linear for fused experts, too."""
    if (getattr(config, "target_modules", None), getattr(config, "target_parameters", None)) != ("all-linear", []):
        return config
    from peft.utils.constants import SEQ_CLS_HEAD_NAMES

    linear = [name for name, module in model.named_modules() if "Linear" in type(module).__name__]
    # The number of a layer in a Sequential is one of a decoder's layers, too.
    names = {name if (last := name.rpartition(".")[2]).isdecimal() else last for name in linear}
    return dataclasses.replace(config, target_modules=names - {*SEQ_CLS_HEAD_NAMES, "lm_head", "qa_outputs"})


def _refuse_fp8_experts(model) -> None:
    """Refuse factors of experts in FP8: kernels multiply with codes, which nothing can be added to, and have no
    gradient of weights (transformers 5.24, FP8Experts).

    Raises:
        MethodRefused: a module of such experts has them.
    """
    for module in model.modules():
        if hasattr(module, "parameter_name") and type(module.get_base_layer()).__name__ == "FP8Experts":
            raise MethodRefused(
                "adapters train experts that are quantized with fp8, as with target_modules=all-linear; name the "
                "linear layers, as --set 'lora.target_modules=[q_proj,k_proj,v_proj,o_proj]'"
            )


def keep_differentiable(model) -> None:
    """Keep 4-bit layers on a CPU in the packing that has a backward pass.

    Where the CPU has AVX512-BF16, bitsandbytes 0.50 repacks a layer at its first evaluation, for a kernel without a
    backward pass, and never packs it back: what is trained after an evaluation gets wrong gradients.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
