"""Trace one job: the real Trainer takes two optimizer steps, and evaluates, on a fake model of a given depth."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_memopt.compatibility.rules import PACKAGES
from hf_memopt.errors import one_line
from hf_memopt.estimator.accounting.engine_tensors import tensors_in
from hf_memopt.estimator.accounting.ledger import HOST, Ledger, TraceResult
from hf_memopt.estimator.accounting.work import Work
from hf_memopt.estimator.patches.fake_cluster import fake_cluster, fully_shard_model
from hf_memopt.estimator.patches.replacement import check, replaced
from hf_memopt.estimator.patches.table import Part
from hf_memopt.estimator.patches.vision_windows import fewer_windows
from hf_memopt.estimator.tracing.fake_tensors import fake_world
from hf_memopt.estimator.tracing.process_state import process_state_kept, quiet, without_deepspeed
from hf_memopt.estimator.tracing.segments import announce_layers, make_phase_callback, repeated_layers
from hf_memopt.estimator.tracing.traced_arguments import make_arguments
from hf_memopt.estimator.tracing.traced_trainer import make_collator, make_trainer
from hf_memopt.levers.activation_offload import AtOnce, Offloader
from hf_memopt.levers.answer_logits import nothing_but_loss


@dataclasses.dataclass(frozen=True)
class TracedJob:
    """What is traced.

    Attributes:
        make_model: builds the model; called under the fake tensor mode.
        fields: TrainingArguments fields of the real job; `deepspeed` is a dict.
        batch: the tensors of one micro-batch: name -> (shape, dtype).
        accelerator: count as an accelerator's allocator does.
        padded: batches hold padding, or several rows per sample.
        engine: none, ddp, fsdp2, mesh (transformers' DistributedConfig) or deepspeed.
        evaluated: the job evaluates while it trains.
        kept_logits: evaluation batches whose logits stay on the device until metrics are computed.
        trainer: the user's own, whose class and settings the traced one gets; None for transformers' Trainer.
        host_apart: the device has discrete memory.
        memory_args: MemoryArguments, whose levers make_model() has applied to the model.
        values: the values of those tensors of the batch whose values the model asks for.
        counted: count the kernels of the step, too.
        rank: which of the processes is traced.
        flex: levers use flex attention on the device.
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


def trace(job: TracedJob) -> TraceResult:
    """A job's peaks per segment, and every allocation and free.

    Segments have the same names at every depth: the first and the last layer have their own, all layers between share
    theirs.
    """
    check(Part.EVERY_JOB)
    if job.memory_args is not None:
        check(Part.LEVERS)
    ledger = Ledger(padded=job.padded, accelerator=job.accelerator, values=bool(job.values))
    ledger.work = Work() if job.counted else None
    with (
        tempfile.TemporaryDirectory() as folder,
        quiet(),
        process_state_kept(),
        without_deepspeed(job.engine),
        fake_cluster(job.world_size, job.engine, ledger, job.rank),
    ):
        mesh = _mesh(job)
        args = make_arguments(job, folder)
        with fake_world(job.accelerator, job.flex), ledger:
            _run(job, args, ledger, mesh)
    return ledger.result()


def _run(job: TracedJob, args, ledger: Ledger, mesh) -> None:
    ledger.enter("load", "parameters")
    model = job.make_model()
    windows = fewer_windows(model.config._attn_implementation) if job.values else contextlib.nullcontext()
    _add_weights(model, ledger)
    stacks = repeated_layers(model)
    ledger.restart()  # building from a configuration allocates otherwise than from_pretrained
    ledger.unquantized_experts = _unquantized_experts(model)
    _load(model, ledger)
    ledger.enter("start", "other")
    announce_layers(job.batch, model, stacks, ledger)
    trainer = make_trainer(job, model, args, ledger)
    _offload_to_host(job, model, ledger)
    trainer.add_callback(make_phase_callback(ledger, trainer))
    with windows:
        with _sharding(job, trainer, stacks, mesh, ledger), _foreign_optimizer(args.optim):
            trainer.train()
        if job.evaluated:
            _evaluate(job, trainer, ledger)


def _add_weights(model: torch.nn.Module, ledger: Ledger) -> None:
    for tensor in loaded_tensors(model):
        ledger.add(tensor)
        ledger.classify(tensor, "parameters")


def loaded_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that a model keeps: parameters, buffers, and bitsandbytes' scales beside a 4-bit weight."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            nested = state.state2
            parts = (state.absmax, state.code, state.offset, *((nested.absmax, nested.code) if nested else ()))
            yield from (part for part in parts if isinstance(part, torch.Tensor))


def _unquantized_experts(model: torch.nn.Module) -> bool:
    """Whether a 4-bit model's experts stayed in 16 bits: bitsandbytes quantizes linear layers only, and transformers 5
    keeps a layer's experts in one 3-dimensional tensor."""
    quantized = any(hasattr(weight, "quant_state") for weight in model.parameters())
    return quantized and any(weight.dim() == 3 for weight in model.parameters())


def _load(model: torch.nn.Module, ledger: Ledger) -> None:
    """4-bit weights reach the device one by one in the compute dtype and are quantized there. (A checkpoint that
    safetensors maps into host memory is not counted: the system can drop its pages.)"""
    weights = [module.weight for module in model.modules() if hasattr(getattr(module, "weight", None), "quant_state")]
    if weights:
        ledger.enter("load", "workspace")
        sizes = [weight.quant_state.shape.numel() * weight.quant_state.dtype.itemsize for weight in weights]
        unquantized = torch.empty(max(sizes), dtype=torch.uint8)
        del unquantized


def _mesh(job: TracedJob):
    if job.engine != "fsdp2":
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (job.world_size,))


@contextlib.contextmanager
def _sharding(job: TracedJob, trainer, stacks, mesh, ledger: Ledger):
    """Shard the model for FSDP2, which accelerate (1.15) starts on accelerators only: on a CPU it wraps the model in
    DistributedDataParallel, so sharding takes that class's place."""
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
            ledger.restart()  # accelerate shards on the meta device: the device never holds the whole model
            return model

    with replaced("torch.nn.parallel:DistributedDataParallel", Sharded):
        yield


@contextlib.contextmanager
def _foreign_optimizer(optim):
    """Name the optimizer where one of a package that the trace does not know asks for a CUDA device, or for values.

    Raises:
        ValueError: instead of a RuntimeError from inside the package.
    """
    try:
        yield
    except RuntimeError as error:
        name = getattr(optim, "value", optim)
        if PACKAGES.get(name, "bitsandbytes") in ("bitsandbytes", "torchao"):
            raise
        raise ValueError(f"optim={name} does not run on tensors without values: {one_line(error)}") from error


def _offload_to_host(job: TracedJob, model, ledger: Ledger) -> None:
    """Count offloaded activations as host memory, although the trace offloads from the CPU to the CPU."""
    keeper = getattr(model.forward, "keeper", None)
    if not isinstance(keeper, Offloader):
        return

    class HostBuffers(AtOnce):
        def buffer(self, size):
            with ledger.booking(HOST):
                return super().buffer(size)

    keeper.lanes_for = lambda _: HostBuffers() if job.host_apart else None


def _evaluate(job: TracedJob, trainer, ledger: Ledger) -> None:
    """What Trainer.evaluate does to memory: forward without gradients, and logits that wait for the metrics."""
    ledger.begin("eval", "activations")
    size = trainer.args.per_device_eval_batch_size
    if not job.values:  # with values, the batch cannot be resized: pixel tensors do not say what belongs to a sample
        batch = {name: ((size, *shape[1:]), dtype) for name, (shape, dtype) in job.batch.items()}
        job = dataclasses.replace(job, batch=batch)
    model = trainer.model if job.engine in ("none", "ddp") else trainer.model_wrapped
    model.eval()
    reduce = getattr(trainer, "preprocess_logits_for_metrics", None)
    kept = []
    for _ in range(min(job.kept_logits, 2) or 1):
        inputs = trainer._prepare_inputs(make_collator(job)(None))
        with nothing_but_loss(model, not job.kept_logits):
            _, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only=not job.kept_logits)
        kept.append(logits if reduce is None or logits is None else reduce(logits, labels))
    ledger.kept_logits = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(kept[0]))
    ledger.begin("between", "other")
