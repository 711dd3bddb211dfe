"""A LoRA adapter on a model without weights, as functions from a base weight to the merged one."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import load_peft_weights
from peft.utils.other import ModulesToSaveWrapper

from hf_memopt.errors import InputError, one_line
from hf_memopt.field_values import check_value, hints_of
from hf_memopt.files import read_json

ADAPTER = "default"  # peft's own name for the one adapter of a model
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft.utils has them
_TRAINED = ("lora_", "trainable_tokens_delta", "modules_to_save")  # parts of names of what peft (0.21) trains
# Methods that keep the base weights as they are loaded; the others (pissa, olora, …) change them on loading.
_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
_REFUSED = (
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "megatron_config",
)
# peft uses values without asking for their type.
_PEFTS_ERRORS = (ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError)

Change = Callable[[torch.Tensor], torch.Tensor]


def check_adapter(folder: Path) -> dict:
    """The configuration of an adapter that can be merged.

    Raises:
        InputError: no adapter, or one that is not LoRA, rsLoRA or DoRA.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} has no {CONFIG}: name the folder that save_pretrained() of a peft model wrote")
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} has no {WEIGHTS}: save the adapter as safetensors")
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"peft_type={config.get('peft_type')} is not merged, only LORA is: use peft's merge_and_unload()"
        )
    for name in _REFUSED:
        if config.get(name):
            raise InputError(
                f"{name} of {folder / CONFIG} is not merged tensor by tensor: use peft's merge_and_unload()"
            )
    if (method := config.get("init_lora_weights", True)) not in _KEEPS_BASE:
        raise InputError(
            f"init_lora_weights={method} of {folder / CONFIG} changed the base weights: save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    return config


class Adapted:
    """The changes that an adapter makes.

    Args:
        model: the base model on the meta device, which peft puts the adapter's layers into.
        folder: the adapter's.

    Attributes:
        changes: name of a base model's parameter -> the function that makes the merged weight of it.
        layers: those whose weight a LoRA layer changes.
        replaced: those that were trained whole -> their trained weight.

    Raises:
        InputError: the adapter does not fit the model.
    """

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self.changes: dict[str, Change] = {}
        self.layers: set[str] = set()
        self.replaced: dict[str, torch.Tensor] = {}
        weights = load_peft_weights(str(folder), device="cpu")
        try:
            adapted = _with_layers(model, PeftConfig.from_pretrained(str(folder)))
            self._load(adapted, weights)
            self._collect(adapted.get_base_model())
        except _PEFTS_ERRORS as error:
            _refuse_wrong_value(folder / CONFIG)
            raise InputError(f"{folder} does not fit {type(model).__name__}: {one_line(error)}") from error

    def _load(self, adapted, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill the adapter's layers; from_pretrained would move them to the meta device, where the base is."""
        bare = {name.removeprefix("base_model.model."): weight for name, weight in weights.items()}
        for name, weight in list(adapted.named_parameters()):
            inner = name.removeprefix("base_model.model.")
            if inner in bare or any(part in inner for part in _TRAINED):
                module, _, last = name.rpartition(".")
                dtype = bare[inner].dtype if inner in bare else weight.dtype
                empty = torch.nn.Parameter(torch.empty(weight.shape, dtype=dtype), requires_grad=False)
                adapted.get_submodule(module)._parameters[last] = empty
        result = set_peft_model_state_dict(adapted, dict(weights), adapter_name=ADAPTER)
        _check_complete(adapted, result.missing_keys, result.unexpected_keys)

    def _collect(self, model: torch.nn.Module) -> None:
        wrapped: set[str] = set()  # the adapter's modules, and what is within them
        for name, module in model.named_modules():
            if name.rpartition(".")[0] in wrapped:
                pass
            elif isinstance(module, LoraLayer):
                self.changes[f"{name}.weight"] = partial(_merge, module)
                self.layers.add(f"{name}.weight")
            elif isinstance(module, ModulesToSaveWrapper):
                for inner, weight in module.modules_to_save[ADAPTER].state_dict().items():
                    self._replace(f"{name}.{inner}", weight)
            elif isinstance(module, TrainableTokensLayer):
                # peft ties the tokens of a tied head to the embedding's: one change serves both.
                if module.tied_adapter is None:
                    self.changes[f"{name.removesuffix('.token_adapter')}.weight"] = partial(_set_tokens, module)
            else:
                continue
            wrapped.add(name)
        for name, weight in model.named_parameters():
            # Biases, resized embeddings.
            if not weight.is_meta and not any(part in name for part in (*_TRAINED, "original_module")):
                self._replace(name.replace(".base_layer.", "."), weight)

    def _replace(self, name: str, weight: torch.Tensor) -> None:
        """Take the adapter's own weight for the base's; what else changes it does so afterwards."""
        self.replaced[name] = weight.detach()
        change = self.changes.get(name, lambda own: own)
        self.changes[name] = lambda base: change(self.replaced[name].to(base.dtype, copy=True))


def _refuse_wrong_value(file: Path) -> None:
    """Name the value of an adapter's configuration that peft most likely failed on. Its annotations are narrower than
    what it takes (a lora_alpha of 0.5), so that they are not asked before.

    Raises:
        InputError: there is one.
    """
    config, hints = read_json(file), hints_of(LoraConfig)
    for name in sorted(config.keys() & hints.keys()):
        check_value(name, hints[name], config[name], f"{file}: ")


def _with_layers(model: torch.nn.Module, config):
    with warnings.catch_warnings():
        # peft 0.21 asks for the old name of is_activation_checkpointing.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return PeftModel(model, config, adapter_name=ADAPTER, low_cpu_mem_usage=True)


def _check_complete(adapted, missing: list[str], unexpected: list[str]) -> None:
    """Raise ValueError where the adapter lacks a weight, or has one that the model does not."""
    weights = dict(adapted.named_parameters(remove_duplicate=False))
    filled = {id(weight) for name, weight in weights.items() if name not in missing}  # tied tokens are saved once
    for name in missing:
        if any(part in name for part in _TRAINED) and id(weights.get(name)) not in filled:
            raise ValueError(f"{name} is not in the adapter")
    # Beside a trained embedding peft 0.21 saves the same one again under the wrapper's names.
    own = {_plain(name.replace(f".{ADAPTER}", "")) for name in weights}
    for name in unexpected:
        if _plain(name) not in own:
            raise ValueError(f"{name} is in the adapter only")


def _plain(name: str) -> str:
    return name.replace(".modules_to_save", "").replace(".original_module", "").replace(".base_layer", "")


@torch.no_grad()
def _merge(layer, weight: torch.Tensor) -> torch.Tensor:
    """peft's own merge of one layer, whose base weight is there only meanwhile."""
    base = layer.get_base_layer()
    absent = base.weight
    base.weight = torch.nn.Parameter(weight, requires_grad=False)
    try:
        layer.merge(adapter_names=[ADAPTER])
        return base.weight.data
    finally:
        base.weight = absent
        layer.merged_adapters.clear()


@torch.no_grad()
def _set_tokens(layer, weight: torch.Tensor) -> torch.Tensor:
    """Put the trained rows into an embedding."""
    rows = torch.tensor(layer.token_indices[ADAPTER])
    return weight.index_copy_(0, rows, layer.trainable_tokens_delta[ADAPTER].to(weight))
