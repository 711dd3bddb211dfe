"""vLLM on the card that trains: arithmetic from its documented settings. Nothing of vLLM runs here."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from hf_memopt import InputError
from hf_memopt.estimator.accounting.ledger import Peak
from hf_memopt.estimator.colocation import add_engine, cache_bytes, engine_weights, notes_on_engine
from hf_memopt.hardware import get_hardware
from hf_memopt.units import GIB

_LAYERS, _REST, _LAYER = 4, 10**9, 2 * 10**9  # elements beside the layers, and of a layer
_WEIGHTS = 2 * (_REST + _LAYERS * _LAYER)  # in 16 bits
_TRAINING = {"load": 4, "between": 10, "forward:0": 30, "backward:0": 34, "optimizer": 20}  # GB


@dataclasses.dataclass
class Job:
    """What of a Job the arithmetic reads."""

    fields: dict[str, Any]
    quantization_config: Any = None
    device: Any = dataclasses.field(default_factory=lambda: get_hardware("a100_80gb"))
    config: Any = dataclasses.field(
        default_factory=lambda: LlamaConfig(num_hidden_layers=_LAYERS, hidden_size=512, num_attention_heads=8)
    )

    def elements(self) -> tuple[int, int]:
        return _REST, _LAYER


def peaks() -> dict[str, Peak]:
    return {name: Peak(size * 10**9, {"parameters": 10**9}) for name, size in _TRAINING.items()}


def with_engine(**fields) -> tuple[dict[str, int], Job]:
    """What vLLM adds in each segment, and the job."""
    job, found = Job({"use_vllm": True, **fields}), peaks()
    add_engine(found, job)
    before = {name: peak.total for name, peak in peaks().items()}
    return {name: peak.total - before.get(name, before["between"]) for name, peak in found.items()}, job


def test_what_vllm_takes_in_each_phase(subtests):
    """gpu_memory_utilization of the card holds weights, activations and cache together: the weights are in it. Asleep
    at level 2 weights and cache are freed; the trained weights are beside vLLM's copy of them while they are sent."""
    memory, training = get_hardware("a100_80gb").memory, ("between", "forward:0", "backward:0", "optimizer")
    for fields, awake, generating, sent in [
        *(({"vllm_gpu_memory_utilization": share}, share, share, share) for share in (0.3, 0.45, 0.9)),
        ({}, 0.3, 0.3, 0.3),  # TRL's default
        ({"vllm_gpu_memory_utilization": 0.9, "vllm_enable_sleep_mode": True}, 0, 0.9, _WEIGHTS),
        ({"vllm_enable_sleep_mode": True, "vllm_tensor_parallel_size": 2}, 0, 0.3, _WEIGHTS // 2),
        *(({"vllm_mode": "server"}, 0, 0, 0), ({"vllm_mode": "colocate"}, 0.3, 0.3, 0.3)),
    ]:
        with subtests.test(str(fields)):
            sizes = {"load": 0, **dict.fromkeys(training, int(awake * memory)), "generation": int(generating * memory)}
            sizes["weight_sync"] = sent if sent > 1 else int(sent * memory)
            assert with_engine(**fields)[0] == sizes
    assert set(with_engine(use_vllm=False)[0].values()) == {0}
    server = ["vLLM's server has cards of its own, which are not in these figures"]
    assert notes_on_engine(with_engine(vllm_mode="server")[1], peaks()) == server
    assert notes_on_engine(with_engine(use_vllm=False)[1], peaks()) == []


def test_the_rest_of_the_share_is_a_cache():
    """A token's keys and values: 2 × 4 layers × 8 heads × 64 × 2 bytes."""
    _, job = with_engine(vllm_gpu_memory_utilization=0.5)
    (note,) = notes_on_engine(job, peaks())
    tokens = int((int(0.5 * job.device.memory) - _WEIGHTS) / (2 * 4 * 8 * 64 * 2))
    assert "arithmetic, not measured" in note and f"at most {tokens:,} tokens" in note


def test_a_share_smaller_than_the_weights_is_refused():
    with pytest.raises(InputError, match=r"utilization=0.1 is .*raise it, or vllm_tensor_parallel_size"):
        with_engine(vllm_gpu_memory_utilization=0.1)
    with pytest.raises(InputError, match="the memory of a card is not known"):
        add_engine(peaks(), Job({"use_vllm": True}, device=SimpleNamespace(memory=None, label="a card")))


def test_quantized_weights_are_as_large_as_loaded():
    found = peaks()
    add_engine(found, Job({"use_vllm": True, "vllm_enable_sleep_mode": True}, quantization_config=object()))
    assert found["weight_sync"].total - found["between"].total == 10**9 < GIB


def test_bytes_of_a_tokens_keys_and_values():
    """Two of them, of each layer and key head, in 16 bits."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8}
    assert cache_bytes(LlamaConfig(**sizes)) == 2 * 3 * 8 * 8 * 2
    assert cache_bytes(LlamaConfig(**sizes, num_key_value_heads=2)) == 2 * 3 * 2 * 8 * 2
    assert cache_bytes(LlamaConfig(**sizes, head_dim=32)) == 2 * 3 * 8 * 32 * 2
    assert cache_bytes(GPT2Config(n_layer=3, n_embd=64, n_head=4)) == 2 * 3 * 4 * 16 * 2


def test_bytes_of_the_engines_own_weights():
    assert engine_weights(Job({}), peaks()) == _WEIGHTS
    assert engine_weights(Job({"vllm_tensor_parallel_size": 4}), peaks()) == _WEIGHTS // 4
    quantized = Job({"vllm_tensor_parallel_size": 4}, quantization_config="4 bits")
    assert engine_weights(quantized, peaks()) == 10**9 // 4
