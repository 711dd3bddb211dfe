"""Kernels of other packages and devices, in whose place stand functions that allocate the same: bytes of each, frozen
as their sources say (the modules' docstrings)."""

import itertools
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import frozen
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger
from hf_memopt.estimator.accounting.ledger import Ledger
from hf_memopt.estimator.patches import flash_attention, flex_attention, liger, math_attention
from hf_memopt.estimator.tracing.fake_tensors import fake_world
from hf_memopt.hardware.catalog import catalog

HALF, WIDE = torch.bfloat16, torch.float32


def weights(*shape: int, dtype=HALF, trained=True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=trained)


def passes_of(ledger: Ledger, make) -> list:
    """Shape and type of each output, bytes after forward, and of both passes' peaks."""
    ledger.begin("start", "other")
    inputs, run = make()
    ledger.begin("forward", "activations")
    before, outputs = ledger._total, run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    kept = ledger._total - before
    ledger.begin("backward", "gradients")
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.empty_like(tensor) for tensor in trained])
    peaks = [ledger.peaks[phase].total - before for phase in ("forward", "backward")]
    shapes = [f"{list(tensor.shape)} {list(tensor.stride())} {tensor.dtype}" for tensor in outputs]
    return [shapes, kept, *peaks, ledger._total - before]


def normed(own, trained, dtype=HALF):
    def make():
        module = SimpleNamespace(weight=weights(64, trained=trained))
        return (weights(4, 8, 64, dtype=dtype),), lambda hidden: liger._normalize(module, own, hidden * 1)

    return make


def gated():
    return (weights(4, 8, 64), weights(4, 64, 8)), lambda a, b: liger._GatedUnit.apply(a * 1, b.transpose(1, 2) * 1)


def rotated():
    turns = [weights(1, 8, 16, trained=False) for _ in range(2)]
    return (weights(2, 4, 8, 16), weights(2, 2, 8, 16)), lambda q, k: liger._rotate(q, k, *turns)


def fused(dtype, head, trained, capability, bias=None, rows=96):
    def make():
        tensors = weights(rows, 32, dtype=dtype), weights(400, 32, dtype=head, trained=trained), bias
        return tensors, lambda *tensors: liger._FusedLinearCrossEntropy.apply(*tensors, capability)

    return make


def plain():
    labels = torch.zeros(2, 9, dtype=torch.long)
    return (weights(2, 9, 40),), lambda logits: liger._plain_loss(logits * 1, labels)


def flash(name, size, causal=False, ragged=False, strided=False, groups=1, capability=9.0, dtype=HALF):
    def make():
        attend, attend_ragged = flash_attention._attend(name, capability)
        shape = (2 * 96, 4, size) if ragged else (2, 96, 4, size)
        keys = (*shape[:-2], 4 // groups, size)
        query = weights(*shape[:-1], 2 * size, dtype=dtype)[..., ::2] if strided else weights(*shape, dtype=dtype)
        tensors = query, weights(*keys, dtype=dtype), weights(*keys, dtype=dtype)
        if not ragged:
            return tensors, lambda *tensors: attend(*tensors, causal=causal)
        bounds = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        return tensors, lambda *tensors: attend_ragged(*tensors, *bounds, 96, 96, causal=causal)

    return make


def sdpa(capability, dtype=WIDE, groups=1, gqa=True, **settings):
    def make():
        tensors = weights(2, 8, 16, 32, dtype=dtype), *(weights(2, 8 // groups, 16, 32, dtype=dtype) for _ in "kv")

        def run(*tensors):
            with math_attention.counted_math_attention(capability):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=gqa, **settings)

        return tensors, run

    return make


def flexible(heads, groups):
    def make():
        tensors = weights(2, heads, 256, 32), *(weights(2, heads // groups, 256, 32) for _ in "kv")
        mask = flex_attention._mask(batch_size=2, q_length=256, kv_length=257)
        return tensors, lambda *tensors: flex_attention._attend(None, *tensors, mask)[0]

    return make


MASKS = {"bool": torch.bool, "wide": WIDE}
KERNELS = {
    **{f"norm {own} {trained}": normed(own, trained) for own in (True, False) for trained in (True, False)},
    **{"norm wide": normed(True, True, WIDE), "gate": gated, "rope": rotated, "plain loss": plain},
    **{
        f"fused {dtype} {head} {trained} {capability}": fused(dtype, head, trained, capability)
        for dtype, head in ((HALF, HALF), (WIDE, WIDE), (WIDE, HALF))
        for trained in (True, False)
        for capability in (0.0, 7.5, 8.0)
        if dtype == head or capability == 8.0
    },
    **{
        "fused, a bias": lambda: fused(HALF, HALF, True, 8.0, weights(400))(),
        "fused, a row": fused(HALF, HALF, True, 8.0, rows=1),
    },
    **{
        f"{name} {size} {causal}": flash(name, size, causal)
        for name in ("flash_attention_2", "flash_attention_3")
        for size, causal in ((64, True), (64, False), (60, True), (128, False))
    },
    **{
        "flash ragged": flash("flash_attention_2", 64, True, ragged=True),
        "flash strided": flash("flash_attention_2", 64, strided=True),
    },
    **{
        "flash groups": flash("flash_attention_2", 64, groups=4),
        "flash 4": flash("flash_attention_4", 64, capability=10.0),
    },
    **{
        f"sdpa {capability} {dtype} {groups}": sdpa(capability, dtype, groups)
        for capability, dtype, groups in itertools.product((None, 0.0, 7.5, 8.0), (HALF, WIDE), (1, 4))
    },
    **{
        f"sdpa {settings}": sdpa(7.5, HALF, 4, **settings)
        for settings in ({"is_causal": True}, {"dropout_p": 0.5}, {"scale": 0.5})
    },
    **{
        f"sdpa mask {name}": lambda kind=kind: sdpa(
            7.5, HALF, 4, attn_mask=weights(16, 16, dtype=kind, trained=False)
        )()
        for name, kind in MASKS.items()
    },
    **{f"flex {heads} {groups}": flexible(heads, groups) for heads, groups in ((8, 4), (6, 3), (6, 1))},
}


def test_kernels_that_are_stood_in_for():
    found = {}
    with fake_world("cuda"):
        for name, make in KERNELS.items():
            with FakeLedger(accelerator=True) as ledger:
                found[name] = passes_of(ledger, make)
        with FakeLedger(accelerator=True) as ledger, torch.autocast("cpu", HALF):
            found["autocast"] = [
                passes_of(ledger, make) for make in (sdpa(7.5, WIDE, 4), fused(WIDE, WIDE, True, 8.0))
            ]
    rows = itertools.product((1, 7, 8, 1000, 4096), (1000, 32_000), (64, 4096))
    found["rows"] = [
        liger._rows(torch.empty(n, h, device="meta"), torch.empty(v, h, device="meta")) for n, v, h in rows
    ]
    found["blocks"] = [
        [list(tensor.shape) for tensor in flex_attention._mask(batch_size=3, q_length=q, kv_length=k).tensors]
        for q, k in ((128, 128), (129, 256), (1, 257))
    ]
    found["liger"] = {name: str(kernels) for name, kernels in liger._MODELED.items()}
    kinds = sorted({*liger._MODELED, *liger._UNMODELED, "gpt2"})
    found["said"] = {kind: liger.describe_liger(kind).partition("; not")[0] for kind in kinds}
    devices = {name: catalog()[name] for name in ("t4", "mi300x", "arc_b580", "apple_m2_16gb", "cpu")}
    found["flex on"] = [name for name, device in devices.items() if flex_attention.runs_flex(device)]
    for name, device in devices.items():
        liger.check_liger({"use_liger_kernel": False}, device)
        if name in ("apple_m2_16gb", "cpu"):
            with pytest.raises(InputError, match="needs Triton"):
                liger.check_liger({"use_liger_kernel": True}, device)
        else:
            liger.check_liger({"use_liger_kernel": True}, device)
    frozen.check("stand_in_kernels", found)


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}
CHOICES = (
    *({}, {"rms_norm": False}, {"swiglu": False}, {"geglu": False}, {"rope": False}, {"rope": True}),
    *({"fused_linear_cross_entropy": False}, {"fused_linear_cross_entropy": True}, {"cross_entropy": True}),
    {"fused_linear_cross_entropy": False, "cross_entropy": True},
)


def test_what_liger_replaces_of_a_model():
    """The modules whose forward is another, and whether the rotation and the loss are."""
    found = {}
    for kind, chosen in itertools.product(("llama", "phi3", "gemma2", "glm4", "granite", "mixtral"), CHOICES):
        with torch.device("meta"):
            config = AutoConfig.for_model(kind, **TINY, num_key_value_heads=4, head_dim=8, pad_token_id=0)
            model = AutoModelForCausalLM.from_config(config)
        module = sys.modules[type(model).__module__]
        before = module.apply_rotary_pos_emb, model.loss_function
        with ExitStack() as stack:
            try:
                liger._apply(model, liger._MODELED[kind], chosen, 8.0, stack)
            except InputError as error:
                found[f"{kind} {chosen}"] = str(error)
                continue
            names = [name for name, part in model.named_modules() if "forward" in vars(part)]
            rotates = module.apply_rotary_pos_emb is liger._rotate
            loss = model.loss_function.__name__ if model.loss_function is not before[1] else "own"
            found[f"{kind} {chosen}"] = [" ".join(names), rotates, loss]
        assert module.apply_rotary_pos_emb is before[0]
    frozen.check("liger", found)


def test_flex_attention_has_no_dropout():
    with pytest.raises(InputError, match="has no dropout"):
        flex_attention._attend(None, None, None, None, None, dropout=0.1)
