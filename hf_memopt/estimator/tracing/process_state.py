"""Keeps what a traced Trainer changes in its process: accelerate's state, random generators, logging, collection of
garbage."""

import contextlib
import gc
import logging
import random
import sys
import warnings
from unittest import mock

import numpy
import torch

from hf_memopt.engines import Engine
from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.tracing.model import outside_zero3

_SINGLETONS = Part.EVERY_JOB.relies_on(
    "accelerate.state:PartialState._shared_state",
    "accelerate.state:AcceleratorState._shared_state",
    "accelerate.state:GradientState._shared_state",
    why="accelerate keeps one state a process; a real job may be using it, so it is put back",
    until="an Accelerator can have a state of its own",
)


@contextlib.contextmanager
def process_state_kept():
    """Keep what a Trainer changes: it seeds every generator, resets accelerate's singletons, which a real Trainer may
    be using, and with full_determinism sets torch's switches."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with (
        mock.patch.dict(PartialState._shared_state, clear=True),
        mock.patch.dict(AcceleratorState._shared_state, clear=True),
        mock.patch.dict(GradientState._shared_state, clear=True),
        outside_zero3(),
        _collection_on_demand(),
        _determinism_kept(),
        generators_kept(),
        _one_thread(),
    ):
        torch.manual_seed(0)  # TRL shuffles what it generated: two estimates of a job are the same
        yield


@contextlib.contextmanager
def generators_kept():
    """Python's, numpy's and torch's random generators continue where they were before."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_cuda else []):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


@contextlib.contextmanager
def _collection_on_demand():
    """Garbage is collected only where the Trainer or DeepSpeed asks for it: automatic collection starts after a number
    of allocations that depends on what the process did before, and would free tensors at another place every time.

    Imported modules are frozen, so that those collections need not look at them. gc.unfreeze() unfreezes everything:
    what the process froze itself stays frozen.
    """
    global _frozen
    # Asked only until this process has frozen objects, for Python counts them one by one (0.1 s).
    _frozen = _frozen or gc.get_freeze_count() > 0
    enabled, freeze = gc.isenabled(), not _frozen
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if enabled:
            gc.enable()


_frozen = False


@contextlib.contextmanager
def _one_thread():
    """torch computes in this thread alone. A trace computes little (values of ids and masks), and after each operator
    OpenMP's other threads wait busily for the next: on two cores that was a fifth of a plan's CPU time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _determinism_kept():
    """Restore what transformers' enable_full_determinism sets, except environment variables (patches.fake_cluster)."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = before


_DEEPSPEED = Part.WITHOUT_DEEPSPEED.replaces(
    "accelerate.utils.other:is_deepspeed_available()",
    why="accelerate imports DeepSpeed, which takes a second, to ask whether a model is its engine",
    until="accelerate looks into sys.modules first",
)


def without_deepspeed(engine: Engine) -> contextlib.AbstractContextManager:
    """Keep accelerate from importing DeepSpeed, which takes a second, only to ask whether a model is its engine."""
    if engine.deepspeed is not None or "deepspeed" in sys.modules:
        return contextlib.nullcontext()
    return _DEEPSPEED.replaced(is_deepspeed_available=lambda: False)


# What a trace need not say -> the kind of warning.
_SILENCED = {
    # bitsandbytes does not page on a CPU; fake_tensors counts what it pages on a card.
    "Paged optimizers are not supported on CPU": Warning,
    # The Trainer compares data pointers to count tied weights once.
    "Accessing the data pointer of FakeTensor": Warning,
    "FSDP2-wrapped module .* returned a view tensor": Warning,
    r"`(is_)?gradient_checkpointing\w*` is deprecated": FutureWarning,
    r"`torch\.distributed\.\w+` is deprecated": FutureWarning,
}


@contextlib.contextmanager
def quiet():
    """Silence the traced Trainer: its warnings are about fake tensors, or about the CPU that it is traced on."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            for message, kind in _SILENCED.items():
                warnings.filterwarnings("ignore", message, kind)
            yield
    finally:
        logging.disable(disabled)
