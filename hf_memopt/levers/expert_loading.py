"""from_pretrained with another quantizer of 4-bit weights: one that quantizes experts as it reads them, so that they
are never on the device in 16 bits together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.quantized_experts import (
    ONLY_4_BIT,
    dequantize_on_access,
    expert_weights,
    quantize,
    stays,
)


@contextmanager
def experts_quantized_on_load(memory_args: MemoryArguments, quantization, peft_config=None) -> Iterator[None]:
    """With quantized_experts, from_pretrained() in here quantizes experts, too, each tensor as soon as it is read.

    Args:
        quantization: the BitsAndBytesConfig that from_pretrained() gets, or None.
        peft_config: parameters and modules that it trains stay in 16 bits.

    Raises:
        InputError: quantized_experts without 4-bit weights.
    """
    if not memory_args.quantized_experts:
        yield
        return
    if not getattr(quantization, "load_in_4bit", False):
        raise InputError(ONLY_4_BIT)
    with quantizer_replaced(lambda plain: _with_experts(plain, peft_config)):
        yield


def _with_experts(plain: type, peft_config) -> type:
    """transformers' quantizer of bitsandbytes' 4-bit weights, which quantizes experts as well."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    class Quantizer(plain):
        def _process_model_before_weight_loading(self, model, device_map, **kwargs):
            super()._process_model_before_weight_loading(model, device_map, **kwargs)
            self._experts = {
                f"{path}.{name}": (module, name)
                for path, module in model.named_modules()
                for name, _ in expert_weights(module)
                if not self.pre_quantized
                and should_convert_module(path, self.modules_to_not_convert)
                and not stays(path, module, peft_config)
            }

        def param_needs_quantization(self, model, param_name, **kwargs):
            experts = getattr(self, "_experts", {})
            return param_name in experts or super().param_needs_quantization(model, param_name, **kwargs)

        def get_quantize_ops(self):
            operation = super().get_quantize_ops()

            def convert(input_dict, **kwargs):
                if not input_dict.keys() & self._experts.keys():
                    return type(operation).convert(operation, input_dict, **kwargs)
                read = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
                return {name: quantize(value, self.quantization_config) for name, value in read.items()}

            operation.convert = convert
            return operation

        def _process_model_after_weight_loading(self, model, **kwargs):
            for module, name in self._experts.values():
                if hasattr(getattr(module, name), "expert_state"):  # not where the checkpoint lacks it
                    dequantize_on_access(module, name)
            self._experts = {}  # the quantizer stays with the model
            return super()._process_model_after_weight_loading(model, **kwargs)

    return Quantizer


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
