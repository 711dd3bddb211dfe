"""The facts of a job that rules, memory features and proposed changes ask: one description, made once a job."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hf_memopt.compatibility.rules import CUDA_GRAPHS
from hf_memopt.compatibility.setup import Setup, compile_mode
from hf_memopt.compatibility.setup import refusals as setup_refusals
from hf_memopt.engines import Engine, engine_named, engine_of_table
from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import FEATURES, MemoryArguments


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a job. The defaults stand for a job of which only a log is left.

    Attributes:
        setup: the job in the terms of the compatibility table.
        training: its TrainingArguments fields; None where unknown.
        memory_args: its MemoryArguments.
        discrete_memory: there is host memory beside the device's.
        next_token: its loss is that of the next token, as the model's loss_function computes it.
        seq_len: tokens a sample; None where unknown.
        halved_frames: frames that are left when a video's are halved; None for text.
        keeps_eval_logits: the logits of several evaluation batches stay on the device for compute_metrics.
    """

    setup: Setup = field(default_factory=Setup)
    training: Mapping[str, Any] | None = None
    memory_args: MemoryArguments = field(default_factory=MemoryArguments)
    discrete_memory: bool = True
    next_token: bool = True
    seq_len: int | None = None
    halved_frames: int | None = None
    keeps_eval_logits: bool = False

    @classmethod
    def on_device(cls, device: str) -> "Facts":
        """A job of which only the kind of device is known: cuda, rocm, mps, xpu or cpu."""
        return cls(setup=Setup(device=device), discrete_memory=device not in ("mps", "cpu"))

    @classmethod
    def of_settings(
        cls, memory_args: MemoryArguments, training: Mapping[str, Any], engine: Engine, device: str = "cuda"
    ) -> "Facts":
        """A job in the terms of memory features alone."""
        return cls(setup=Setup(**engine.setup(), device=device), training=training, memory_args=memory_args)

    @property
    def engine(self) -> Engine:
        return engine_of_table(self.setup.strategy)

    @property
    def fields(self) -> Mapping[str, Any]:
        """TrainingArguments fields that are known."""
        return self.training or {}

    def refusals(self) -> list[str]:
        """A sentence for every reason why the job cannot run."""
        return [*setup_refusals(self.setup), *self.feature_refusals()]

    def feature_refusals(self) -> Iterator[str]:
        """A sentence for each memory feature that does not go with the other settings."""
        mode = compile_mode(self.fields.get)
        if self.memory_args.oom_recovery and mode in CUDA_GRAPHS and self.setup.device in ("cuda", "rocm"):
            # torch._inductor.cudagraph_trees (2.13): can_start_new_generation() is False as long as a forward waits
            # for its backward, which after running out of memory never comes.
            yield (
                f"torch_compile_mode={mode} records CUDA graphs, which do not free the memory of a step that failed: "
                "use max-autotune-no-cudagraphs, or set oom_recovery=False"
            )
        for feature in FEATURES:
            yield from feature.refused(self.memory_args, self)

    def check_features(self) -> None:
        """Raise for the first of feature_refusals().

        Raises:
            InputError: the reason, and which setting to leave out.
        """
        for reason in self.feature_refusals():
            raise InputError(reason)

    def changed(self, settings: Mapping[str, Any]) -> "Facts":
        """The job with other settings."""
        in_setup = {name: settings[name] for name in _SETUP_FIELDS & settings.keys()}
        if "strategy" in settings:
            engine = engine_named(settings["strategy"])
            in_setup |= {"strategy": engine.name, "offload": engine.offload}
        memory = {name: value for name, value in settings.items() if name in MemoryArguments.names()}
        return replace(
            self,
            setup=replace(self.setup, **in_setup),
            training={**self.fields, **training_fields(settings)},
            memory_args=replace(self.memory_args, **memory),
        )


_SETUP_FIELDS = {item.name for item in fields(Setup)}
_NOT_TRAINING = {"strategy", "method", "dtype", "seq_len", "max_frames"}


def training_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select those of a change's settings that are TrainingArguments fields."""
    return {
        name: value for name, value in settings.items() if name not in _NOT_TRAINING.union(MemoryArguments.names())
    }
