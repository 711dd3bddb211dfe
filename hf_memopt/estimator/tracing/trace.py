"""One traced job: the real Trainer takes two optimizer steps, and evaluates, on a fake model of a given depth."""

import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import torch

from hf_memopt.compatibility.rules import PACKAGES, STEPS_IN_BACKWARD
from hf_memopt.errors import one_line
from hf_memopt.estimator.accounting.engine_tensors import follow_engine, tensors_in
from hf_memopt.estimator.accounting.known_values import know
from hf_memopt.estimator.accounting.ledger import HOST, Books, Ledger
from hf_memopt.estimator.accounting.work import Work
from hf_memopt.estimator.patches.fake_cluster import fake_cluster, fully_shard_model
from hf_memopt.estimator.patches.vision_windows import fewer_windows
from hf_memopt.estimator.tracing.fake_tensors import fake_world
from hf_memopt.estimator.tracing.model import outside_zero3
from hf_memopt.levers.activation_offload import AtOnce, Offloader
from hf_memopt.levers.answer_logits import nothing_but_loss
from hf_memopt.levers.apply import apply_levers, apply_to_trainer

# The first step makes the optimizer's states, the second is what every further step looks like. Without an engine the
# optimizer makes its states of gradients that are nothing but there, which saves the first forward and backward.
_STEPS = {"none": 1, "ddp": 1, "fsdp2": 2, "mesh": 2, "deepspeed": 2}
_ACCUMULATED = 2  # more micro-batches change nothing but the number of prefetched ones
_STACK = 10_000  # layer numbers of a second stack (a decoder beside an encoder) begin here
# What cannot matter to a step's memory, or cannot run without a device or files.
_NEUTRAL: dict[str, Any] = {
    "use_cpu": True,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False,
    "dataloader_drop_last": False,
    "remove_unused_columns": False,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "use_liger_kernel": False,
    "tf32": None,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "auto_find_batch_size": False,
    "fsdp": None,
    "fsdp_config": None,
    "include_num_input_tokens_seen": "no",
    "skip_memory_metrics": True,
    "torch_empty_cache_steps": None,
    "warmup_steps": 0,
    "ignore_data_skip": False,
}


@dataclasses.dataclass(frozen=True)
class TracedJob:
    """What is traced.

    Attributes:
        make_model: called with fake tensors in force.
        fields: TrainingArguments fields of the real job; `deepspeed` is a dict.
        batch: the tensors of one micro-batch: name -> (shape, dtype).
        accelerator: count as an accelerator's allocator does.
        padded: batches hold padding, or several rows to a sample.
        engine: none, ddp, fsdp2, mesh (transformers' DistributedConfig) or deepspeed.
        evaluated: the job evaluates while it trains.
        kept_logits: evaluation batches whose logits stay on the device until metrics are computed.
        trainer: the user's own, whose class and settings the traced one gets; None for transformers' Trainer.
        host_apart: the device has memory of its own.
        memory_args: MemoryArguments, whose levers make_model() has put on the model.
        values: of those tensors of the batch that the model asks for them.
        counted: the kernels of the step are counted too.
        rank: which of the processes is traced.
        flex: levers attend through flex attention on the device.
    """

    make_model: Callable[[], torch.nn.Module]
    fields: dict[str, Any]
    batch: dict[str, tuple[tuple[int, ...], torch.dtype]]
    accelerator: bool
    padded: bool = False
    world_size: int = 1
    engine: str = "none"
    evaluated: bool = False
    kept_logits: int = 0
    trainer: Any = None
    host_apart: bool = True
    memory_args: Any = None
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    counted: bool = False
    rank: int = 0
    flex: bool = False


def trace(job: TracedJob) -> Books:
    """The books of a job: peaks per segment, and every event.

    Segments are named alike at every depth: the first and the last layer by themselves, all layers between together.
    """
    ledger = Ledger(padded=job.padded, accelerator=job.accelerator, values=bool(job.values))
    ledger.work = Work() if job.counted else None
    with (
        tempfile.TemporaryDirectory() as folder,
        _quiet(),
        _globals_kept(),
        _without_deepspeed(job.engine),
        fake_cluster(job.world_size, job.engine, ledger, job.rank),
    ):
        mesh = _mesh(job)
        args = _arguments(job, folder)
        with fake_world(job.accelerator, job.flex), ledger:
            _run(job, args, ledger, mesh)
    return ledger.closed()


def _run(job: TracedJob, args, ledger: Ledger, mesh) -> None:
    ledger.enter("load", "parameters")
    model = job.make_model()
    windows = fewer_windows(model.config._attn_implementation) if job.values else contextlib.nullcontext()
    _book_weights(model, ledger)
    stacks = repeated_layers(model)
    ledger.restart()  # a model made from a configuration passes through other states than a loaded one
    ledger.unpacked_experts = _unpacked_experts(model)
    _load(model, ledger)
    ledger.enter("start", "other")
    _name_segments(job, model, stacks, ledger)
    trainer = _make_trainer(job, model, args, ledger)
    _offload_in_the_books(job, model, ledger)
    trainer.add_callback(_phases()(ledger, trainer))
    with windows:
        with _sharding(job, trainer, stacks, mesh, ledger), _foreign_optimizer(args.optim):
            trainer.train()
        if job.evaluated:
            _evaluate(job, trainer, ledger)


def _book_weights(model: torch.nn.Module, ledger: Ledger) -> None:
    for tensor in weights_of(model):
        ledger.add(tensor)
        ledger.classify(tensor, "parameters")


def _unpacked_experts(model: torch.nn.Module) -> bool:
    """Whether a 4-bit model's experts stayed as they were: transformers 5 keeps all of a layer's in one tensor, which
    is not a linear layer, and bitsandbytes packs nothing else."""
    packed = any(hasattr(weight, "quant_state") for weight in model.parameters())
    return packed and any(weight.dim() == 3 for weight in model.parameters())


def _load(model: torch.nn.Module, ledger: Ledger) -> None:
    """4-bit weights arrive one by one in the compute type and are packed on the device. (A checkpoint that safetensors
    maps into host memory is not counted: its pages can be dropped.)"""
    packed = [module.weight for module in model.modules() if hasattr(getattr(module, "weight", None), "quant_state")]
    if packed:
        ledger.enter("load", "workspace")
        sizes = [weight.quant_state.shape.numel() * weight.quant_state.dtype.itemsize for weight in packed]
        arriving = torch.empty(max(sizes), dtype=torch.uint8)
        del arriving


def _mesh(job: TracedJob):
    if job.engine != "fsdp2":
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (job.world_size,))


def _arguments(job: TracedJob, folder: str):
    """TrainingArguments of the traced job: the real job's, but for what is neutral, on the plain CPU."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    kind = TrainingArguments if job.trainer is None else type(job.trainer.args)
    known = {item.name for item in dataclasses.fields(kind) if item.init}
    fields = {**job.fields, **{name: value for name, value in _NEUTRAL.items() if name in known}}
    fields["max_steps"] = 2 if fields.get("optim") in STEPS_IN_BACKWARD else _STEPS[job.engine]
    fields["deepspeed"] = _swapped_to(folder, fields["deepspeed"]) if job.engine == "deepspeed" else None
    if fields.pop("fp16", False):  # autocast to fp16 runs on accelerators only; the tensors are as large in bf16
        fields["bf16"] = True
    fields["gradient_accumulation_steps"] = min(fields.get("gradient_accumulation_steps", 1), _ACCUMULATED)
    args = kind(output_dir=folder, **fields)
    # accelerate counts CPU devices; to fake tensors cpu:0 is another device than cpu.
    PartialState._shared_state["device"] = args.__dict__["_setup_devices"] = torch.device("cpu")
    return args


def _swapped_to(folder: str, config: dict) -> dict:
    """A DeepSpeed configuration that swaps to another folder, for what its swappers make and clear at their start."""
    zero = dict(config.get("zero_optimization") or {})
    for part in ("offload_optimizer", "offload_param"):
        if "nvme_path" in (zero.get(part) or {}):
            zero[part] = {**zero[part], "nvme_path": folder}
    return {**config, "zero_optimization": zero}


def _offload_in_the_books(job: TracedJob, model, ledger: Ledger) -> None:
    """Activations that an accelerator's host memory would take are booked there."""
    keeper = getattr(model.forward, "keeper", None)
    if not isinstance(keeper, Offloader):
        return

    class Booked(AtOnce):
        def buffer(self, size):
            with ledger.booking(HOST):
                return super().buffer(size)

    keeper.lanes_for = lambda _: Booked() if job.host_apart else None


class _Samples(torch.utils.data.Dataset):
    """Rows that say nothing: the collator makes the tensors."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def _make_trainer(job: TracedJob, model, args, ledger: Ledger):
    """A Trainer over fake batches, or a copy of the user's own with its class and everything it was given."""
    from transformers import PrinterCallback, Trainer

    micro = args.per_device_train_batch_size
    batches = args.gradient_accumulation_steps * args.max_steps
    if not job.accelerator:  # accelerate fetches a batch ahead, into host memory
        batches += 1
    data = _Samples(micro * batches * job.world_size)
    if job.trainer is None:
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=_collator(job))
        trainer.remove_callback(PrinterCallback)
    else:
        trainer = _copied(job.trainer, model, args)
        trainer.train_dataset, trainer.data_collator = data, _collator(job)
        trainer.get_train_dataloader = lambda: Trainer.get_train_dataloader(trainer)
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(data)
    memory_args = getattr(trainer, "memory_args", job.memory_args)
    if memory_args is not None:
        host = {"is_apart": lambda _: job.host_apart, "booking": functools.partial(ledger.booking, HOST)}
        apply_to_trainer(trainer, memory_args, **host)
    trainer.steps_on_host = job.host_apart and getattr(memory_args, "optimizer_cpu_offload", False)
    return trainer


def _collator(job: TracedJob):
    def collate(rows):
        made = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in job.batch.items()}
        for name, value in job.values.items():
            know(made[name], value)
        return made

    return collate


def _copied(original, model, args):
    """The user's trainer around another model; its callbacks, which may write or send, stay behind."""
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    trainer = copy.copy(original)
    trainer.model = trainer.model_wrapped = model
    trainer.args, trainer.state, trainer.control = args, TrainerState(), TrainerControl()
    trainer.eval_dataset = trainer.compute_metrics = trainer.lr_scheduler = None
    trainer.is_in_train = False
    if hasattr(trainer, "memory_args"):  # a MemoryTrainer: nothing runs out here
        quiet = {"oom_recovery": False, "probe_worst_batch": False, "max_memory_gib": None, "max_batch_size": None}
        vars(trainer).pop("create_optimizer", None)
        trainer.memory_args = dataclasses.replace(trainer.memory_args, **quiet)
        trainer._compose()
        apply_levers(model, trainer.memory_args, original.args.label_smoothing_factor)
    trainer.place_model_on_device = False
    trainer.create_accelerator_and_postprocess()
    if original.optimizer is not None and not original.optimizer.state:
        names = {id(weight): name for name, weight in original.model.named_parameters()}
        weights = dict(model.named_parameters())
        groups = []
        for group in original.optimizer.param_groups:
            kept = [names[id(weight)] for weight in group["params"]]  # of layers that the copy has
            groups.append({**group, "params": [weights[name] for name in kept if name in weights]})
        trainer.optimizer = type(original.optimizer)(groups, **original.optimizer.defaults)
    else:
        trainer.optimizer = None
    trainer.callback_handler = CallbackHandler([], model, trainer.processing_class, trainer.optimizer, None)
    return trainer


@contextlib.contextmanager
def _sharding(job: TracedJob, trainer, stacks, mesh, ledger: Ledger):
    """accelerate starts FSDP2 on accelerators only: on the CPU the model is sharded where it would be wrapped."""
    if job.engine != "fsdp2":
        yield
        return

    class Sharded:
        def __new__(cls, model, **_):
            layers = [layer for stack in stacks for layer in stack]
            fully_shard_model(model, layers, trainer.optimizer, mesh, job.fields.get("bf16"), job.fields.get("fp16"))
            for weight in model.parameters():
                ledger.classify(weight, "parameters")
            for layer in layers:
                for weight in layer.parameters():
                    ledger.tag(weight, layer.place_in_model[1])
            ledger.restart()  # accelerate shards on the meta device: a whole model is never on the card
            return model

    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Sharded):
        yield


def _told_apart(hidden: int, job: TracedJob) -> int:
    """The hidden size, by which a head's weight is told from logits; 0 where there are as many tokens."""
    samples, tokens = next(iter(job.batch.values()))[0][:2]
    return 0 if hidden in (tokens, samples * tokens) else hidden


def _name_segments(job: TracedJob, model: torch.nn.Module, stacks, ledger: Ledger) -> None:
    """Let the ledger know where in the model the job is, without touching the graph.

    In backward there is no hook that leaves the graph alone but a weight's: "its gradient is complete".
    """
    place: dict[int, tuple[str, int | None]] = {}
    for number, layers in enumerate(stacks):
        for index, layer in enumerate(layers):
            name = "first" if index == 0 else "last" if index == len(layers) - 1 else "between"
            _name_layer(
                layer,
                f"layer {name}" + (f" of stack {number}" if number else ""),
                index + number * _STACK,
                index == len(layers) - 1,
                place,
                ledger,
            )
    model.register_forward_pre_hook(lambda *_: _unless_evaluating(ledger, "forward"))
    model.register_forward_hook(lambda *_: _unless_evaluating(ledger, "backward"))
    config = model.config.get_text_config()
    ledger.vocabulary = (config.vocab_size, _told_apart(getattr(config, "hidden_size", 0), job))

    for name, weight in model.named_parameters():
        where, layer = place.get(id(weight), (name, None))
        if layer is not None:
            ledger.tag(weight, layer)
        if weight.requires_grad:

            def complete(weight, where=where, layer=layer):
                if weight.grad is not None:  # an engine may have taken it
                    ledger.classify(weight.grad, "gradients")
                ledger.enter(f"{ledger.phase}: gradients of {where}", layer=layer)

            weight.register_post_accumulate_grad_hook(complete)


def _name_layer(layer, name: str, index: int, last: bool, place: dict, ledger: Ledger) -> None:
    layer.place_in_model = (name, index)
    place |= {id(weight): (name, index) for weight in layer.parameters()}
    layer.register_forward_pre_hook(lambda *_: ledger.enter(f"{ledger.phase}: {name}", layer=index))
    after = None if last else index
    layer.register_forward_hook(lambda *_: ledger.enter(f"{ledger.phase}: after {name}", layer=after))


def _unless_evaluating(ledger: Ledger, phase: str) -> None:
    if ledger.phase != "eval":
        ledger.begin(phase, "activations")


def repeated_layers(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """A model's longest lists of modules of one kind: its decoder layers, or its encoder and decoder layers."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # Experts are lists within layers; the outermost come first.
    inner = {id(part) for found in lists for layer in found for part in layer.modules() if part is not layer}
    outer = [found for found in lists if found and not any(id(layer) in inner for layer in found)]
    text = [found for found in outer if len(found) == _depth(model)] or outer
    longest = max(map(len, text), default=0)
    return [found for found in text if len(found) == longest]


def _depth(model) -> int | None:
    config = model.config.get_text_config()
    return getattr(config, "num_hidden_layers", None)


def weights_of(model):
    """Every tensor that a model keeps: parameters, buffers, and bitsandbytes' scales."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:  # bitsandbytes keeps scales beside the packed weight
            nested = state.state2
            parts = (state.absmax, state.code, state.offset, *((nested.absmax, nested.code) if nested else ()))
            yield from (part for part in parts if isinstance(part, torch.Tensor))


def _evaluate(job: TracedJob, trainer, ledger: Ledger) -> None:
    """What Trainer.evaluate does to memory: forward without gradients, and logits that wait for the metrics."""
    ledger.begin("eval", "activations")
    size = trainer.args.per_device_eval_batch_size
    if not job.values:  # otherwise what belongs to one sample cannot be told
        batch = {name: ((size, *shape[1:]), dtype) for name, (shape, dtype) in job.batch.items()}
        job = dataclasses.replace(job, batch=batch)
    model = trainer.model if job.engine in ("none", "ddp") else trainer.model_wrapped
    model.eval()
    reduce = getattr(trainer, "preprocess_logits_for_metrics", None)
    kept = []
    for _ in range(min(job.kept_logits, 2) or 1):
        inputs = trainer._prepare_inputs(_collator(job)(None))
        with nothing_but_loss(model, not job.kept_logits):
            _, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only=not job.kept_logits)
        kept.append(logits if reduce is None or logits is None else reduce(logits, labels))
    ledger.kept_logits = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(kept[0]))
    ledger.begin("between", "other")


def _phases():
    from transformers import TrainerCallback

    class Phases(TrainerCallback):
        """Tells the ledger when the optimizer steps, and which tensors are its states."""

        def __init__(self, ledger: Ledger, trainer):
            self.ledger = ledger
            self.trainer = trainer

        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            engine = self.trainer.model_wrapped
            if hasattr(engine, "zero_optimization"):
                follow_engine(engine, self.ledger)
            elif args.max_steps == 1 and not self.trainer.steps_on_host:
                self._make_states(optimizer, args, state, control)

        def _make_states(self, optimizer, *state) -> None:
            self.ledger.begin("backward", "gradients")
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.empty_like(weight)
                    self.ledger.tag(weight.grad, self.ledger.layer_of(weight))
            self.on_pre_optimizer_step()
            if hasattr(optimizer.optimizer, "train"):  # schedule-free ones have two modes
                optimizer.optimizer.train()
            optimizer.optimizer.step()
            self.on_optimizer_step(*state, optimizer=optimizer)
            optimizer.optimizer.zero_grad()

        def on_step_begin(self, *args, **kwargs):
            self.ledger.step += 1

        def on_pre_optimizer_step(self, *args, **kwargs):
            for weight in self.trainer.model.parameters():
                if hasattr(weight.grad, "_local_tensor"):
                    self.ledger.classify(weight.grad, "gradients")
            self.ledger.begin("optimizer", HOST if self.trainer.steps_on_host else "workspace")

        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            followed = hasattr(self.trainer.model_wrapped, "zero_optimization")  # DeepSpeed's are followed below
            if not followed and not self.trainer.steps_on_host:
                for tensor in _state_tensors(getattr(optimizer, "optimizer", optimizer)):
                    self.ledger.classify(tensor, "optimizer_states")
            self.ledger.begin("between", "other")

    return Phases


def _state_tensors(optimizer):
    """An optimizer's states, or those of the optimizers that transformers' layer-wise ones keep for every weight."""
    layerwise = getattr(optimizer, "optimizer_dict", None)
    for one in layerwise.values() if layerwise else [optimizer]:
        for states in one.state.values():
            yield from tensors_in(states)


@contextlib.contextmanager
def _foreign_optimizer(optim):
    """An optimizer of a package that nothing here is made for may ask for a CUDA device, or for values.

    Raises:
        ValueError: in its name, for what would be a traceback from inside it.
    """
    try:
        yield
    except RuntimeError as error:
        name = getattr(optim, "value", optim)
        if PACKAGES.get(name, "bitsandbytes") in ("bitsandbytes", "torchao"):
            raise
        raise ValueError(f"optim={name} does not run on tensors without values: {one_line(error)}") from error


@contextlib.contextmanager
def _globals_kept():
    """A Trainer seeds every generator, resets accelerate's process-wide state, which a real one may be using, and with
    full_determinism changes torch's switches."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [
        (kind._shared_state, dict(kind._shared_state)) for kind in (PartialState, AcceleratorState, GradientState)
    ]
    for state, _ in shared:
        state.clear()
    try:
        with outside_zero3(), _collection_on_demand(), _determinism_kept(), generators_kept():
            yield
    finally:
        for state, before in shared:
            state.clear()
            state.update(before)


@contextlib.contextmanager
def generators_kept():
    """Python's, numpy's and torch's random generators continue afterwards where they were before."""
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
    enabled, freeze = gc.isenabled(), not gc.get_freeze_count()
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


@contextlib.contextmanager
def _determinism_kept():
    """What transformers' enable_full_determinism sets beside the environment."""
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


@contextlib.contextmanager
def _without_deepspeed(engine: str):
    """accelerate imports DeepSpeed, which takes a second, to ask whether a model is its engine."""
    if engine == "deepspeed" or "deepspeed" in sys.modules:
        yield
        return
    with mock.patch("accelerate.utils.other.is_deepspeed_available", lambda: False):
        yield


@contextlib.contextmanager
def _quiet():
    """The traced Trainer has nothing to tell, and asks fake weights for their address to count tied ones once."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            # On the CPU they are not paged: they are counted as if they stayed on the device.
            warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
            yield
    finally:
        logging.disable(disabled)
