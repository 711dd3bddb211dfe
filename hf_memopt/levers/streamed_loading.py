"""from_pretrained that moves 4-bit weights to host memory as it quantizes them: the device never holds them together.

transformers (5.23) reads a tensor to the device, has it quantized there and reads the next
(core_model_loading.convert_and_load_state_dict_in_model). Here a layer's quantized weight goes to its host buffer at
once and leaves an empty storage, which levers.weight_streaming takes over. Scales, vectors, embeddings and head stay
on the device until MemoryTrainer has the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.levers import weight_streaming
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.expert_loading import quantizer_replaced
from hf_memopt.levers.weight_streaming import HOST_ELEMENTS, streamed_layers, streamer_of

# peft 0.21's values of init_lora_weights that draw the factors, rather than compute them from the weights.
_DRAWN = (True, False, "gaussian", "orthogonal")


@contextmanager
def weights_streamed_on_load(memory_args: MemoryArguments, quantization, peft_config=None) -> Iterator[None]:
    """With weight_streaming, from_pretrained() in here leaves the 4-bit weights of streamed layers in host memory.

    Such a model is for a MemoryTrainer with the same memory arguments: until it has it, its layers are empty. A
    checkpoint that is quantized already is read to the device as usual.

    Args:
        quantization: the BitsAndBytesConfig that from_pretrained() gets, or None.
        peft_config: of the adapters that the model will get.
    """
    if not streams_on_load(memory_args, quantization, peft_config):
        yield
        return
    with quantizer_replaced(lambda plain: _with_host_memory(plain, memory_args.weight_streaming_ratio)):
        yield


def streams_on_load(memory_args: MemoryArguments, quantization, peft_config) -> bool:
    """True if 4-bit weights go to host memory while they are loaded: not where adapters are computed from them, as
    DoRA's and PiSSA's are."""
    if not (memory_args.weight_streaming and getattr(quantization, "load_in_4bit", False)):
        return False
    if peft_config is None:
        return True
    is_lora = getattr(peft_config.peft_type, "value", peft_config.peft_type) == "LORA"
    return is_lora and peft_config.init_lora_weights in _DRAWN and not peft_config.use_dora


def mark_streamed(model: torch.nn.Module) -> None:
    """Have a fake model's 4-bit weights count as moved to host memory while they were loaded."""
    for weights in streamer_of(model).weights():
        if not weights.weight.is_floating_point():
            weights.weight.streamed_on_load = True


def _with_host_memory(plain: type, ratio: float) -> type:
    """transformers' quantizer of bitsandbytes' 4-bit weights, which moves those of streamed layers to the host."""

    class Quantizer(plain):
        def _process_model_before_weight_loading(self, model, device_map, **kwargs):
            super()._process_model_before_weight_loading(model, device_map, **kwargs)
            paths = {id(module): path for path, module in model.named_modules()}
            layers = [] if self.pre_quantized else [layer for layer, _ in streamed_layers(model, ratio)]
            self._streamed = {f"{paths[id(layer)]}.{name}" for layer in layers for name, _ in layer.named_parameters()}
            self._lanes = None

        def param_element_size(self, model, param_name, param):
            # transformers allocates as much before it reads the weights (modeling_utils.caching_allocator_warmup).
            if param_name in self._streamed and self.param_needs_quantization(model, param_name):
                return 0
            return super().param_element_size(model, param_name, param)

        def get_quantize_ops(self):
            operation = super().get_quantize_ops()
            quantize = operation.convert

            def convert(input_dict, **kwargs):
                result = quantize(input_dict, **kwargs)
                for name in result.keys() & self._streamed:
                    _leave(result[name], self)
                return result

            operation.convert = convert
            return operation

        def _process_model_after_weight_loading(self, model, **kwargs):
            self._streamed, self._lanes = set(), None  # the quantizer stays with the model
            return super()._process_model_after_weight_loading(model, **kwargs)

    return Quantizer


def _leave(weight: torch.nn.Parameter, quantizer) -> None:
    """Move a quantized weight to host memory."""
    if quantizer._lanes is None:
        quantizer._lanes = weight_streaming.make_lanes(weight.device)
    if (lanes := quantizer._lanes) is None:  # nothing streams on this device
        quantizer._streamed = set()
        return
    vars(weight)[HOST_ELEMENTS] = weight_streaming.host_copy(weight, lanes)
    weight.streamed_on_load = True
    lanes.resize(weight, 0)
