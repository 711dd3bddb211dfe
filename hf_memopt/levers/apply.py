"""The levers that MemoryArguments switch on, put on a model: for the trainer and for the estimator alike."""

from hf_memopt.levers.arguments import MemoryArguments


def apply_levers(model, memory_args: MemoryArguments, label_smoothing: float = 0.0) -> None:
    """Change a model as MemoryArguments say.

    Args:
        label_smoothing: of the loss, for levers that compute it.

    Raises:
        InputError: a lever cannot work on this model.
    """
    if memory_args.loss_chunk_size is not None:
        from hf_memopt.levers.chunked_loss import chunk_loss

        chunk_loss(model, memory_args.loss_chunk_size, label_smoothing)
