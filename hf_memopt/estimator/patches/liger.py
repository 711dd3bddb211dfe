"""Liger's kernels in a trace, without the package: what they save and allocate instead of the model's own operators.

From the source of liger-kernel 0.8.5 (`ops/` and `transformers/monkey_patch.py`); not measured on a GPU.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from hf_memopt.errors import InputError
from hf_memopt.estimator.private_names import Part
from hf_memopt.hardware import Hardware
from hf_memopt.levers.chunked_loss import LazyLogits
from hf_memopt.levers.language_model import IGNORED, inner_model, shifted_labels

_LAYER = ("norm", "input_layernorm", "post_attention_layernorm")
_HEADS = ("q_norm", "k_norm")
_FUSED, _PLAIN = "fused_linear_cross_entropy", "cross_entropy"
_MULTIPROCESSORS = 132  # of an H100 (NVIDIA's data sheet); a norm's backward keeps one row in fp32 for each


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """The parts of a model type that apply_liger_kernel_to_… replaces by default.

    Attributes:
        norms: names of the RMSNorms that are replaced.
        own: of these the ones whose backward gets a tensor for the gradient (in_place=False), or `True` for all.
        gate: the option's name, where the decoder's MLPs are replaced.
        joined: gate_proj and up_proj are one weight.
        rope: the rotation is replaced. Qwen2-VL's no longer has the name under which Liger looks for it.
        loss: the loss that is replaced.
        missing: options that Liger refuses.
        experts: Liger replaces a layer's experts, too, which are traced as they are.
    """

    norms: tuple[str, ...] = _LAYER
    own: tuple[str, ...] | bool = ()
    gate: str | None = "swiglu"
    joined: bool = False
    rope: bool = True
    loss: str = _FUSED
    missing: tuple[str, ...] = ()
    experts: bool = False


_AROUND = ("norm", "post_attention_layernorm", "post_feedforward_layernorm")
_GEMMA2 = (*_LAYER, "pre_feedforward_layernorm", "post_feedforward_layernorm")
# Model type -> what Liger replaces (MODEL_TYPE_TO_APPLY_LIGER_FN).
_MODELED = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "smollm3", "hunyuan_v1_dense"), _Kernels()),
    "granite": _Kernels(loss=_PLAIN, missing=(_FUSED,)),
    "phi3": _Kernels(joined=True),
    "glm4": _Kernels(
        norms=(*_LAYER, "post_self_attn_layernorm", "post_mlp_layernorm"),
        own=True,
        joined=True,
        rope=False,
        missing=("rope",),
    ),
    "qwen3": _Kernels(norms=_LAYER + _HEADS),
    "gemma": _Kernels(gate="geglu"),
    "gemma2": _Kernels(norms=_GEMMA2, own=True, gate="geglu"),
    "gemma3_text": _Kernels(norms=_GEMMA2 + _HEADS, own=True, gate="geglu"),
    **dict.fromkeys(("olmo2", "olmo3"), _Kernels(norms=_AROUND, own=_AROUND[1:])),
    "exaone4": _Kernels(norms=_AROUND + _HEADS, own=True),
    "gpt_oss": _Kernels(gate=None),
    "mixtral": _Kernels(gate=None, experts=True),
    "qwen3_moe": _Kernels(norms=_LAYER + _HEADS, gate=None, experts=True),
    "hunyuan_v1_moe": _Kernels(gate=None, experts=True),
    "qwen2_vl": _Kernels(rope=False),
    "qwen2_5_vl": _Kernels(norms=(*_LAYER, "norm1", "norm2"), rope=False),
    "qwen3_vl": _Kernels(norms=_LAYER + _HEADS, gate=None),
}
# Model types that Liger knows, and this file does not.
_UNMODELED = {
    *(
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "gemma3",
        "gemma4",
        "gemma4_text",
        "glm4v",
        "glm4v_moe",
        "internvl",
    ),
    *("llama4", "llama4_text", "llava", "mllama", "mllama_text_model", "muse_glimmer", "nemotron", "pixtral"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "paligemma", "falcon_h1", "smolvlm"),
}


def check_liger(fields: dict, device: Hardware) -> None:
    """Refuse Liger where its kernels cannot run.

    Raises:
        InputError: the device has no Triton.
    """
    if fields.get("use_liger_kernel") and device.backend not in ("cuda", "rocm", "xpu"):
        raise InputError(f"use_liger_kernel=true needs Triton, which does not run on {device.label}: leave it out")


def describe_liger(model_type: str) -> str:
    """The parts of Liger that an estimate of a model counts."""
    if model_type in _UNMODELED:
        return f"traced without Liger's kernels, which usually need less: those for {model_type} are not modelled"
    if model_type not in _MODELED:
        return f"Liger has no kernels for {model_type}: use_liger_kernel changes nothing"
    but = ", except for the experts, which are traced without" if _MODELED[model_type].experts else ""
    return f"Liger's kernels are counted as the source of 0.8.5 says; not measured on a GPU{but}"


_LIGER = Part.LIGER.replaces(
    "transformers.trainer:apply_liger_kernel(model, kernel_config)",
    why="Liger's kernels are Triton, which has no fake tensors",
)


@contextmanager
def counted_liger(capability: float = 0.0) -> Iterator[None]:
    """Make the Trainer apply stand-ins that allocate what Liger's kernels allocate.

    Args:
        capability: compute capability of the device; 0.0 for others than NVIDIA's.
    """

    def apply(model, kernel_config) -> None:
        inner = inner_model(model)
        kernels = _MODELED.get(inner.config.model_type)
        if kernels is not None:
            _apply(inner, kernels, kernel_config or {}, capability, stack)

    with _LIGER.replaced(apply_liger_kernel=apply), ExitStack() as stack:
        yield


_ROTATION = Part.LIGER.replaces(
    "transformers.models.llama.modeling_llama:apply_rotary_pos_emb(q, k, cos, sin)",
    why="every model's module has its own copy, in whose place Liger puts one that rotates in place",
)


def _apply(inner, kernels: _Kernels, chosen: dict, capability: float, stack: ExitStack) -> None:
    losses = {name: chosen.get(name, name == kernels.loss) for name in (_FUSED, _PLAIN)}
    if all(losses.values()):
        raise InputError(f"liger_kernel_config: {_FUSED} and {_PLAIN} exclude each other: set one of them to false")
    for name in kernels.missing:
        if chosen.get(name):
            raise InputError(f"liger_kernel_config: Liger has no {name} for {inner.config.model_type}: leave it out")
    if chosen.get("rms_norm", True):
        for path, module in inner.named_modules():
            name = path.rpartition(".")[2]
            if name in kernels.norms and type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(_normalize, module, kernels.own is True or name in kernels.own)
    if kernels.gate and chosen.get(kernels.gate, True):
        for path, module in inner.get_decoder().named_modules():
            if path.rpartition(".")[2] == "mlp" and hasattr(module, "gate_up_proj" if kernels.joined else "gate_proj"):
                module.forward = functools.partial(_gate_joined if kernels.joined else _gate, module)
    if kernels.rope and chosen.get("rope", True):
        names = (kind.__module__ for kind in type(inner).__mro__)  # its class may be derived from transformers'
        own = next(sys.modules[name] for name in names if name.startswith("transformers.models."))
        stack.enter_context(_ROTATION.replaced([own], apply_rotary_pos_emb=_rotate))
    if losses[_FUSED]:
        _fuse_loss(inner, capability)
    elif losses[_PLAIN]:
        inner.loss_function = _plain_loss


def _normalize(module, own: bool, hidden: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(hidden.contiguous(), module.weight, own)


def _gate(mlp, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(_GatedUnit.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def _gate_joined(mlp, x: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
    return mlp.down_proj(_GatedUnit.apply(gate, up))


def _rotate(q, k, cos, sin, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    return _Rope.apply(q, k, cos, sin)


class _RMSNorm(torch.autograd.Function):
    """LigerRMSNormFunction (ops/rms_norm.py): saves its input and a number in fp32 for each row."""

    @staticmethod
    def forward(ctx, hidden, weight, own: bool):
        scale = torch.empty(hidden.shape[:-1], dtype=torch.float32, device=hidden.device)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.own = own
        return hidden.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        _, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows = torch.empty(_MULTIPROCESSORS, len(weight), dtype=torch.float32) if ctx.needs_input_grad[1] else None
        out = torch.zeros_like(gradient) if ctx.own else gradient
        return out, None if rows is None else rows.sum(dim=0).to(weight.dtype), None


class _GatedUnit(torch.autograd.Function):
    """LigerSiLUMulFunction and LigerGELUMulFunction (ops/swiglu.py, geglu.py): gradients take the inputs' place."""

    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx, gradient):
        gradient.contiguous()
        return tuple(tensor.detach() for tensor in ctx.saved_tensors)


class _Rope(torch.autograd.Function):
    """LigerRopeFunction (ops/rope.py): rotates queries, keys and their gradients in place."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in (q, k))

    @staticmethod
    def backward(ctx, *gradients):
        return *(part.transpose(1, 2).contiguous().transpose(1, 2) for part in gradients), None, None


class _CrossEntropy(torch.autograd.Function):
    """LigerCrossEntropyFunction (ops/cross_entropy.py): the gradient takes the logits' place."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.detach())
        return torch.zeros(len(logits), dtype=logits.dtype, device=logits.device).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0]


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """LigerFusedLinearCrossEntropyFunction (ops/fused_linear_cross_entropy.py): forward computes the gradients.

    As many rows at a time as make the logits about as large as the hidden states.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, capability: float):
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        buffer = _logits_buffer(hidden, weight, bias)
        for part, gradient in zip(
            *(tensor.split(_rows(hidden, weight)) for tensor in (hidden, grad_hidden)), strict=True
        ):
            if buffer is None:
                logits = part @ weight.t()
                gradient.copy_(logits @ weight)
            else:
                logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
                torch.mm(logits, weight, out=gradient)
            if grad_weight is not None:
                _add_matmul(grad_weight, logits, part, capability)
            del logits
        del buffer
        ctx.save_for_backward(grad_hidden.detach(), None if grad_weight is None else grad_weight.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx, gradient):
        return *ctx.saved_tensors, None, None


def _rows(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    """chunk_size: the next power of two of rows × hidden size ÷ vocabulary size."""
    times = -(-len(weight) // weight.shape[1])
    rows = -(-len(hidden) // times)
    return min(1 << (rows - 1).bit_length(), len(hidden))


def _logits_buffer(hidden: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor | None:
    """The buffer for a chunk's logits, where matmuls need no casts (_can_use_mm_out)."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if not hidden.dtype == weight.dtype == dtype or bias is not None:
        return None
    return torch.empty(_rows(hidden, weight), len(weight), dtype=hidden.dtype, device=hidden.device)


def _add_matmul(total: torch.Tensor, logits: torch.Tensor, part: torch.Tensor, capability: float) -> None:
    """Accumulate a chunk's gradient of the head, through one more matrix before Ampere and in fp32."""
    if 0 < capability < 8 or logits.dtype is torch.float32:
        total += torch.mm(logits.t(), part).float()
        return
    part = part.to(logits.dtype)
    if total.dtype == part.dtype:  # CUDA's operator that accumulates in fp32, which the CPU lacks, allocates nothing
        total.addmm_(logits.t(), part)


def _fuse_loss(inner, capability: float) -> None:
    """Compute the loss without logits, as Liger's lce_forward: in training, and where the Trainer wants no logits."""
    head, forward, plain = inner.get_output_embeddings(), inner.forward, inner.loss_function
    trained = getattr(head, "modules_to_save", None)  # of an adapter
    head = next(iter(trained.values())) if trained else head
    if type(head) is not torch.nn.Linear:
        return
    skip = False

    @functools.wraps(forward)
    def run(*args, labels=None, skip_logits=None, **kwargs):
        nonlocal skip
        skip = inner.training if skip_logits is None else skip_logits
        skip = bool(skip) and (labels is not None or kwargs.get("shift_labels") is not None)
        return forward(*args, labels=labels, **kwargs)

    def promise(hidden, compute=None):
        if compute is not None:  # engines gather a module's weight only while the module is called
            return compute(hidden, head.weight, head.bias)
        return LazyLogits(hidden, head) if skip else torch.nn.functional.linear(hidden, head.weight, head.bias)

    def fused(logits, labels, vocab_size=None, **kwargs):
        if not isinstance(logits, LazyLogits):
            return plain(logits, labels, vocab_size, **kwargs)
        if hasattr(head.weight, "placements"):
            raise InputError(
                f"use_liger_kernel=true: the fused loss takes no head that is sharded by tensor parallelism: set "
                f"liger_kernel_config={{'{_FUSED}': false}}"
            )
        _shifted(labels, kwargs.get("shift_labels"))
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        return logits.head(hidden, compute=lambda *tensors: _FusedLinearCrossEntropy.apply(*tensors, capability))

    inner.forward, inner.loss_function, head.forward = run, fused, promise


def _plain_loss(logits, labels, vocab_size=None, shift_labels=None, **kwargs) -> torch.Tensor:
    """transformers' ForCausalLMLoss with Liger's cross entropy."""
    logits = logits.float()
    _shifted(labels, shift_labels)
    return _CrossEntropy.apply(logits.view(-1, logits.shape[-1]))


def _shifted(labels, shift_labels) -> torch.Tensor:
    return shifted_labels(labels, shift_labels, IGNORED).reshape(-1) != IGNORED
