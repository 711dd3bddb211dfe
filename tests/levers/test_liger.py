"""Liger's kernels in estimates: what each saves and allocates by its source, and which models have them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from hf_memopt import estimate, estimate_trainer
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger
from hf_memopt.estimator.patches import liger
from hf_memopt.levers.chunked_loss import LazyLogits

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 8000,
    "num_hidden_layers": 3,
}
OFF = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), False)
MODELS = {
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi3": {"pad_token_id": 0},
    "granite": {},
    "glm4": {"head_dim": 32, "pad_token_id": 0},
    "olmo2": {},
    "exaone4": {},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32},
}


def config(kind: str = "llama", **more):
    return AutoConfig.for_model(kind, **{**SHAPE, **more})


def job(use: bool = True, chosen: dict | None = None, model=None, hardware="rtx_4090", **settings):
    fields = {"per_device_train_batch_size": 4, "bf16": True, "use_liger_kernel": use, "liger_kernel_config": chosen}
    fields |= settings.pop("fields", {})
    return estimate(model or config(), fields, 512, hardware, **settings)


class Call:
    """One kernel on fake tensors: what forward leaves beside inputs and output, and the most that backward adds."""

    def __init__(self, run, *shapes, dtype=torch.bfloat16):
        ledger, mode = FakeLedger(accelerator=True), FakeTensorMode()
        with mode, ledger:
            inputs = [torch.empty(shape, dtype=dtype).requires_grad_() for shape in shapes]
            for tensor in inputs:
                ledger.add(tensor)
            before = ledger._total
            out = run(*inputs)
            out_bytes = out.untyped_storage().nbytes()
            self.saved = ledger._total - before - out_bytes
            gradient = torch.empty_like(out)
            start = ledger._total
            ledger.enter("backward")
            torch.autograd.grad(out, inputs, gradient, allow_unused=True)
            self.peak = ledger.peaks["backward"].total - start


ROWS, HIDDEN = 1024, 512
ELEMENTS = ROWS * HIDDEN


def test_rms_norm_saves_its_input_and_a_number_a_row():
    call = Call(lambda x, w: liger._RMSNorm.apply(x, w, False), (ROWS, HIDDEN), (HIDDEN,))
    assert call.saved == 4 * ROWS
    rows = 4 * 132 * HIDDEN  # in fp32 for each multiprocessor, and their sum
    assert rows <= call.peak <= rows + 4 * 4 * HIDDEN
    own = Call(lambda x, w: liger._RMSNorm.apply(x, w, True), (ROWS, HIDDEN), (HIDDEN,))
    assert own.peak == call.peak + 2 * ELEMENTS


def test_a_gated_unit_needs_nothing_beside_inputs_and_output():
    call = Call(liger._GatedUnit.apply, (ROWS, HIDDEN), (ROWS, HIDDEN))
    assert (call.saved, call.peak) == (0, 0)


def test_rotation_is_in_place():
    def rotate(q, k, cos, sin):
        q, k = (part.view(2, 64, 4, 32).transpose(1, 2) for part in (q, k))
        return liger._rotate(q * 1, k * 1, cos, sin)[0]

    call = Call(rotate, (2 * 64, 128), (2 * 64, 128), (1, 64, 32), (1, 64, 32))
    assert call.saved <= 2 * 2 * 64 * 128  # k * 1, which is no part of the output


def test_the_fused_loss_takes_as_much_as_the_hidden_states():
    vocabulary = 8 * HIDDEN
    call = Call(
        lambda hidden, weight: liger._FusedLinearCrossEntropy.apply(hidden, weight, None, 8.9),
        (ROWS, HIDDEN),
        (vocabulary, HIDDEN),
    )
    assert call.saved == pytest.approx(2 * ELEMENTS + 2 * vocabulary * HIDDEN, abs=1024)  # both gradients
    assert call.peak <= 1024


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "hidden", "rows"), [(16384, 32000, 4096, 2048), (100, 8000, 8000, 100)]
)
def test_rows_of_a_chunk_are_those_of_the_source(tokens, vocabulary, hidden, rows):
    """The example in fused_linear_cross_entropy_forward: BT = 4096 × 4, V = 32000, H = 4096."""
    shapes = torch.empty(tokens, hidden, device="meta"), torch.empty(vocabulary, hidden, device="meta")
    assert liger._rows(*shapes) == rows


def test_a_head_before_ampere_takes_one_more_matrix():
    def total(capability):
        ledger = FakeLedger(accelerator=True)
        with FakeTensorMode(), ledger:
            total, logits, part = (
                torch.empty(size, dtype=torch.bfloat16) for size in ((800, 64), (16, 800), (16, 64))
            )
            ledger.enter("add")
            before = ledger._total
            liger._add_matmul(total, logits, part, capability)
        return ledger.peaks["add"].total - before

    assert total(8.0) == 0 and total(7.5) == (2 + 4) * 800 * 64


@pytest.mark.slow
def test_liger_needs_less():
    plain, with_liger = (job(use).peak_allocated_bytes for use in (False, True))
    logits = 4 * 512 * SHAPE["vocab_size"] * 4
    assert with_liger < plain - logits
    assert any("Liger's kernels are counted" in note for note in job().notes)


@pytest.mark.slow
def test_every_option_is_honoured():
    plain = job(False).peak_allocated_bytes
    assert job(chosen=OFF).peak_allocated_bytes == plain
    for name in OFF:
        assert job(chosen={**OFF, name: True}).peak_allocated_bytes <= plain
    assert job(chosen={**OFF, "cross_entropy": True}).peak_allocated_bytes < plain
    assert job(chosen={"unknown": True}).peak_allocated_bytes == job().peak_allocated_bytes  # Liger ignores it


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", "not measured on a GPU"),
        ("mixtral", "not measured on a GPU, except for the experts, which are traced without"),
        ("gemma3", "those for gemma3 are not modelled"),
        ("bert", "Liger has no kernels for bert: use_liger_kernel changes nothing"),
    ],
)
def test_estimates_say_what_of_liger_they_count(kind, said):
    assert liger.describe_liger(kind).endswith(said)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", MODELS)
def test_models_that_liger_knows(kind):
    model = config(kind, **MODELS[kind])
    assert job(model=model).peak_allocated_bytes < job(False, model=model).peak_allocated_bytes


@pytest.mark.slow
def test_models_that_liger_does_not_know_stay():
    model = config("gpt_neox")
    result = job(model=model)
    assert result.peak_allocated_bytes == job(False, model=model).peak_allocated_bytes
    assert any("Liger has no kernels for gpt_neox" in note for note in result.notes)


@pytest.mark.slow
def test_the_fused_loss_under_fsdp2():
    result = job(world_size=2, strategy="fsdp2")
    assert result.peak_allocated_bytes < job(False, world_size=2, strategy="fsdp2").peak_allocated_bytes * 0.8


def test_logits_stay_lazy_under_fsdp2():
    """FSDP2 asks every output for __dataclass_fields__, for which no logits are computed."""
    lazy = LazyLogits(torch.empty(2, 4), torch.nn.Linear(4, 8))
    lazy.materialize = None
    assert not hasattr(lazy, "__dataclass_fields__")


@pytest.mark.parametrize(
    ("chosen", "kind", "hardware", "said"),
    [
        ({"cross_entropy": True}, "llama", "rtx_4090", "exclude each other"),
        ({"fused_linear_cross_entropy": True, "cross_entropy": False}, "granite", "rtx_4090", "no fused_l"),
        ({"rope": True}, "glm4", "rtx_4090", "no rope for glm4"),
        (None, "llama", "cpu", "needs Triton"),
        (None, "llama", "apple_m2_16gb", "needs Triton"),
    ],
)
def test_what_liger_cannot_do_is_refused(chosen, kind, hardware, said):
    with pytest.raises(InputError, match=said):
        job(chosen=chosen, model=config(kind, **MODELS.get(kind, {})), hardware=hardware)


@pytest.mark.slow
def test_a_trainer_and_estimate_agree(tmp_path):
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, report_to="none", use_cpu=True, use_liger_kernel=True
    )
    data = [{"input_ids": [1] * 512, "labels": [1] * 512} for _ in range(8)]
    result = estimate_trainer(Trainer(model, args, train_dataset=data), "rtx_4090")
    other = estimate(config(), args, 512, "rtx_4090", dtype="bfloat16")
    assert result.peak_allocated_bytes == pytest.approx(other.peak_allocated_bytes, rel=0.01)
    assert "_normalize" not in repr(model.model.norm.forward)  # the user's model stays as it is
