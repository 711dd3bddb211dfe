"""Checkpoints of models that from_pretrained sharded (tensor parallelism, FSDP2), resumable with another world size.

transformers 5.23 saves their unsharded weights and refuses to save optimizer states. These are written as torch
distributed checkpoints, which every process loads its own shards of. Can go when the Trainer saves them itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from safetensors.torch import load_file

from hf_memopt.trainer.checkpoints.intact import STATES_FOLDER
from hf_memopt.trainer.step.optimizer_guard import torch_optimizer

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

_SCHEDULER = "scheduler.pt"


@contextmanager
def states_saved_here(model=None, args=None, *_, **__) -> Iterator[None]:
    """A context for the Trainer's constructor, which requires save_only_model=True for such a model (transformers
    5.23), not knowing that the states are saved here.

    Args:
        model, args: the constructor's arguments.
    """
    if args is None or not getattr(model, "is_distributed_loading_by_transformers", False):
        yield
        return
    with mock.patch.object(args, "save_only_model", True):
        yield


def save_states(trainer: "MemoryTrainer", folder: str | Path) -> None:
    """Write the states of optimizer and scheduler. Called by every process."""
    import torch.distributed.checkpoint as dcp  # here and below: some builds of torch lack it

    dcp.save(_states(trainer), checkpoint_id=Path(folder) / STATES_FOLDER)
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / _SCHEDULER)


def load_states(trainer: "MemoryTrainer", folder: str | Path) -> None:
    """Load what save_states() wrote, if anything. Called by every process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    if not (Path(folder) / STATES_FOLDER).is_dir():
        return
    states = _states(trainer)
    dcp.load(states, checkpoint_id=Path(folder) / STATES_FOLDER)
    set_optimizer_state_dict(trainer.model, torch_optimizer(trainer), states)
    trainer.lr_scheduler.load_state_dict(torch.load(Path(folder) / _SCHEDULER, weights_only=True))


def load_weights(model, folder: str | Path) -> None:
    """Load a checkpoint's unsharded weights into a sharded model. Called by every process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    weights: dict[str, torch.Tensor] = {}  # broadcast from the first process
    if torch.distributed.get_rank() == 0:
        for file in sorted(Path(folder).glob("model*.safetensors")):
            weights |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, weights, options=options)


def _states(trainer: "MemoryTrainer") -> dict:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(trainer.model, torch_optimizer(trainer))
