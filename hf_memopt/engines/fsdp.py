"""PyTorch's FSDP, 1 and 2, as accelerate starts it: layers are sharded, and gathered when they run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_memopt.engines.engine import Engine, Exchange, is_true, read_settings
from hf_memopt.errors import InputError, brief, choose
from hf_memopt.stack.declared import declared_values

CHECKPOINTING_OFFLOAD = "activation_checkpointing_offload"
# Keys of fsdp_config: those that a trace follows or check() refuses, and those of loading and communication.
_KEYS = {
    *("version", "activation_checkpointing", CHECKPOINTING_OFFLOAD, "reshard_after_forward", "cpu_offload", "xla"),
    *("auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap"),
    *("mixed_precision", "mixed_precision_policy"),
    *("cpu_ram_efficient_loading", "state_dict_type", "sync_module_states", "use_orig_params", "limit_all_gathers"),
    *("forward_prefetch", "backward_prefetch", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
}


@dataclass(frozen=True)
class FSDP(Engine):
    strategy: str = "fsdp2"
    fsdp_version: int = 2
    checkpointing: bool = False
    offloads_inputs: bool = False  # checkpointed layers' wait in host memory
    reshards: bool = True
    offload_params: bool = False  # weights, gradients and states are in host memory (fsdp_offload_params)

    plain: ClassVar = False
    distributed_type: ClassVar = "FSDP"
    beside: ClassVar = ("fsdp",)
    master_weights: ClassVar = True
    accelerator_only: ClassVar = True

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], source: str = "fsdp") -> "FSDP":
        """The engine of an fsdp_config, whose keys are without fsdp_.

        Raises:
            InputError: a version that there is not.
        """
        # 2 is TrainingArguments' default (transformers 5.23, `_process_fsdp_args`).
        version, reshards = settings.get("version", 2), settings.get("reshard_after_forward")
        if str(version) not in ("1", "2"):
            raise InputError(f"fsdp_config.version={brief(version)} must be 1 or 2")
        offloads = is_true(settings.get("cpu_offload"))
        return cls(
            "fsdp2_offload_cpu" if offloads else "fsdp2",
            source,
            fsdp_version=int(version),
            checkpointing=is_true(settings.get("activation_checkpointing")),
            offloads_inputs=is_true(settings.get(CHECKPOINTING_OFFLOAD)),
            reshards=reshards is None or not _keeps_gathered(reshards),
            offload_params=offloads,
        )

    @property
    def family(self) -> str:
        return f"fsdp{self.fsdp_version}"

    label = family
    dtensor = property(lambda self: self.fsdp_version == 2)
    offload = property(lambda self: "cpu" if self.offload_params else "none")

    @property
    def gathers_to_generate(self) -> str:
        """FSDP2's weights would come from the host again for every token."""
        return "FSDP1" if self.fsdp_version == 1 else self.strategy if self.offload_params else ""

    def fields(self, before):
        settings = {"version": 2} | ({"cpu_offload": True} if self.offload_params else {})
        return {"fsdp_config": fsdp_settings(None, before.get("fsdp_config")) | settings}

    def check(self, fields, world_size):
        settings = fields.get("fsdp_config") or {}
        for key in settings.keys() - _KEYS:
            raise choose("key of fsdp_config", str(key), _KEYS)
        if is_true(settings.get("xla")):
            raise InputError("fsdp_config.xla=true is not modelled: use FSDP of torch, or leave it out")
        if self.offloads_inputs and not (self.checkpointing and self.fsdp_version == 2):
            raise InputError(
                f"fsdp_config.{CHECKPOINTING_OFFLOAD}=true needs activation_checkpointing=true and version=2"
            )
        if self.offload_params and self.fsdp_version == 1:
            raise InputError("fsdp_config.cpu_offload=true with version=1 is not modelled: use version=2")
        if (policy := settings.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")) != "TRANSFORMER_BASED_WRAP":
            raise InputError(
                f"fsdp_config.auto_wrap_policy={brief(policy)} is not modelled: use TRANSFORMER_BASED_WRAP"
            )
        reshards = str(settings.get("reshard_after_forward", True)).lower()
        if "hybrid" in reshards or reshards == "no_shard":
            raise InputError(f"fsdp={reshards} is not modelled: use strategy=hsdpN, or ddp for whole models")

    def traceable(self, fields):
        """accelerate's own activation checkpointing becomes transformers'."""
        kwargs = {"use_reentrant": False} | ({"offload": True} if self.offloads_inputs else {})
        checkpointing = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
        return fields | checkpointing if self.checkpointing else fields

    def rank_bytes(self, ranks, loaded, trained, gradients, gathered):
        """It trains in fp32 and holds frozen weights as they are loaded."""
        # accelerate.utils.fsdp_utils.fsdp2_prepare_model widens what has gradients, and nothing else.
        widened = max(0.0, 4 * trained - gradients)
        on_device = not self.offload_params
        return {
            "parameters": (loaded + widened) / ranks * on_device,
            "gradients": 4 * trained / ranks * on_device,
            "optimizer_states": 8 * trained / ranks * on_device,
            "communication": gathered,
        }

    def host_bytes(self, ranks, loaded, trained):
        """fp32 weights, gradients and states, and frozen weights as they are loaded."""
        return (loaded + 14 * trained) / ranks

    def exchanged(self, weights, gradients):
        return [Exchange(weights)] * (2 if self.reshards else 1) + [Exchange(gradients)]


def fsdp_settings(fsdp: Any, config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """`fsdp_config`, which may be a file, under keys without fsdp_, with what the old words in `fsdp` add to it
    (transformers 5.23, TrainingArguments._apply_legacy_fsdp_to_config)."""
    settings = read_settings(config or {}, "fsdp_config")
    settings = {key.removeprefix("fsdp_"): value for key, value in settings.items()}
    for word in fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else ():
        word = getattr(word, "value", word)
        if word == "offload":
            settings.setdefault("cpu_offload", True)
        elif word not in ("auto_wrap", "true", "True"):
            if word not in (known := declared_values("FSDPOption")):
                raise choose("fsdp", str(word), known)
            settings.setdefault("reshard_after_forward", word)  # how weights are sharded
    return settings


def _keeps_gathered(reshards: object) -> bool:
    """True if a value of reshard_after_forward, which under FSDP1 is a sharding strategy, leaves weights gathered."""
    name = str(getattr(reshards, "name", reshards)).lower()
    return name in ("false", "0", "no", "n", "off", "f", "shard_grad_op")
