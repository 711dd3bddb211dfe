"""Every optimizer of transformers' OptimizerNames is estimated, or refused in one sentence, installed or not."""

import pytest
from conftest import slow
from test_optimizers import fields_for
from transformers import LlamaConfig
from transformers.training_args import OptimizerNames

from hf_memopt import InputError, estimate
from hf_memopt.compatibility.rules import BITSANDBYTES, PACKAGES
from hf_memopt.estimator.tracing import untraced_optimizers
from hf_memopt.hardware import get_hardware
from hf_memopt.packages import is_installed

NAMES = [member.value for member in OptimizerNames]
REFUSED = {
    "adamw_torch_xla": "XLA devices",
    "adamw_torch_npu_fused": "Ascend NPUs",
    "galore_adafactor_layerwise": "use optim=galore_adafactor",
}
GIB = 2**30


def config(layers=2, width=256) -> LlamaConfig:
    """Its matrices have more than the 1e5 elements from which bitsandbytes pages states."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        pad_token_id=0,
    )


def estimated(name: str, hardware: str, dtype: str = "float32", **more):
    fields = {key: value for key, value in fields_for(name).items() if key != "max_steps"}
    return estimate(config(), {"per_device_train_batch_size": 1, **fields, **more}, 16, hardware, dtype=dtype)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("hardware", ["rtx_4090", slow("cpu"), slow("apple_m4_max_64gb"), slow("rx_7900_xtx")])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_estimated_or_refused_in_one_sentence(name, hardware):
    backend = get_hardware(hardware).backend
    reason = REFUSED.get(name)
    if backend == "mps" and name in BITSANDBYTES:
        reason = "no optimizer kernel for Apple's MPS"
    elif backend == "cpu" and name.startswith("paged_ademamix"):
        reason = "use ademamix"
    elif reason is None and name in PACKAGES and not is_installed(PACKAGES[name]):
        reason = f"pip install {PACKAGES[name][:4]}|pip install torch-optimi"
    elif reason is None and name in untraced_optimizers._CUDA_ONLY | untraced_optimizers._OTHER_ON_DEVICES:
        reason = "no trace on a CPU shows"
    if reason is None:
        assert estimated(name, hardware).fits is not None
        return
    with pytest.raises(InputError, match=reason) as refusal:
        estimated(name, hardware)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hardware", ["rtx_4090", "cpu"])
@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_torchaos_states_are_counted_where_it_is_missing(name, hardware, dtype, monkeypatch):
    traced = estimated(name, hardware, dtype)
    monkeypatch.setattr(untraced_optimizers, "by_formula", lambda optim: True)
    counted = estimated(name, hardware, dtype)
    assert counted.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=0.002)
    assert counted.host_bytes == pytest.approx(traced.host_bytes, rel=0.002)
    assert counted.breakdown["optimizer_states"] == traced.breakdown["optimizer_states"]


MATRICES, EMBEDDING = (
    2 * 3 * 256 * 512,
    512 * 256,
)  # elements of weights from 1e5 on; the head is another embedding's size


@pytest.mark.parametrize(
    ("name", "unpaged", "size"),
    [
        ("paged_adamw_32bit", "adamw_torch_fused", 8 * (MATRICES + 2 * EMBEDDING)),
        ("paged_ademamix_32bit", "ademamix", 12 * (MATRICES + 2 * EMBEDDING)),
        ("paged_lion_8bit", "lion_8bit", MATRICES + (1 + 4) * EMBEDDING),  # the Trainer keeps embeddings in 32 bits
    ],
)
def test_paged_states_are_in_managed_memory(name, unpaged, size):
    """torch's allocator does not have them; the device does, as far as there is room."""
    paged, resident = estimated(name, "rtx_4090"), estimated(unpaged, "rtx_4090")
    assert resident.peak_allocated_bytes - paged.peak_allocated_bytes == pytest.approx(size, rel=0.01)
    assert resident.breakdown["optimizer_states"] - paged.breakdown["optimizer_states"] == pytest.approx(
        size, rel=0.01
    )
    assert any("CUDA managed memory" in note for note in paged.notes)


@pytest.mark.slow
def test_what_is_paged_leaves_the_device_where_there_is_no_room():
    """1.9 billion weights in 24 GB: paged 32-bit states of 14 GiB take the room that is left, and fit."""
    fields = {"per_device_train_batch_size": 1, "activation_checkpointing": True}
    large = LlamaConfig(num_hidden_layers=8, num_attention_heads=32, vocab_size=32000)
    paged = estimate(large, {**fields, "optim": "paged_adamw_32bit"}, 64, "rtx_4090", dtype="bfloat16")
    resident = estimate(large, {**fields, "optim": "adamw_torch_fused"}, 64, "rtx_4090", dtype="bfloat16")
    assert paged.fits and paged.peak_reserved_bytes + 8 * GIB < paged.device_bytes
    assert paged.device_bytes <= paged.capacity_bytes
    assert paged.host_bytes > resident.host_bytes + 8 * GIB


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optim": "sgd", "optim_args": "momentum=abc"}, "optim_args=momentum=abc"),
        ({"optim": "adamw_torch_8bit", "optim_args": "block_size=64"}, "block_size=64"),
        ({"optim": "rmsprop_bnb", "optim_args": "momentum=0.9"}, "momentum=0.9"),
        ({"optim": "lomo", "deepspeed": "zero2"}, "DeepSpeed's backward"),
        ({"optim": "apollo_adamw", "optim_target_modules": ["mlp"], "deepspeed": "zero2"}, "needs matrices"),
    ],
)
def test_settings_that_no_optimizer_takes(fields, message):
    with pytest.raises(InputError, match=message) as refusal:
        estimate(config(), fields, 16, "rtx_4090")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("name", "copies"), [("sgd", 1), ("rmsprop", 1), ("adagrad", 2), ("adamw_torch", 1)])
def test_steps_over_lists_of_tensors_have_temporaries_of_all_weights(name, copies):
    """torch's foreach implementations, which accelerators use by default; SGD's with weight decay."""
    found = estimated(name, "rtx_4090", weight_decay=0.1)
    weights = 4 * (MATRICES + 2 * EMBEDDING + 2 * 4 * 256 * 256)
    assert found.phase == "optimizer"
    states = found.breakdown["optimizer_states"] + found.breakdown["gradients"] + found.breakdown["parameters"]
    assert found.phases["optimizer"] - states > 0.9 * copies * weights
