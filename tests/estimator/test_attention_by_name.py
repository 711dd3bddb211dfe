"""Attention by name, without its package: what each kernel saves and allocates, and which card has it."""

import textwrap
from types import ModuleType

import pytest
import torch
import transformers.modeling_flash_attention_utils as utils
import video_models
from conftest import run_forked
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.flash_attention import flash_attention_forward

from hf_memopt import estimate, estimate_trainer
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger
from hf_memopt.estimator.accounting.flash_kernels import BACKWARD, Attention, _hopper_rows
from hf_memopt.estimator.patches.flash_attention import _with_flash_attention, counted_flash_attention
from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.attention_kernels import FLASH, HUB_KERNELS, check_attention
from hf_memopt.video.inputs import VideoInputs

SHAPE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"max_position_embeddings": 2048, "vocab_size": 500, "num_hidden_layers": 3},
}
CARDS = {"flash_attention_2": "rtx_4090", "flash_attention_3": "h100_80gb", "flash_attention_4": "b200"}
# Batch, tokens, heads, key-value heads, head size of the calls below; 1,000 tokens are 1,024 in blocks of 64 and 128.
B, N, H, K, D = 2, 1000, 8, 2, 128
ROWS = 1024
# Bytes of backward's accumulators, by hand from the source that flash_kernels names. fp32 takes 4 bytes, bf16 2.
BY_HAND = {
    # softmax_d, dq_accum, dk_expanded and dv_expanded
    ("flash_attention_2", 8.9): 4 * B * H * ROWS + 4 * B * ROWS * H * D + 2 * (2 * B * N * H * D),
    # softmax_d and softmax_lse_log2, dq_accum, dk_accum and dv_accum, dq_semaphore
    ("flash_attention_3", 9.0): 2 * 4 * B * H * ROWS
    + 4 * B * H * ROWS * D
    + 2 * 4 * B * K * ROWS * D
    + 4 * 16 * B * H,
    # dpsum and lse_log2, dq_accum, dk_accum and dv_accum
    ("flash_attention_4", 9.0): 2 * 4 * B * H * ROWS + 4 * B * H * ROWS * D + 2 * 4 * B * K * ROWS * D,
    ("flash_attention_4", 12.0): 2 * 4 * B * H * ROWS + 4 * B * H * ROWS * D + 2 * 4 * B * K * ROWS * D,
    ("flash_attention_4", 10.0): 2 * 4 * B * H * ROWS + 4 * B * H * ROWS * D + 2 * 4 * B * K * ROWS * D,
}


def config(kind: str = "llama", **more):
    return AutoConfig.for_model(kind, **SHAPE, **more)


def job(name, hardware="rtx_4090", model=None, **settings):
    fields = {"per_device_train_batch_size": 2, "bf16": True, **settings.pop("fields", {})}
    return estimate(model or config(), fields, 512, hardware, attn_implementation=name, **settings)


def call(**changes) -> Attention:
    usual = {"sequences": B, "queries": N, "keys": N, "heads": H, "kv_heads": K, "head_size": D}
    return Attention(
        **{**usual, "dtype": torch.bfloat16, "causal": True, "ragged": False, "capability": 9.0, **changes}
    )


def allocated(name: str, **changes) -> int:
    with FakeTensorMode():
        return sum(tensor.untyped_storage().nbytes() for tensor in BACKWARD[name](call(**changes)))


def test_accumulators_are_those_of_the_source(subtests):
    for name, capability in BY_HAND:
        with subtests.test(f"{name} {capability}"):
            assert allocated(name, capability=capability) == BY_HAND[name, capability]


@pytest.mark.parametrize("name", FLASH)
def test_each_further_sequence_pads_the_accumulators_by_a_block(name):
    one, four = (allocated(name, ragged=True, sequences=count, queries=4096, keys=4096) for count in (1, 4))
    block = 128 if name == "flash_attention_2" else 64
    numbers = 1 if name == "flash_attention_2" else 2  # softmax_d, beside softmax_lse_log2
    keys = 0 if name == "flash_attention_2" else 2 * 128 * K * D
    assert four - one == 3 * 4 * (block * H * (D + numbers) + keys)


@pytest.mark.parametrize("name", [*FLASH, *HUB_KERNELS])
def test_a_call_saves_its_inputs_output_and_logsumexp(name):
    """Through transformers' own function: nothing but these is alive after forward, and gradients after backward."""
    module = torch.nn.Linear(1, 1).bfloat16()
    module.config, module.is_causal = AutoConfig.for_model("llama"), True
    module.config._attn_implementation = name
    query, key = (torch.empty(B, heads, N, D, dtype=torch.bfloat16) for heads in (H, K))
    ledger = FakeLedger(accelerator=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with counted_flash_attention(9.0), mode, ledger:
        tensors = [mode.from_tensor(part).requires_grad_() for part in (query, key, key)]
        for part in tensors:
            ledger.add(part)
        before = ledger._total
        out, _ = flash_attention_forward(module, *tensors, attention_mask=None)
        assert out.shape == (B, N, H, D)
        saved = ledger._total - before
        assert saved == 2 * B * N * H * D + 4 * B * H * N  # the output, and the log-sum-exp in fp32
        ledger.enter("backward")
        out.backward(torch.empty_like(out))
    flash = HUB_KERNELS.get(name, name)
    gradients = 2 * (2 * B * N * H * D + 2 * B * N * K * D)  # of the output too
    peak = ledger.peaks["backward"].total - before - saved
    assert abs(peak - gradients - allocated(flash)) <= 8 * 512


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", FLASH)
def test_every_version_is_estimated(name):
    result = job(name, CARDS[name])
    assert any(name in note and "its source" in note for note in result.notes)
    assert result.peak_allocated_bytes < job("eager", CARDS[name]).peak_allocated_bytes


@pytest.mark.slow
def test_hub_kernels_count_as_the_version_that_they_build():
    for name, version in HUB_KERNELS.items():
        card = "h100_80gb"
        assert job(name, card).peak_allocated_bytes == job(version, card).peak_allocated_bytes
    assert (
        job("kernels-community/flash-attn2@v1").peak_allocated_bytes == job("flash_attention_2").peak_allocated_bytes
    )


@pytest.mark.slow
def test_padding_is_taken_out_and_needs_no_mask():
    padded, plain = (job("flash_attention_2", padded=flag).peak_allocated_bytes for flag in (True, False))
    assert plain < padded < job("sdpa", padded=True, model=config()).peak_allocated_bytes * 1.1


def test_one_row_with_positions_is_packed_where_the_job_packs(subtests):
    for packed in [True, False]:
        with subtests.test(packed=packed):
            ids, before = torch.zeros(1, 4), utils._is_packed_sequence
            with counted_flash_attention(8.0, packed):
                said = [utils._is_packed_sequence(*row) for row in ((ids, 1), (ids, 2), (None, 1), (None, 2))]
            assert said == [packed, False, False, False] and utils._is_packed_sequence is before


def test_models_that_import_flash_attention_where_there_is_one_are_lent_it(subtests):
    for kind, lent in [("falcon", True), ("gptj", True), ("llama", False)]:
        with subtests.test(kind=kind):
            module = ModuleType(f"transformers.models.{kind}.modeling_{kind}")
            with _with_flash_attention(module):
                assert hasattr(module, "_flash_attention_forward") is lent
            assert not hasattr(module, "_flash_attention_forward")


def test_a_packed_row_needs_no_mask_of_tokens_by_tokens():
    fields = {"per_device_train_batch_size": 1}
    flash, sdpa = (
        job(name, packed=True, fields=fields).peak_allocated_bytes for name in ("flash_attention_2", "sdpa")
    )
    assert flash < sdpa


def test_flex_attention_keeps_a_block_mask():
    flex, sdpa = (job(name).peak_allocated_bytes for name in ("flex_attention", "sdpa"))
    assert sdpa < flex < sdpa * 1.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_neox", "falcon", "bert", "mixtral"])
def test_architectures_with_their_own_attention(kind):
    assert job("flash_attention_2", model=config(kind)).peak_allocated_bytes > 0


@pytest.mark.slow
def test_a_video_model(tmp_path):
    folder = video_models.make("qwen2_5_vl", tmp_path, weights=False)
    size = {"shortest_edge": 784, "longest_edge": 10**7}
    video = VideoInputs(frames=16, height=112, width=112, settings={"size": size})
    fields = {"per_device_train_batch_size": 1, "bf16": True}
    flash, sdpa = (
        estimate(str(folder), fields, 8, "a100_80gb", video=video, attn_implementation=name).peak_allocated_bytes
        for name in ("flash_attention_2", "sdpa")
    )
    assert flash == pytest.approx(sdpa, rel=0.1)


_WITHOUT_KERNEL = [
    ("flash_attention_2", "t4", "compute capability 7.5"),
    ("flash_attention_2", "mi300x", "not an NVIDIA card"),
    ("flash_attention_2", "apple_m2_8gb", "not an NVIDIA card"),
    ("flash_attention_2", "cpu", "not an NVIDIA card"),
    ("flash_attention_3", "rtx_4090", "compute capability 8.9"),
    ("flash_attention_3", "b200", "compute capability 10.0"),
    ("flash_attention_4", "a100_80gb", "compute capability 8.0"),
    ("kernels-community/vllm-flash-attn3", "rtx_4090", "compute capability 8.9"),
    ("someone/attention", "h100_80gb", "only kernels-community/flash-attn2"),
    ("paged|flash_attention_2", "h100_80gb", "does not train"),
    ("flex_attention", "cpu", "no backward"),
    (["sdpa"], "h100_80gb", "must be a name"),
]


def test_a_card_without_the_kernel_is_refused(subtests):
    for name, hardware, said in _WITHOUT_KERNEL:
        words = pytest.raises(InputError, match=rf"attn_implementation=.*{said}")
        with subtests.test(name=name, hardware=hardware), words:
            check_attention(name, get_hardware(hardware))


def test_each_part_of_a_model_is_checked():
    check_attention({"text_config": "flash_attention_2", "vision_config": "sdpa"}, get_hardware("rtx_4090"))
    with pytest.raises(InputError, match=r"flash_attention_3.*8\.9"):
        check_attention({"text_config": "flash_attention_3", "vision_config": "sdpa"}, get_hardware("rtx_4090"))


def test_what_the_kernels_refuse_is_refused():
    with pytest.raises(InputError, match=r"takes 16 bits.*bf16=true"):
        job("flash_attention_2", fields={"bf16": False})
    with pytest.raises(InputError, match="no heads of 512"):
        job("flash_attention_2", model=config(head_dim=512))
    with pytest.raises(InputError, match=r"T5.*does not support flash attention"):
        job("flash_attention_2", model=AutoConfig.for_model("t5", vocab_size=500, decoder_start_token_id=0))
    with pytest.raises(InputError, match="no dropout"):
        job("flex_attention", model=config(attention_dropout=0.1))


@pytest.mark.slow
def test_a_model_with_a_kernel_of_its_own_is_checked_for_it():
    """gpt-oss takes FlashAttention-3 for every flash attention, since it has sinks."""
    small = config("gpt_oss", num_local_experts=4, head_dim=64)
    assert job("flash_attention_2", "h100_80gb", small).peak_allocated_bytes > 0
    with pytest.raises(InputError, match=r"takes 'kernels-community/vllm-flash-attn3'.*not 8\.9"):
        job("flash_attention_2", "rtx_4090", small)


def test_nothing_is_left_in_transformers():
    job("kernels-community/flash-attn2")
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(ImportError, match="FlashAttention2"):
        model.set_attn_implementation("flash_attention_2")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert "kernels-community/flash-attn2" not in ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_a_configuration_with_flash_attention_is_estimated_with_it():
    asked = config()
    asked._attn_implementation = "flash_attention_2"
    assert any("flash_attention_2" in note for note in job(None, model=asked).notes)


SCRIPT = """
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(
        "MODEL", dtype="bfloat16", attn_implementation="flash_attention_2"
    )
    args = TrainingArguments("out", per_device_train_batch_size=2, report_to="none", use_cpu=True)
    data = [{"input_ids": [1] * 64, "labels": [1] * 64} for _ in range(8)]
    Trainer(model, args, train_dataset=data).train()
"""


@pytest.mark.slow
def test_a_script_that_asks_for_flash_attention(tmp_path):
    config().save_pretrained(tmp_path / "model")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("MODEL", str(tmp_path / "model")))
    fits = run_forked("hf-memopt", "dry-run", str(script), "--hardware", "rtx_4090", "--json", cwd=tmp_path)
    assert fits.returncode == 0 and "flash_attention_2 is counted" in fits.stdout
    refused = run_forked("hf-memopt", "dry-run", str(script), "--hardware", "t4", cwd=tmp_path)
    assert refused.returncode == 2 and "compute capability 7.5" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_trainer_and_estimate_agree(tmp_path):
    """One path: the same job, once as a Trainer whose model asks for flash attention."""
    with counted_flash_attention():
        model = AutoModelForCausalLM.from_config(
            config(), attn_implementation="flash_attention_2", dtype=torch.bfloat16
        )
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    data = [{"input_ids": [1] * 512, "labels": [1] * 512} for _ in range(8)]
    result = estimate_trainer(Trainer(model, args, train_dataset=data), "rtx_4090")
    other = estimate(config(), args, 512, "rtx_4090", dtype="bfloat16", attn_implementation="flash_attention_2")
    assert result.peak_allocated_bytes == pytest.approx(other.peak_allocated_bytes, rel=0.01)


def test_queries_of_a_block_on_hopper():
    for causal, rows in ((False, [128, 128, 64, 64, 80, 80, 64]), (True, [128, 128, 64, 64, 64, 64, 64])):
        call = Attention(1, 8, 8, 1, 1, 64, torch.bfloat16, causal, False, 9.0)
        assert [_hopper_rows(call, size) for size in (32, 64, 65, 96, 97, 128, 129)] == rows
