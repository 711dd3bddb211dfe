"""Checkpoints of models that transformers cut up, from which another number of processes goes on.

transformers 5.23 saves their weights, whole, and refuses to save more. The optimizer's states are written here by
torch's distributed checkpoints, every process its own part, and come back in the parts of whoever reads them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

FOLDER = "optimizer"  # within a checkpoint
_SCHEDULER = "scheduler.pt"


@contextmanager
def states_saved_here(model=None, args=None, *_, **__) -> Iterator[None]:
    """The Trainer's constructor refuses to save the states of such a model, which are not its to save.

    Args:
        model, args: what the constructor is given.
    """
    if args is None or not getattr(model, "is_distributed_loading_by_transformers", False):
        yield
        return
    with mock.patch.object(args, "save_only_model", True):
        yield


def save_states(trainer, folder: str | Path) -> None:
    """Write the optimizer's states and the schedule's. Every process calls it."""
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save(_states(trainer), checkpoint_id=Path(folder) / FOLDER)
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / _SCHEDULER)


def load_states(trainer, folder: str | Path) -> None:
    """Read what save_states() wrote, if it did. Every process calls it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    if not (Path(folder) / FOLDER).is_dir():
        return
    states = _states(trainer)
    dcp.load(states, checkpoint_id=Path(folder) / FOLDER)
    set_optimizer_state_dict(trainer.model, _optimizer(trainer), states)
    trainer.lr_scheduler.load_state_dict(torch.load(Path(folder) / _SCHEDULER, weights_only=True))


def load_weights(model, folder: str | Path) -> None:
    """Cut a checkpoint's whole weights up as the model's are."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole: dict[str, torch.Tensor] = {}
    if torch.distributed.get_rank() == 0:
        for file in sorted(Path(folder).glob("model*.safetensors")):
            whole |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, whole, options=options)


def _states(trainer) -> dict:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(trainer.model, _optimizer(trainer))


def _optimizer(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)
