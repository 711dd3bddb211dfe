"""Loading weights, optimizer states and random states of a checkpoint, without running code that is in it."""

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.errors import InputError, one_line
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.trainer.checkpoints import sharded_states
from hf_memopt.trainer.checkpoints.safe_load import without_code
from hf_memopt.trainer.step.optimizer_guard import torch_optimizer
from hf_memopt.trainer.step.recoverability import holds_whole_model


class SafeLoad:
    """The part of MemoryTrainerMixin that loads a checkpoint.

    All methods override ones of transformers 5.23's Trainer, which it calls by these names while it resumes. Most are
    private: if one is renamed, its checkpoints are loaded without the checks below (test_resume.py fails then).
    """

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with _loading(resume_from_checkpoint):
            if self.is_distributed_loading_by_transformers and not hasattr(self.model, "peft_config"):
                return sharded_states.load_weights(self.model, resume_from_checkpoint)
            if not (holds_whole_model(self) and load_renamed(model or self.model, resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        with _loading(self.state.best_model_checkpoint):
            if not (holds_whole_model(self) and load_renamed(self.model, self.state.best_model_checkpoint)):
                super()._load_best_model()

    def _prepare_for_training(self, *args, **kwargs):
        with self._deepspeed_loads_safely():
            return super()._prepare_for_training(*args, **kwargs)

    def _deepspeed_loads_safely(self):
        """The Trainer calls transformers.trainer.deepspeed_load_checkpoint() in the middle of a method, with no hook
        around it. Can go together with safe_load.py."""
        from transformers import trainer

        load = trainer.deepspeed_load_checkpoint

        def load_safely(engine, checkpoint, *args, **kwargs):
            with _loading(checkpoint):
                return load(engine, checkpoint, *args, **kwargs)

        return mock.patch.object(trainer, "deepspeed_load_checkpoint", load_safely)

    def _issue_warnings_after_load(self, load_result):
        """Refuse a checkpoint that lacks weights: transformers only warns, and trains their initial values."""
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        # Weights that save_pretrained leaves out since the model computes them, such as Marian's position embeddings.
        computed = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        absent = set(load_result.missing_keys) & weights.keys() - computed
        loaded = {id(weight) for name, weight in weights.items() if name not in absent}
        missing = sorted(name for name in absent if id(weights[name]) not in loaded)
        if missing:
            raise InputError(
                f"the checkpoint lacks {len(missing)} of the model's {len(weights)} weights ({missing[0]}, …): "
                "it is of another model"
            )
        load_result.missing_keys[:] = set(load_result.missing_keys) - absent  # no warning for tied weights
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Load optimizer states, through host memory where the device cannot hold them twice."""
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        with _loading(checkpoint):
            if self.is_distributed_loading_by_transformers:
                return sharded_states.load_states(self, checkpoint)
            settings = set().union(*torch_optimizer(self).param_groups)
            failure = self._load_states(checkpoint)
            # torch's load_state_dict takes over another optimizer's groups without a word.
            if missing := settings - set().union(*torch_optimizer(self).param_groups):
                optim = self.args.optim.value
                raise InputError(
                    f"{checkpoint}/optimizer.pt is of another optimizer: it lacks {min(missing)} of optim={optim}"
                )
        if failure is not None:
            self._event("oom_recovered", stage="resume", message=failure.message, remedy="loaded through host memory")

    def _load_states(self, checkpoint) -> Diagnosis | None:
        """The out-of-memory failure that was recovered from, if there was one."""
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            return None
        except Exception as error:
            diagnosis = diagnose(error)
            if not diagnosis.smaller_batch_helps:
                raise
            traceback.clear_frames(error.__traceback__)
        free_memory()
        load = torch.load

        # With several processes transformers 5.23 maps optimizer.pt to each device, so that the file's states lie
        # beside the optimizer's own. From a memory-mapped file they are copied one by one.
        def through_host_memory(file, *args, **kwargs):
            return load(file, *args, **{**kwargs, "map_location": "cpu", "mmap": True})

        with mock.patch.object(torch, "load", through_host_memory):
            super()._load_optimizer_and_scheduler(checkpoint)
        return diagnosis

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            with _loading(checkpoint):
                super()._load_rng_state(checkpoint)


@contextlib.contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    """Turn a library's error about a damaged or mismatched checkpoint into an InputError."""
    try:
        with without_code(checkpoint):
            yield
    except InputError:
        raise
    except Exception as error:
        if diagnose(error).kind is not OomKind.NOT_MEMORY:
            raise
        raise InputError(
            f"resume_from_checkpoint: {checkpoint} cannot be loaded into this model and optimizer: "
            f"{one_line(error)[:300]}"
        ) from error


def load_renamed(model, folder: str | Path) -> bool:
    """Load a checkpoint's weights into a model if their names differ from the model's; True if they did.

    transformers 5 saves models whose modules it has reorganized (Qwen2.5-VL, Mixtral's experts and others) under the
    names of the original checkpoints. Its Trainer (5.23) passes these to load_state_dict, which matches none, warns,
    and trains the initial weights. from_pretrained maps the names, and needs host memory for a second copy of the
    weights. Can go when the Trainer maps them too.

    Raises:
        InputError: weights are missing, which from_pretrained would initialize at random.
    """
    if not isinstance(model, PreTrainedModel) or not _weight_names(Path(folder)) - model.state_dict().keys():
        return False
    loaded, info = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{folder} lacks {len(missing)} of the model's weights ({missing[0]}, …): it is of another model"
        )
    model.load_state_dict(loaded.state_dict(), strict=False)
    return True


def _weight_names(folder: Path) -> set[str]:
    """The names of a checkpoint's weights; empty where it has no safetensors."""
    from safetensors import safe_open

    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not single.is_file():
        return set()
    with safe_open(single, "pt") as file:
        return set(file.keys())
