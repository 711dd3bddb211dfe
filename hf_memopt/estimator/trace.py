"""One traced job: the real Trainer takes two optimizer steps on a fake model of a given depth."""

import contextlib
import logging
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch

from hf_memopt.estimator.fake_world import fake_world
from hf_memopt.estimator.ledger import Ledger, Peak

_STEPS = 2  # the first makes the optimizer's states, the second is what every further step looks like
_ACCUMULATED = 2  # more micro-batches change nothing but the number of prefetched ones
# What cannot matter to a step's memory, or cannot run without a device or files.
_NEUTRAL: dict[str, Any] = {
    "use_cpu": True, "max_steps": _STEPS, "num_train_epochs": 1, "save_strategy": "no", "eval_strategy": "no",
    "eval_on_start": False, "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
    "tf32": None, "load_best_model_at_end": False, "push_to_hub": False, "resume_from_checkpoint": None,
    "auto_find_batch_size": False, "deepspeed": None, "fsdp": None, "fsdp_config": None,
}  # fmt: skip


def trace(
    make_model: Callable[[], torch.nn.Module], arguments: dict[str, Any], seq_len: int, accelerator: bool, padded: bool
) -> dict[str, Peak]:
    """Peak per segment of a job whose model is made inside the fake world.

    Args:
        make_model: called with fake tensors in force.
        arguments: TrainingArguments fields of the real job.
        seq_len: tokens of every sample.
        accelerator: count as an accelerator's allocator does.
        padded: batches hold padding.

    Returns:
        segment -> Peak. Segments are named alike at every depth: the first and the last layer by themselves, all
        layers between together.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments, default_data_collator

    fields = {**arguments, **_NEUTRAL}
    fields["gradient_accumulation_steps"] = min(fields["gradient_accumulation_steps"], _ACCUMULATED)
    samples = fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"] * _STEPS
    row = {"input_ids": [1] * seq_len, "labels": [1] * seq_len}
    row |= {"attention_mask": [1] * seq_len} if padded else {}
    ledger = Ledger(padded=padded, accelerator=accelerator)
    with tempfile.TemporaryDirectory() as folder, _quiet(), _globals_kept(), fake_world(accelerator), ledger:
        ledger.enter("load", "parameters")
        model = make_model()
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.add(tensor)
            ledger.classify(tensor, "parameters")
        ledger.enter("start", "other")
        _name_segments(model, ledger)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=folder, **fields),
            train_dataset=[row] * samples,
            data_collator=default_data_collator,
            callbacks=[_phases()(ledger)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return ledger.peaks


def _name_segments(model: torch.nn.Module, ledger: Ledger) -> None:
    """Let the ledger know where in the model the job is, without touching the graph.

    In backward there is no hook that leaves the graph alone but a weight's: "its gradient is complete".
    """
    layers = repeated_layers(model)
    place = {}
    for index, layer in enumerate(layers):
        name = "first" if index == 0 else "last" if index == len(layers) - 1 else "between"
        place |= {id(weight): f"layer {name}" for weight in layer.parameters()}
        layer.register_forward_pre_hook(lambda *_, name=name: ledger.enter(f"{ledger.phase}: layer {name}"))
        layer.register_forward_hook(lambda *_, name=name: ledger.enter(f"{ledger.phase}: after layer {name}"))
    model.register_forward_pre_hook(lambda *_: ledger.begin("forward", "activations"))
    model.register_forward_hook(lambda *_: ledger.begin("backward", "activations"))
    config = model.config.get_text_config()
    ledger.vocabulary = (config.vocab_size, config.hidden_size)

    for name, weight in model.named_parameters():
        if weight.requires_grad:
            where = place.get(id(weight), name)

            def complete(weight, where=where):
                ledger.classify(weight.grad, "gradients")
                ledger.enter(f"{ledger.phase}: gradients of {where}")

            weight.register_post_accumulate_grad_hook(complete)


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The longest list of modules in a model: its decoder or encoder layers."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def _phases():
    from transformers import TrainerCallback

    class Phases(TrainerCallback):
        """Tells the ledger when the optimizer steps, and which tensors are its states."""

        def __init__(self, ledger: Ledger):
            self.ledger = ledger

        def on_step_begin(self, *args, **kwargs):
            self.ledger.step += 1

        def on_pre_optimizer_step(self, *args, **kwargs):
            self.ledger.begin("optimizer", "workspace")

        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            for states in getattr(optimizer, "optimizer", optimizer).state.values():
                for tensor in states.values():
                    if isinstance(tensor, torch.Tensor):
                        self.ledger.classify(tensor, "optimizer_states")
            self.ledger.begin("between", "other")

    return Phases


@contextlib.contextmanager
def _globals_kept():
    """A Trainer seeds every generator and resets accelerate's process-wide state, which a real one may be using."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [
        (kind._shared_state, dict(kind._shared_state)) for kind in (PartialState, AcceleratorState, GradientState)
    ]
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_cuda else []):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        for state, before in shared:
            state.clear()
            state.update(before)


@contextlib.contextmanager
def _quiet():
    """The traced Trainer has nothing to tell, and asks fake weights for their address to count tied ones once."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logging.disable(logging.NOTSET)
