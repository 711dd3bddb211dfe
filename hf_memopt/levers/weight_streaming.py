"""Frozen weights in host memory: each layer's are on the device while the layer runs, forward and backward.

The matrices of a streamed layer lie in pinned host memory. Their storages on the device are empty, and are filled
before the layer's forward pass and before its backward pass, of which a recomputation by activation checkpointing is a
part. While one layer runs, the next one's weights travel on a stream of their own, so that two layers are on the
device at a time. Frozen embeddings and heads travel too: what is tied to both is one storage. 4-bit weights travel as
they are; their scales, vectors and everything that is trained stay.

A storage is emptied rather than replaced, as FSDP2 does (torch/distributed/fsdp/_fully_shard), because autograd saves
views of a frozen weight: these are filled again with it.
"""

import functools
import logging
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_memopt.errors import InputError
from hf_memopt.levers.activation_offload import AtOnce, Streams
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace
from hf_memopt.levers.selective_checkpointing import is_checkpointed

logger = logging.getLogger(__name__)

HOST_ELEMENTS = "host_elements"  # attribute of an empty weight: levers.streamed_loading has moved its elements


def stream_weights(model: torch.nn.Module, ratio: float = 1.0) -> None:
    """Have a model's frozen weights fetched layer by layer. They leave the device at `place()`, or at the first
    forward pass.

    Args:
        model: a transformers model, or peft's around one.
        ratio: share of the layers that are streamed, evenly spread; the others stay on the device.

    Raises:
        InputError: the model has no layers of which something is frozen, or is quantized other than to bitsandbytes'
            4 bits.
    """
    inner = inner_model(model)
    if streamer_of(inner) is None:
        streamer = Streamer(inner, ratio)
        streamer.install()
        # Keep peft from merging adapters into weights that are empty on the device.
        tuner = getattr(model, "base_model", None)
        for name in ("merge_and_unload", "merge_adapter"):
            if hasattr(tuner, name):
                replace(tuner, name, _unless_streamed(streamer, getattr(tuner, name)))
        # Keep DDP from sending the first process's weights to the others: they are empty on the device, and every
        # process has loaded the same.
        names = [name for name, weight in model.named_parameters(remove_duplicate=False) if streamer.streams(weight)]
        # What DistributedDataParallel._set_params_and_buffers_to_ignore_for_model() sets (torch 2.13).
        model._ddp_params_and_buffers_to_ignore = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names]


def streamer_of(model: torch.nn.Module) -> "Streamer | None":
    """The streamer of a model's weights; None where nothing streams them."""
    return getattr(getattr(inner_model(model), "forward", None), "streamer", None)


class Lanes(Streams):
    """Copies on a stream of their own into storages that are freed only behind a wait for the copy."""

    freed_unused = False

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        """Give a tensor's storage `size` bytes."""
        tensor.untyped_storage().resize_(size)


class LanesAtOnce(AtOnce):
    """Synchronous copies between a storage and pageable memory."""

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        tensor.untyped_storage().resize_(size)


def make_lanes(device: torch.device):
    """Make what fetches weights to a device; None where it shares its memory with the host."""
    return None if device.type in ("cpu", "mps") else Lanes(device)


def host_copy(weight: torch.Tensor, lanes) -> torch.Tensor:
    """A weight's elements in host memory."""
    host = lanes.buffer(weight.numel() * weight.element_size()).view(weight.dtype).view(weight.shape)
    return host.copy_(weight.detach())


class Weights:
    """A storage that is streamed.

    Attributes:
        weight: the parameter on the device; of tied ones the first.
        host: its elements in host memory.
        holders: the units that need it on the device now.
        fetched: the event of the copy under way; None after a wait for it.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weight = weight
        self.host: torch.Tensor | None = None
        self.holders: set[Any] = set()
        self.fetched: Any = None
        self._travels = False

    def leave(self, lanes, device: torch.device) -> None:
        """Move the elements to host memory, and leave an empty storage on the device."""
        weight = self.weight
        self.host = vars(weight).pop(HOST_ELEMENTS, None)
        if self.host is not None:
            return
        self.host = host_copy(weight, lanes)
        storage = weight.untyped_storage()
        # Of its own: a storage that safetensors has mapped cannot change its size, and another device needs its own.
        if weight.device != device or not storage.resizable() or storage.nbytes() != self.host.nbytes:
            weight.data = torch.empty_like(self.host, device=device)
        lanes.resize(weight, 0)

    def fetch(self, lanes, holder) -> None:
        """Start the copy to the device."""
        if not self.holders:
            lanes.resize(self.weight, self.host.numel() * self.host.element_size())
            # `.data` has a version counter of its own: autograd would take the weight for changed.
            self.fetched, self._travels = lanes.copy(self.weight.data, self.host), True
        self.holders.add(holder)

    def wait(self, lanes) -> None:
        """Queue what follows behind the copy."""
        if self._travels:
            lanes.wait(self.fetched)
            self.fetched, self._travels = None, False

    def release(self, lanes, holder) -> None:
        """Free the elements on the device once nothing needs them."""
        if holder not in self.holders:
            return
        self.holders.discard(holder)
        if not self.holders:
            self.wait(lanes)
            lanes.resize(self.weight, 0)


class Unit:
    """A module whose streamed weights come and go together.

    Attributes:
        after: the unit that runs next, whose weights are copied meanwhile; None where none does.
        before: the one that ran before it, which is next in backward.
        in_graph: its output of this forward pass waits for a backward pass.
    """

    def __init__(self, module: torch.nn.Module, weights: list[Weights]) -> None:
        self.module, self.weights = module, weights
        self.after: Unit | None = None
        self.before: Unit | None = None
        self.in_graph = False


class Streamer:
    """Fetches and releases the frozen weights of a transformers model.

    Attributes:
        units: layers in the order of the model's modules, then embeddings and head.
        lanes: what copies; None before `place()`, and where nothing is streamed.
    """

    def __init__(self, inner: torch.nn.Module, ratio: float) -> None:
        self.inner = inner
        self.lanes: Any = None
        self._placed = False
        self._weights: dict[int, Weights] = {}
        self._layers = self._stream_layers(ratio)
        self._embedding = self._unit(_of(inner, "get_input_embeddings"))
        self._head = self._unit(_of(inner, "get_output_embeddings"))
        self.units = [*self._layers, *filter(None, (self._embedding, self._head))]
        if self._head is not None:
            self._layers[-1].after = self._head

    def _stream_layers(self, ratio: float) -> list[Unit]:
        units = []
        for layer, stack in streamed_layers(self.inner, ratio):
            unit = self._unit(layer)
            if unit is None:
                continue
            if units and units[-1][1] is stack:
                unit.before, units[-1][0].after = units[-1][0], unit
            units.append((unit, stack))
        if not units:
            raise InputError(
                f"weight_streaming streams frozen weights, and no layer of {type(self.inner).__name__} that it would "
                "stream has any: train adapters (LoRA), or leave it out"
            )
        return [unit for unit, _ in units]

    def _unit(self, module) -> Unit | None:
        """The unit of a module; None where all of its matrices are trained."""
        if module is None:
            return None
        weights = {}
        for weight in module.parameters():
            if weight.requires_grad or weight.dim() < 2:
                continue
            kind = type(weight).__name__
            if kind not in ("Parameter", "Params4bit", "FakeTensor") or weight.dtype is torch.int8:
                raise InputError(
                    f"weight_streaming streams unquantized weights and bitsandbytes' 4-bit ones, not {kind}: use "
                    "load_in_4bit=True, or leave it out"
                )
            weights[id(weight)] = self._weights.setdefault(id(weight), Weights(weight))
        return Unit(module, list(weights.values())) if weights else None

    def install(self) -> None:
        """Replace the methods that run, save and load what is streamed."""
        for unit in self.units:
            replace(unit.module, "forward", self._of_unit(unit, unit.module.forward))
        for module in self.inner.modules():
            own = {name: self._weights[id(w)] for name, w in module.named_parameters(recurse=False) if self.streams(w)}
            if own:
                replace(module, "_save_to_state_dict", _saving(self, own, module._save_to_state_dict))
                replace(module, "_load_from_state_dict", _loading(self, own, module._load_from_state_dict))
        replace(self.inner, "forward", self._of_model(self.inner.forward))
        replace(self.inner, "_apply", _staying(self, self.inner._apply))

    def place(self, lanes=None, device: torch.device | None = None) -> None:
        """Move the streamed weights to host memory, once.

        Args:
            lanes: what copies; by default make_lanes() of the device.
            device: where the model runs; by default where its weights are.
        """
        if self._placed:
            return
        device = device or next(self.inner.parameters()).device
        self.lanes, self._placed = lanes or make_lanes(device), True
        if self.lanes is None:
            logger.warning("weight_streaming has no effect here: weights are in host memory already")
            return
        for weights in self.weights():
            if weights.host is None:
                weights.leave(self.lanes, device)
        for weight in self.inner.parameters():  # loaded to be streamed, and not streamed
            if (host := vars(weight).pop(HOST_ELEMENTS, None)) is not None:
                self.lanes.resize(weight, host.numel() * host.element_size())
                weight.data.copy_(host)

    def weights(self) -> Collection[Weights]:
        """The streamed weights, on the device or not."""
        return self._weights.values()

    def streams(self, weight: torch.Tensor) -> bool:
        """True if a weight is streamed."""
        return id(weight) in self._weights

    def release_all(self) -> None:
        """Free what is on the device: after backward, and of a step that failed."""
        for unit in self.units:
            self._release(unit)

    def _fetch(self, unit: Unit, following: Unit | None) -> None:
        for weights in unit.weights:
            weights.fetch(self.lanes, unit)
        for weights in unit.weights:
            weights.wait(self.lanes)
        for weights in following.weights if following is not None else ():
            weights.fetch(self.lanes, following)

    def _release(self, unit: Unit) -> None:
        for weights in unit.weights:
            weights.release(self.lanes, unit)

    def _of_model(self, forward):
        @functools.wraps(forward)  # the Trainer reads the signature
        def run(*args, **kwargs):
            self.place()
            if self.lanes is None:
                return forward(*args, **kwargs)
            self.release_all()
            for unit in self.units:
                unit.in_graph = False
            return forward(*args, **kwargs)

        run.streamer = self
        return run

    def _of_unit(self, unit: Unit, forward):
        # Outside of activation checkpointing, which is a part of the class's forward: a recomputation does not come
        # here, but runs behind the hook of the layer's output.
        @functools.wraps(forward)
        def run(*args, **kwargs):
            if self.lanes is None:
                return forward(*args, **kwargs)
            self._fetch(unit, unit.after)
            # While a model trains, its backward pass comes next and begins at the head, which stays until then.
            stays = unit is self._head and torch.is_grad_enabled()
            try:
                output = forward(*args, **kwargs)
            finally:
                if not stays:
                    self._release(unit)
            self._follow_backward(unit, output)
            return output

        return run

    def _follow_backward(self, unit: Unit, output) -> None:
        if unit is self._embedding or not torch.is_grad_enabled():  # a lookup's backward pass needs no weights
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                unit.in_graph = True
                tensor.register_hook(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: Unit) -> None:
        following = unit.before if unit.before is not None and unit.before.in_graph else None
        for other in self.units:
            if other is not unit and other is not following:
                self._release(other)
        self._fetch(unit, following)
        # The first layer has none before it that would release it.
        torch.autograd.Variable._execution_engine.queue_callback(self.release_all)


def streamed_layers(inner: torch.nn.Module, ratio: float) -> list[tuple[torch.nn.Module, torch.nn.ModuleList]]:
    """The layers of a transformers model that are streamed, and the list that each is in."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        (layer, stack)
        for stack in inner.modules()
        if isinstance(stack, torch.nn.ModuleList)
        for layer in stack
        if isinstance(layer, GradientCheckpointingLayer)
    ]
    return [layer for number, layer in enumerate(layers) if is_checkpointed(number, ratio)]


def _of(inner: torch.nn.Module, name: str):
    """Return what a method of a transformers model returns; None where the model has none."""
    return getattr(inner, name)() if hasattr(inner, name) else None


def _staying(streamer: Streamer, apply):
    """Wrap what is behind `.to()`: streamed weights stay as they are, on the device on which they are empty."""

    @functools.wraps(apply)
    def run(change, *args, **kwargs):
        if streamer.lanes is None:
            return apply(change, *args, **kwargs)
        for dtype, device in {(weights.weight.dtype, weights.weight.device) for weights in streamer.weights()}:
            changed = change(torch.empty(0, dtype=dtype, device=device))
            if (changed.dtype, changed.device.type) != (dtype, device.type):
                raise InputError(
                    f"weight_streaming keeps weights for {device}, in {dtype}: to move or convert the model, save it "
                    "and load it again"
                )
        return apply(lambda tensor: tensor if streamer.streams(tensor) else change(tensor), *args, **kwargs)

    return run


def _unless_streamed(streamer: Streamer, merge):
    @functools.wraps(merge)
    def run(*args, **kwargs):
        if streamer.lanes is not None:
            raise InputError(
                f"{merge.__name__}() would change weights that weight_streaming keeps in host memory: save the "
                "adapter, and merge it by hf-memopt merge"
            )
        return merge(*args, **kwargs)

    return run


def _saving(streamer: Streamer, own: dict[str, Weights], save):
    @functools.wraps(save)
    def run(destination, prefix, keep_vars):
        save(destination, prefix, keep_vars)
        if streamer.lanes is not None:
            destination.update({prefix + name: weights.host for name, weights in own.items()})

    return run


def _loading(streamer: Streamer, own: dict[str, Weights], load):
    @functools.wraps(load)
    def run(*args, **kwargs):
        if streamer.lanes is None:
            return load(*args, **kwargs)
        for weights in own.values():
            weights.fetch(streamer.lanes, load)
            weights.wait(streamer.lanes)
        load(*args, **kwargs)
        for weights in own.values():
            weights.host.copy_(weights.weight.detach())
            weights.release(streamer.lanes, load)

    return run
