"""Optimizers that cannot run in a trace, by formula: of packages that are not installed, and those that ask for a GPU.

Each class says what a weight's states and the temporaries of its step take, from the source that it names. Handlers of
transformers create it as they create the real one: parameter groups, hooks, `optim_args`.
"""

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import torch

from hf_memopt.compatibility.rules import PACKAGES
from hf_memopt.estimator.accounting.ledger import HOST, PAGED
from hf_memopt.estimator.patches.replacement import all_replaced, original, replaced
from hf_memopt.estimator.tracing.fake_tensors import PAGED_FROM, QUANTIZED_STEP_BYTES, refuse_paging

_QUANTIZED_FROM = 4096  # elements of a weight whose states bitsandbytes and torchao quantize
_FLOAT = torch.float32


class StandIn(torch.optim.Optimizer):
    """An optimizer that allocates as another one does, and updates nothing.

    Attributes:
        accelerator: the job is meant for an accelerator.
        booking: Ledger.booking.
        over_all: the temporaries of all weights exist at once (foreach).
    """

    accelerator = False
    booking: Callable
    over_all = False

    def __init__(self, params, lr=1e-3, **settings):
        super().__init__(params, {"lr": lr, **settings})

    def states(self, weight, group) -> list[torch.Tensor]:
        return [torch.zeros_like(weight), torch.zeros_like(weight)]

    def temporaries(self, weight, group) -> tuple[float, float]:
        """Bytes that a weight's step takes beside the states, and those of them that are there until the next weight's
        step has replaced them."""
        return 0, 0

    @torch.no_grad()
    def step(self, closure=None):
        temporaries = None
        for group in self.param_groups:
            temporaries = [temporaries] if self.over_all else temporaries
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                local = getattr(weight, "_local_tensor", weight)
                if weight not in self.state:
                    self.state[weight] = dict(enumerate(self.states(local, group)))
                used, kept = self.temporaries(local, group)
                if self.over_all:
                    temporaries.append(_bytes(used))
                else:
                    _bytes(used)
                    temporaries = _bytes(kept)


def _bytes(size: float) -> torch.Tensor:
    return torch.empty(int(size), dtype=torch.uint8)


def _size(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def _quantized(weight: torch.Tensor, bits: int, block: int) -> list[torch.Tensor]:
    """Codes, and a scale in fp32 for every block."""
    codes = weight.new_zeros(weight.numel() * bits // 8, dtype=torch.uint8)
    return [codes, weight.new_zeros(-(-weight.numel() // block), dtype=_FLOAT)]


# ---- bitsandbytes 0.50


class BitsAndBytes(StandIn):
    """bitsandbytes/optim/optimizer.py: init_state(), get_state_buffer(). Its CUDA kernels (csrc/kernels.cu) need no
    temporaries; those on a CPU (backends/cpu/ops.py) compute in fp32 copies.

    Attributes:
        moments: states as large as the weight, of 32 or 8 bits.
        on_cpu: fp32 copies of an fp32 weight on a CPU, with 32-bit and with 8-bit states; others take one more.
    """

    moments = 2
    on_cpu = (3, 5)

    def __init__(self, params, optim_bits=32, is_paged=False, embeddings=(), **settings):
        super().__init__(params, **settings)
        self.bits, self.is_paged, self.embeddings = optim_bits, is_paged, embeddings
        # fill_qmap(): the codes of signed and of unsigned states.
        self.tables = [torch.zeros(256, dtype=_FLOAT) for _ in range(2)] if optim_bits == 8 else []

    def states(self, weight, group):
        paged = self.is_paged and self.accelerator and weight.numel() >= PAGED_FROM
        with self.booking(PAGED) if paged else contextlib.nullcontext():
            if self._quantizes(weight):
                codes = [torch.zeros_like(weight, dtype=torch.uint8) for _ in range(self.moments)]
            else:
                return [torch.zeros_like(weight, dtype=_FLOAT) for _ in range(self.moments)]
        scales = [weight.new_zeros(-(-weight.numel() // 256), dtype=_FLOAT) for _ in codes]
        return [*codes, *scales, *self.tables[: self.moments]]

    def temporaries(self, weight, group):
        copies = self.on_cpu[self._quantizes(weight)] + (weight.dtype is not _FLOAT)
        return 0 if self.accelerator else 4 * copies * weight.numel(), 0

    def _quantizes(self, weight) -> bool:
        return self.bits == 8 and weight.numel() >= _QUANTIZED_FROM and id(weight) not in self.embeddings


class BitsAndBytesLion(BitsAndBytes):
    """bitsandbytes/optim/lion.py."""

    moments = 1


class BitsAndBytesRMSprop(BitsAndBytes):
    """bitsandbytes/optim/rmsprop.py."""

    moments = 1
    on_cpu = (4, 4)


class BitsAndBytesAdEMAMix(BitsAndBytes):
    """bitsandbytes/optim/ademamix.py."""

    moments = 3
    on_cpu = (4, 9.25)

    def states(self, weight, group):
        if not self.accelerator:
            refuse_paging(self, weight)
        return super().states(weight, group)


# ---- torchao 0.18


class TorchAO8Bit(StandIn):
    """torchao/optim/adam.py, _new_buffer(); subclass_8bit.py."""

    bits, block, name = 8, 256, "OptimState8bit"

    def states(self, weight, group):
        states = [torch.zeros((), dtype=_FLOAT)]  # step
        if not self._quantizes(weight, group):
            return states + super().states(weight, group)
        for _ in range(2):
            states += _quantized(weight, self.bits, self._block(group))
            states.append(weight.new_zeros(2**self.bits, dtype=_FLOAT))  # qmap
        return states

    def temporaries(self, weight, group):
        return QUANTIZED_STEP_BYTES[self.name] * weight.numel() * self._quantizes(weight, group), 0

    def _block(self, group) -> int:
        return group.get("block_size", self.block)

    def _quantizes(self, weight, group) -> bool:
        return weight.numel() >= _QUANTIZED_FROM and weight.numel() % self._block(group) == 0


class TorchAO4Bit(TorchAO8Bit):
    """torchao/optim/subclass_4bit.py."""

    bits, block, name = 4, 128, "OptimState4bit"


# ---- GaLore and APOLLO


def _projected(weight: torch.Tensor, group) -> tuple[bool, int, tuple[int, int]]:
    """Whether a weight's gradient is projected from the right, the rank, and the projected gradient's shape."""
    if weight.dim() != 2:
        raise ValueError(f"optim_target_modules: only matrices can be projected, not {tuple(weight.shape)}")
    rows, columns = weight.shape
    sides = {"std": rows >= columns, "reverse_std": rows < columns, "right": True, "left": False}
    if group["proj_type"] not in sides:
        raise ValueError(f"optim_args: proj_type={group['proj_type']} is not counted: use {', '.join(sides)}")
    right, rank = sides[group["proj_type"]], min(group["rank"], rows, columns)
    return right, rank, (rows, rank) if right else (rank, columns)


class GaLoreAdamW(StandIn):
    """galore-torch 1.0, adamw.py and galore_projector.py: project(), get_orthogonal_matrix()."""

    def states(self, weight, group):
        if "rank" not in group:
            return super().states(weight, group)
        right, rank, low = _projected(weight, group)
        return [weight.new_zeros(low), weight.new_zeros(low), self._matrix(weight, right, rank)]

    def _matrix(self, weight, right: bool, rank: int, dtype=None) -> torch.Tensor:
        """The projection: of fp32 gradients a view of all singular vectors, which stay with it."""
        rows, columns = weight.shape
        dtype = dtype or weight.dtype
        kept = min(rows, columns) if dtype is _FLOAT else rank
        return weight.new_zeros((kept, columns) if right else (rows, kept), dtype=dtype)

    def temporaries(self, weight, group):
        if "rank" not in group:
            return 2 * _size(weight), _size(weight)
        return max(self._projection(weight), 2 * _size(weight)), _size(weight)

    def _projection(self, weight) -> int:
        """Bytes of torch.linalg.svd: fp32 copies of the gradient and the singular vectors."""
        rows, columns = weight.shape
        rank = min(rows, columns)
        copies = weight.numel() * (1 if weight.dtype is _FLOAT else 2)
        return 4 * (copies + rank * (rows + columns + 1))


class GaLoreAdafactor(GaLoreAdamW):
    """galore-torch 1.0, adafactor.py: gradients, projections and states in fp32."""

    def states(self, weight, group):
        shape = weight.shape
        matrix = []
        if "rank" in group:
            right, rank, shape = _projected(weight, group)
            matrix = [self._matrix(weight, right, rank, _FLOAT)]
        sizes = [shape] if len(shape) < 2 else [shape[:-1], (*shape[:-2], shape[-1])]
        root_mean_square = ()
        return [weight.new_zeros(size, dtype=_FLOAT) for size in (*sizes, root_mean_square)] + matrix

    def temporaries(self, weight, group):
        copies = 0 if weight.dtype is _FLOAT else 1 if "rank" in group else 2  # the weight, the gradient in fp32
        update, kept = 4 * (copies + 2) * weight.numel(), 4 * (copies + 1) * weight.numel()
        return (max(self._projection(weight), update) if "rank" in group else update), kept


class GaLoreAdamW8bit(GaLoreAdamW):
    """galore-torch 1.0, adamw8bit.py, with bitsandbytes' states of the projected gradient. The weight is saved and
    replaced by the projected gradient, which is projected back in the end."""

    def states(self, weight, group):
        matrix, shape = [], weight.shape
        if "rank" in group:
            right, rank, shape = _projected(weight, group)
            matrix = [self._matrix(weight, right, rank)]
        low = weight.new_empty(shape)
        if low.numel() < _QUANTIZED_FROM:
            return matrix + [torch.zeros_like(low, dtype=_FLOAT) for _ in range(2)]
        return matrix + _quantized(low, 8, 256) + _quantized(low, 8, 256)

    def temporaries(self, weight, group):
        return (max(self._projection(weight), 2 * _size(weight)), 0) if "rank" in group else (0, 0)


class APOLLOAdamW(GaLoreAdamW):
    """apollo-torch 1.0.3, apollo.py and random_projector.py; with proj=svd GaLore's projection (svd_projector.py)."""

    def states(self, weight, group):
        states = super().states(weight, group)
        return [*states, weight.new_zeros(())] if "rank" in group else states

    def _matrix(self, weight, right: bool, rank: int, dtype=None):
        rows, columns = weight.shape
        return weight.new_zeros((rank, columns) if right else (rows, rank))

    def temporaries(self, weight, group):
        if "rank" in group and group["proj"] != "svd":
            # Random projections of 16-bit gradients begin with an fp32 copy, beside the step before.
            return 2 * _size(weight), 0 if weight.dtype is _FLOAT else _size(weight)
        return super().temporaries(weight, group)


# ---- steps in the backward pass


class Lomo(StandIn):
    """lomo-optim 0.1.1, lomo.py: fuse_update(). Every gradient's hook steps with the gradients before it."""

    def __init__(self, model, lr=1e-3, **settings):
        self.model = model
        for weight in model.parameters():
            if weight.requires_grad:
                weight.register_hook(self._update)
        super().__init__(model.parameters(), lr, **settings)

    def _update(self, gradient):
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.requires_grad and weight.grad is not None:
                    self._step(weight)
        return gradient

    def _step(self, weight) -> None:
        gradient = weight.grad.to(_FLOAT)
        weight.grad = None
        copy = weight.data.to(_FLOAT)
        del gradient, copy

    def fused_backward(self, loss, lr) -> None:
        loss.backward()
        self._update(None)


class AdaLomo(Lomo):
    """lomo-optim 0.1.1, adalomo.py: rows and columns of squared gradients, in fp32 and for frozen weights, too."""

    def __init__(self, model, lr=1e-3, **settings):
        super().__init__(model, lr, **settings)
        shapes = [weight.shape for weight in model.parameters()]
        sizes = [shape[:1] if len(shape) == 1 else (shape[0] + shape[1],) for shape in shapes]
        self.exp_avg_sq = dict(enumerate(torch.zeros(size, dtype=_FLOAT) for size in sizes))

    def _step(self, weight) -> None:
        gradient = weight.grad.to(_FLOAT)
        weight.grad = None
        squares = gradient**2
        update = squares + 1e-30
        del squares
        update = torch.empty_like(update)
        copy = weight.data.to(_FLOAT)
        del gradient, update, copy


# ---- others


class GrokAdamW(StandIn):
    """grokadamw 0.1.2, grokadamw.py: _update_group(). Its states are in host memory, and copied for the step."""

    def states(self, weight, group):
        with self.booking(HOST) if self.accelerator else contextlib.nullcontext():
            kept = [torch.zeros_like(weight) for _ in range(3)]
        if not self.accelerator:
            return kept
        self.on_host = [*getattr(self, "on_host", ()), *kept]
        return []

    def temporaries(self, weight, group):
        return (5 if self.accelerator else 2) * _size(weight), (4 if self.accelerator else 1) * _size(weight)


class AdamWScheduleFree(StandIn):
    """schedulefree 1.4.1, adamw_schedulefree.py, radam_schedulefree.py: z, exp_avg_sq; foreach's denominators."""

    over_all = True

    def temporaries(self, weight, group):
        return _size(weight), 0


class SGDScheduleFree(StandIn):
    """schedulefree 1.4.1, sgd_schedulefree.py: z."""

    def states(self, weight, group):
        return [torch.zeros_like(weight)]


class StableAdamW(StandIn):
    """torch-optimi 0.3.3, stableadamw.py: _init_state(); Kahan's compensation beside weights of 16 bits. Its Triton
    kernels need no temporaries; on a CPU it steps weight by weight."""

    def states(self, weight, group):
        kahan = weight.element_size() == 2 and group.get("kahan_sum") is not False
        scalars = [weight.new_zeros(())]
        return [torch.zeros_like(weight) for _ in range(2 + kahan)] + scalars

    def temporaries(self, weight, group):
        return 0 if self.accelerator else 2 * _size(weight), 0


class AnyPrecisionAdamW(StandIn):
    """torchdistx, optimizers/anyprecision_optimizer.py: moments and compensation in dtypes of their own."""

    def states(self, weight, group):
        dtypes = [group["momentum_dtype"], group["variance_dtype"]]
        dtypes += [group["compensation_buffer_dtype"]] * group["use_kahan_summation"]
        return [torch.zeros_like(weight, dtype=dtype) for dtype in dtypes] + [torch.zeros(())]

    def temporaries(self, weight, group):
        size = weight.numel() * group["variance_dtype"].itemsize
        return 2 * size, size + _size(weight) * group["use_kahan_summation"]


# Module that transformers imports -> its classes.
_CLASSES: dict[str, dict[str, type[StandIn]]] = {
    "bitsandbytes.optim": {
        "AdamW": BitsAndBytes,
        "Lion": BitsAndBytesLion,
        "RMSprop": BitsAndBytesRMSprop,
        "AdEMAMix": BitsAndBytesAdEMAMix,
    },
    "torchao.optim": {"AdamW8bit": TorchAO8Bit, "AdamW4bit": TorchAO4Bit},
    "galore_torch": {
        "GaLoreAdamW": GaLoreAdamW,
        "GaLoreAdamW8bit": GaLoreAdamW8bit,
        "GaLoreAdafactor": GaLoreAdafactor,
    },
    "apollo_torch": {"APOLLOAdamW": APOLLOAdamW},
    "lomo_optim": {"Lomo": Lomo, "AdaLomo": AdaLomo},
    "grokadamw": {"GrokAdamW": GrokAdamW},
    "schedulefree": {
        "AdamWScheduleFree": AdamWScheduleFree,
        "RAdamScheduleFree": AdamWScheduleFree,
        "SGDScheduleFree": SGDScheduleFree,
    },
    "optimi": {"StableAdamW": StableAdamW},
    "torchdistx.optimizers": {"AnyPrecisionAdamW": AnyPrecisionAdamW},
}
# Package -> transformers' function that says whether it is there.
AVAILABLE = {
    "bitsandbytes": "is_bitsandbytes_available",
    "torchao": "is_torchao_available",
    "galore_torch": "is_galore_torch_available",
    "apollo_torch": "is_apollo_torch_available",
    "lomo_optim": "is_lomo_available",
    "grokadamw": "is_grokadamw_available",
    "schedulefree": "is_schedulefree_available",
    "optimi": "is_torch_optimi_available",
}
# They call CUDA when they are made or step.
_ON_CUDA_ONLY = {"adalomo", "galore_adamw_8bit", "galore_adamw_8bit_layerwise", "adamw_anyprecision"}
_OTHERWISE_ON_ACCELERATORS = {"grokadamw", "stable_adamw"}  # which a trace on the CPU cannot see
_HANDLERS = "transformers.trainer_optimizer:_OPTIMIZER_HANDLERS"


def by_formula(optim: str, accelerator: bool) -> bool:
    """Whether a job's optimizer is counted by formula instead of being run."""
    package = PACKAGES.get(optim)
    if package is None:
        return False
    if optim in _ON_CUDA_ONLY or (accelerator and optim in _OTHERWISE_ON_ACCELERATORS):
        return True
    return importlib.util.find_spec(package) is None


@contextlib.contextmanager
def stand_ins(optim: str, accelerator: bool, booking: Callable) -> Iterator[None]:
    """transformers creates stand-ins in here, where an optimizer is counted by formula.

    Args:
        booking: Ledger.booking.
    """
    if not by_formula(optim, accelerator):
        yield
        return
    import transformers.trainer

    package = PACKAGES[optim]
    settings = {"accelerator": accelerator, "booking": staticmethod(booking)}
    modules = _make_modules(package, settings)
    handlers = original(_HANDLERS)

    def create(context):
        with _installed(package, modules):
            kind, kwargs = handlers[optim](context)
        if kwargs.get("optim_bits") == 8:  # the Trainer registers embeddings with bitsandbytes for 32-bit states
            embeddings = [part for part in context.model.modules() if isinstance(part, torch.nn.Embedding)]
            kwargs["embeddings"] = {id(part.weight) for part in embeddings}
        return kind, kwargs

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(_HANDLERS, {**handlers, optim: create}, transformers.trainer))
        if package == "lomo_optim":  # accelerate asks in every backward pass and step whether the optimizer is LOMO's
            stack.enter_context(_installed(package, modules))
            owners = ("accelerate.accelerator", "accelerate.optimizer")
            names = dict.fromkeys((f"{owner}:is_lomo_available" for owner in owners), lambda: True)
            stack.enter_context(all_replaced(names))
        yield


def _make_modules(package: str, settings: dict) -> dict[str, ModuleType]:
    """The package and its module that transformers imports, with this job's classes."""
    modules = {package: ModuleType(package)}
    for path, classes in _CLASSES.items():
        if path.partition(".")[0] == package:
            module = modules.setdefault(path, ModuleType(path))
            for name, kind in classes.items():
                setattr(module, name, type(name, (kind,), dict(settings)))
    return modules


@contextlib.contextmanager
def _installed(package: str, modules: dict[str, ModuleType]) -> Iterator[None]:
    """transformers finds and imports the package."""
    version = importlib.metadata.version
    found = AVAILABLE.get(package)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        if package == "torchao":  # its handler asks for the version, which decides where the classes are
            known = {"torchao": "0.18.0"}
            named = mock.patch.object(importlib.metadata, "version", lambda name: known.get(name) or version(name))
            stack.enter_context(named)
        if found:
            stack.enter_context(replaced(f"transformers.trainer_optimizer:{found}", lambda *_: True))
        yield
