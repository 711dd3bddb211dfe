"""What torch runs on CUDA where it runs something else on a CPU, as traces of an accelerator's jobs have it.

There is no GPU here: the expected sizes are those of the kernels in torch's source.
"""

import pytest
import torch
from test_plan import config

from hf_memopt import estimate
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger
from hf_memopt.estimator.accounting.work import Work
from hf_memopt.estimator.patches.accelerator_operators import accelerator_operators
from hf_memopt.estimator.tracing.fake_tensors import fake_world

F = torch.nn.functional
ELEMENTS = 4096


def dropped(backend: str, **settings):
    """Bytes that dropout of 4,096 bf16 elements leaves for backward beside its output, and what it and its backward
    ran: bytes of each kernel."""
    with fake_world(backend), FakeLedger(accelerator=backend != "cpu") as ledger:
        ledger.work, ledger.step = Work(), 1  # kernels count from the first step
        given = torch.empty(ELEMENTS, dtype=torch.bfloat16, requires_grad=True)
        before = ledger._total
        ledger.phase = "forward"
        out = F.dropout(given * 1, 0.1, **settings)
        kept = ledger._total - before - 2 * ELEMENTS
        ledger.phase = "backward"
        out.backward(torch.empty_like(out))
        return kept, sorted(kernel.bytes for kernel, count in ledger.work.kernels.items() for _ in range(count))


def test_dropout_is_one_kernel_that_keeps_a_byte_an_element(subtests):
    for backend in ["cuda", "rocm", "xpu"]:
        with subtests.test(f"{backend}"):
            kept, kernels = dropped(backend)
            assert kept == ELEMENTS  # of the mask; the product before it is freed
            # The product and its backward; dropout and its backward have 2 bytes an element, and one of mask.
            assert kernels == [4 * ELEMENTS, 4 * ELEMENTS, 5 * ELEMENTS, 5 * ELEMENTS]


@pytest.mark.parametrize("settings", [{"inplace": True}, {"p": 0.0}, {"p": 1.0}, {"training": False}])
def test_other_dropout_is_that_of_the_cpu(settings):
    settings = {"p": 0.1, **settings}
    runs = []
    for backend in ("cuda", "cpu"):
        with fake_world(backend), FakeLedger(accelerator=True) as ledger:
            given = torch.empty(ELEMENTS, requires_grad=True) * 1
            F.dropout(given, **settings)
            runs.append(len(ledger.events))
    assert runs[0] == runs[1]


def test_metal_has_no_such_kernel():
    kept, _ = dropped("mps")
    assert kept == 2 * ELEMENTS  # noise in the input's type


def normalised(backend: str, weights: torch.dtype = torch.bfloat16):
    """Bytes that an RMS norm of 4 bf16 rows leaves for backward beside input and output, and how many kernels it and
    its backward ran, with the product before it."""
    with fake_world(backend), FakeLedger(accelerator=True) as ledger:
        ledger.work, ledger.step = Work(), 1
        given = torch.empty(4, ELEMENTS // 4, dtype=torch.bfloat16, requires_grad=True)
        norm = torch.nn.RMSNorm(ELEMENTS // 4, dtype=weights)
        before = ledger._total
        ledger.phase = "forward"
        out = norm(given * 1)
        kept = ledger._total - before - 2 * 2 * ELEMENTS
        ledger.phase = "backward"
        out.backward(torch.empty_like(out))
        assert norm.weight.grad.dtype is weights and given.grad.shape == given.shape
        return kept, sum(ledger.work.kernels.values())


def test_an_rms_norm_is_one_kernel_that_keeps_its_input(subtests):
    for backend in ["cuda", "rocm"]:
        with subtests.test(f"{backend}"):
            assert normalised(backend) == (512, 4)  # a scale of each row, in a block of the allocator


def test_other_rms_norms_are_those_of_the_cpu(subtests):
    for backend, weights in [("mps", torch.bfloat16), ("cuda", torch.float32)]:
        with subtests.test(f"{backend} {weights}"):
            kept, kernels = normalised(backend, weights)
            assert kept > 4 * ELEMENTS and kernels > 10


def test_cudas_autocast_normalises_in_fp32_and_metals_does_not():
    wide = {"cuda": True, "rocm": True, "xpu": True, "mps": False, "cpu": False}
    for backend in wide:
        with fake_world(backend), torch.autocast("cpu", torch.bfloat16):
            values = torch.empty(2, 8, dtype=torch.bfloat16)
            for norm in (F.rms_norm, torch.rms_norm):
                assert (norm(values, (8,)).dtype is torch.float32) == wide[backend], backend


def test_libraries_that_ask_for_cudas_autocast_hear_of_it():
    answers = {}
    for backend in ("cuda", "rocm", "mps", "cpu"):
        with fake_world(backend), torch.autocast("cpu", torch.bfloat16):
            answers[backend] = torch.is_autocast_enabled()
        with fake_world(backend):
            assert not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu")
    assert answers == {"cuda": True, "rocm": True, "mps": False, "cpu": False}


@pytest.mark.slow
def test_loras_dropout_keeps_a_mask_of_a_byte():
    """With dropout or without, lora_A keeps an input of its own: autocast's 16 bits of peft's fp32."""
    from peft import LoraConfig

    def activations(dropout: float) -> int:
        adapters = LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=8, lora_dropout=dropout)
        fields = {"bf16": True, "activation_checkpointing": False, "per_device_train_batch_size": 4}
        found = estimate(config(4), fields, 128, "rtx_4090", peft_config=adapters, dtype="bfloat16")
        return found.breakdown["activations"]

    masks = 3 * 4 * 128 * config().hidden_size  # of a layer; in backward the last layer's may be gone
    assert activations(0.1) - activations(0.0) in (3 * masks, 4 * masks)


@pytest.mark.slow
def test_qlora_under_autocast_keeps_its_input_in_16_bits():
    """peft converts the input of a 4-bit layer to its adapter's fp32 only where CUDA's autocast is off."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    pytest.importorskip("bitsandbytes")
    found = {}
    for hardware in ("rtx_4090", "cpu"):
        found[hardware] = estimate(
            config(4),
            {"bf16": True, "activation_checkpointing": False, "per_device_train_batch_size": 4},
            128,
            hardware,
            peft_config=LoraConfig(target_modules="all-linear", r=8, lora_dropout=0.0),
            dtype="bfloat16",
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
            kbit_preparation=False,
        ).breakdown["activations"]
    assert found["rtx_4090"] < found["cpu"]


x, classes = torch.rand(4, 4, dtype=torch.bfloat16), torch.arange(4)
ARGUMENTS = {
    **dict.fromkeys(("pow", "__pow__", "__rpow__"), (x, 2)),
    **dict.fromkeys(("logsumexp", "cumprod", "cumsum", "softmax", "log_softmax"), (x, 0)),
    **dict.fromkeys(("nll_loss", "multi_margin_loss", "cross_entropy"), (x, classes)),
    **dict.fromkeys(("dist", "cdist", "smooth_l1_loss", "huber_loss", "mse_loss", "soft_margin_loss"), (x, x)),
    **dict.fromkeys(("l1_loss", "cosine_similarity", "hinge_embedding_loss", "kl_div"), (x, x)),
    **dict.fromkeys(("poisson_nll_loss", "binary_cross_entropy_with_logits"), (x, x)),
    **dict.fromkeys(("margin_ranking_loss", "triplet_margin_loss"), (x, x, x)),
    "cosine_embedding_loss": (x, x, torch.ones(4)),
    "multilabel_margin_loss": (x, classes.repeat(4, 1)),
    "renorm": (x, 2, 0, 1.0),
    "layer_norm": (x, (4,)),
    "group_norm": (x, 2),
}
FP32 = {
    torch: (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
        *("sinh", "tan", "pow", "dist", "renorm", "logsumexp", "prod", "cumprod", "cumsum", "sum", "norm", "cdist"),
        *("softmax", "log_softmax"),
    ),
    F: (
        *("softplus", "nll_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "multilabel_margin_loss"),
        *("soft_margin_loss", "multi_margin_loss", "cross_entropy", "layer_norm", "group_norm", "cosine_similarity"),
        *("poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss", "kl_div", "margin_ranking_loss"),
        *("triplet_margin_loss", "binary_cross_entropy_with_logits", "softmax", "log_softmax"),
    ),
    torch.Tensor: ("exp", "pow", "__pow__", "__rpow__", "sum", "norm", "softmax"),
}


@pytest.mark.parametrize("owner", FP32, ids=lambda owner: owner.__name__)
def test_autocast_computes_in_fp32(owner):
    with accelerator_operators("cuda"), torch.autocast("cpu", dtype=torch.bfloat16):
        for name in FP32[owner]:
            assert getattr(owner, name)(*ARGUMENTS.get(name, (x,))).dtype is torch.float32, name
        assert torch.sum(x, dtype=torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize(("backend", "lists"), [("cuda", True), ("cpu", False)])
def test_optimizers_step_over_lists_on_an_accelerator(backend, lists):
    with fake_world(backend), FakeLedger(accelerator=backend != "cpu"):
        weight = torch.nn.Parameter(torch.empty(4))
        weight.grad = torch.empty(4)
        optimizers = [torch.optim.SGD([weight]), torch.optim.AdamW([weight], fused=True)]
        for optimizer in optimizers:
            optimizer.step()
        assert [bool(optimizer.param_groups[0]["foreach"]) for optimizer in optimizers] == [lists, False]


def test_attention_draws_dropout_inside_its_kernel():
    with fake_world("cuda"), FakeLedger(accelerator=True) as ledger:
        query = torch.empty(1, 2, 512, 16, dtype=torch.bfloat16, requires_grad=True)
        before = ledger._total
        out = F.scaled_dot_product_attention(query, query, query, dropout_p=0.1, is_causal=True)
        assert ledger._total - before < 2 * 512 * 512  # the scores
        out.backward(torch.empty_like(out))
