"""Models of a script on fake tensors: transformers' own from_pretrained up to the weights, which are never read."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _IncompatibleKeys, register_module_parameter_registration_hook

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.known_values import ConstructorValues
from hf_memopt.estimator.patches.flash_attention import counted_flash_attention
from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.quantized_checkpoints import resolve_quantization
from hf_memopt.estimator.tracing.fake_quantization import is_quantized, quantize
from hf_memopt.estimator.tracing.fake_tensors import CAST, FakeMode, cast_in_place
from hf_memopt.estimator.tracing.model import outside_zero3
from hf_memopt.hardware import get_hardware
from hf_memopt.stack.versions import has

# Attributes of a model: whether from_pretrained puts it on the device, and bytes that resizing its embeddings takes.
_PLACED, RESIZED = "_hf_memopt_placed", "_hf_memopt_resized"


@contextmanager
def fake_models() -> Iterator[FakeMode]:
    """Every model that is built has fake weights, whether from a checkpoint, a configuration or by its class."""
    mode = FakeMode(allow_non_fake_inputs=True)
    casts = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
    with (
        register_module_parameter_registration_hook(lambda module, name, weight: _fake_weight(mode, weight)),
        _fake_classes(mode),
        _fake_checkpoints(),
        _fake_adapters(mode),
        CAST.replaced(to=cast_in_place),
        counted_flash_attention(),  # whether the card has it is checked when the trainer is estimated
        mock.patch.multiple(
            torch.nn.Module,
            cuda=lambda module, device=None: module,
            **{name: lambda module, dtype=dtype: cast_in_place(module, dtype) for name, dtype in casts.items()},
        ),
    ):
        yield mode


_MODELS = Part.DRY_RUN.replaces(
    "transformers:PreTrainedModel.from_pretrained(pretrained_model_name_or_path)",
    "transformers:PreTrainedModel._from_config(config)",
    why="a script's models are made of fake tensors, without its weights",
)
_RESIZED = Part.DRY_RUN.replaces(
    "transformers:PreTrainedModel.resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)",
    why="fake weights have no mean that new embeddings could begin with",
)


@contextmanager
def _fake_classes(mode: FakeMode) -> Iterator[None]:
    real = _MODELS.original("from_pretrained").__func__
    from_config = _MODELS.original("_from_config").__func__
    resize_embeddings = _RESIZED.original("resize_token_embeddings")

    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, device_map=None, quantization_config=None, **kwargs
    ):
        # Refuse a model that is spread: one device's memory is predicted, with the whole model on it.
        places = set(map(str, device_map.values())) if isinstance(device_map, dict) else set()
        if len(places) > 1 or places & {"disk"}:
            raise InputError(
                f"device_map={device_map!r}: a model that is spread over devices, the host or a disk is not modelled; "
                "leave device_map out, and estimate several devices with a strategy"
            )
        with mode, outside_zero3():
            with ConstructorValues():
                loaded = real(cls, pretrained_model_name_or_path, *args, **kwargs)
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
            pre_quantized = is_quantized(model.config)
            # The device is the one that the script sees.
            model.config, quantization, _ = resolve_quantization(
                model.config, quantization_config, get_hardware("auto")
            )
            if quantization is not None:
                quantize(model, quantization, pre_quantized)
            vars(model)[_PLACED] = device_map is not None or quantization is not None
        return loaded

    def from_configuration(cls, config, **kwargs):
        from transformers.initialization import no_init_weights

        with mode, ConstructorValues(), outside_zero3(), no_init_weights():
            model = from_config(cls, config, **kwargs)
            model.tie_weights(recompute_mapping=False)  # which is a part of what no_init_weights() leaves out
            return model

    def resize(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        parts = (self.get_input_embeddings(), self.get_output_embeddings())
        old = {id(part.weight): part.weight.nbytes for part in parts if part is not None}  # once where they are tied
        rows, width = parts[0].weight.shape
        resized = resize_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing=False)
        if vars(self).get(_PLACED) and (added := len(resized.weight) - rows):
            # To draw new rows: two copies in fp32 and their covariance (transformers 5.23,
            # _init_added_embeddings_weights_with_mean), as measured on a CPU.
            drawn = (mean_resizing and added > 0) * (8 * rows * width + 24 * width**2)
            vars(self)[RESIZED] = sum(old.values()) + drawn
        return resized

    with (
        _MODELS.replaced(from_pretrained=classmethod(from_pretrained), _from_config=classmethod(from_configuration)),
        _RESIZED.replaced(resize_token_embeddings=resize),
    ):
        yield


_LOADING = Part.DRY_RUN.replaces(
    "transformers.modeling_utils:PreTrainedModel._load_pretrained_model"
    "(model, state_dict, checkpoint_files, load_config, expected_keys)",
    "transformers.modeling_utils:PreTrainedModel._finalize_model_loading(model, load_config, loading_info)",
    why="from_pretrained runs up to its weights, which become fake tensors",
)
_HEADERS = Part.DRY_RUN.replaces(
    "transformers.modeling_utils:_get_resolved_checkpoint_files",
    "transformers.modeling_utils:_get_dtype(dtype, checkpoint_files, config)",
    "transformers.modeling_utils:get_hf_quantizer(config, quantization_config, device_map)",
    why="a checkpoint's headers say its dtype if they are here; a quantizer would check for its kernels",
)


@contextmanager
def _fake_checkpoints() -> Iterator[None]:
    checkpoint_files = _HEADERS.original("_get_resolved_checkpoint_files")
    find_dtype = _HEADERS.original("_get_dtype")

    def local_files(*args, download_kwargs, **kwargs):
        """Those that are here, for the dtype in their headers: none are downloaded."""
        try:
            return checkpoint_files(*args, download_kwargs={**download_kwargs, "local_files_only": True}, **kwargs)
        except OSError:
            return None, None

    def dtype_or_float32(dtype, files, config, *args):
        unknown = dtype == "auto" and getattr(config, "dtype", None) is None and not files
        return find_dtype(torch.float32 if unknown else dtype, files, config, *args)

    def no_quantizer(config, _, device_map, *args, **kwargs):
        """It would place weights, too: `quantize` asks it for the layers alone."""
        return None, config, device_map

    with (
        _HEADERS.replaced(
            _get_resolved_checkpoint_files=local_files, _get_dtype=dtype_or_float32, get_hf_quantizer=no_quantizer
        ),
        _LOADING.replaced(
            _load_pretrained_model=staticmethod(_fake_load),
            _finalize_model_loading=staticmethod(lambda model, load_config, loading_info: loading_info),
        ),
    ):
        yield


def _fake_weight(mode: FakeMode, weight):
    """Return what a module registers in the place of a weight; None for the weight itself.

    A model that is built by its class allocates its weights one by one, and only writing to them takes memory.
    """
    if type(weight) is not torch.nn.Parameter or isinstance(weight.data, FakeTensor) or weight.is_meta:
        return None
    with mode:
        return torch.nn.Parameter(torch.empty_like(weight.data, device="cpu"), requires_grad=weight.requires_grad)


def _fake_load(model, state_dict, checkpoint_files, load_config, expected_keys=None):
    """Leave what loading leaves: weights in their dtypes on one device, tied where they are tied."""
    from transformers.utils.loading_report import LoadStateDictInfo

    _leave_meta(model, load_config.dtype_plan or {}, unfrozen=has("transformers", "5.0"))
    if expected_keys is None:  # the whole model, not an adapter
        model.tie_weights(recompute_mapping=False)
    empty = {"error_msgs": [], "conversion_errors": {}}  # the other fields, more in newer versions, are sets
    return LoadStateDictInfo(**{item.name: empty.get(item.name, set()) for item in fields(LoadStateDictInfo)}), None


def _leave_meta(
    module: torch.nn.Module, float32: dict[str, torch.dtype], prefix: str = "", unfrozen: bool = False
) -> None:
    """Put fake tensors in the place of those on the meta device.

    Args:
        float32: patterns of the weights that a model keeps in another dtype (`_keep_in_fp32_modules`).
        unfrozen: weights that a constructor froze, as sinusoidal positions, are trained: transformers 5.0 to 5.24 puts
            new ones in their place, which are not frozen (set_param_for_module).
    """
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is None or not tensor.is_meta:
                continue
            whole = f"{prefix}{name}"  # matched as transformers.core_model_loading does
            planned = (dtype for pattern, dtype in float32.items() if re.search(pattern.replace("*", ".*"), whole))
            value = torch.empty_like(tensor, dtype=next(planned, tensor.dtype), device="cpu")
            if tensors is module._parameters:
                value = torch.nn.Parameter(value, value.is_floating_point() if unfrozen else tensor.requires_grad)
            tensors[name] = value
    for name, child in module.named_children():
        _leave_meta(child, float32, f"{prefix}{name}.", unfrozen)


_ADAPTERS = Part.DRY_RUN.replaces(
    "peft.utils.save_and_load:load_peft_weights(model_id, device)",
    "peft.utils.save_and_load:set_peft_model_state_dict(model, peft_model_state_dict)",
    why="an adapter's weights are not read",
)


def _fake_adapters(mode: FakeMode) -> AbstractContextManager:
    """PeftModel.from_pretrained, AutoPeftModel: the adapter of a folder's configuration, without its weights."""

    def load(model, *args, **kwargs):
        with mode:
            _leave_meta(model, {})  # where adapters are created with low_cpu_mem_usage=True
        return _IncompatibleKeys([], [])

    import peft.peft_model as importer

    return _ADAPTERS.replaced([importer], load_peft_weights=lambda *args, **kwargs: {}, set_peft_model_state_dict=load)
