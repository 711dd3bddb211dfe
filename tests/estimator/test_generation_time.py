"""Seconds of what a step of GRPO and RLOO generates: by hand, and by what limits it."""

from types import SimpleNamespace

import frozen
import pytest
from transformers import LlamaConfig

from hf_memopt.engines import NO_ENGINE, engine_named
from hf_memopt.estimator.accounting.ledger import Peak
from hf_memopt.estimator.timing.generation_time import (
    Decoder,
    Lengths,
    _own_weights,
    generation_note,
    lengths_of,
    rollout_time,
)
from hf_memopt.hardware import get_hardware
from hf_memopt.units import GIB

H100 = get_hardware("h100_80gb")
LAYERS, WEIGHTS, CACHE = 32, 16e9, 131_072  # Llama-3.1-8B in bf16: 2 × 32 layers × 8 heads × 128 × 2 bytes a token


def decoder(**settings) -> Decoder:
    return Decoder(device=H100, **{"weights": WEIGHTS, "cache": CACHE} | settings)


def test_a_decoder_by_hand():
    """1,000 passes at 2.68 TB/s: 5.97 ms for the weights, 0.03 ms for 600 tokens of cache, 2.24 ms for 32 layers."""
    seconds = decoder(beside=32 * 70e-6).seconds(1, Lengths(100, 1000, 1000))
    assert seconds == pytest.approx(1000 * (0.00597 + 0.0000293 + 0.00224), rel=0.001)
    # 256 completions of 40 µs a token compute for longer than the weights are read; two cards for half as long.
    many = {"token_seconds": 40e-6, "cache": 0}
    for settings, prompts, seconds in [
        (many, None, 256 * 40e-6 * (100 + 1000)),
        (many, 8, (8 * 100 + 256 * 1000) * 40e-6),
        (many | {"cards": 2, "weights": 1e9}, 8, (8 * 100 + 256 * 1000) * 20e-6),
        ({"weights": 1e9, "launching": 0.05}, None, 1000 * 0.05),  # the host bounds small models
        ({"cache": 0, "launching": 0.05, "beside": 0.06, "weights": 0}, None, 1000 * 0.06),
    ]:
        assert decoder(**settings).seconds(256, Lengths(100, 1000, 1000), prompts) == pytest.approx(seconds)


def test_completions_without_room_wait():
    lengths = Lengths(100, 400, 400)
    room = 8 * CACHE * 500
    limited, free = decoder(room=room), decoder()
    assert limited.in_flight(64, lengths) == 8 and limited.in_flight(4, lengths) == 4
    assert free.seconds(8, lengths) == limited.seconds(8, lengths)
    assert limited.seconds(64, lengths) == pytest.approx(8 * free.seconds(8, lengths))
    assert decoder(room=0).in_flight(64, lengths) == 1


def rollout(world_size=1, device=H100, engine=NO_ENGINE, quantization_config=None, **fields):
    """Of an 8B model in 16 bits: 10 ms of forward a micro-batch of 8 samples, 20 ms to launch it."""
    of_trainer = {"use_vllm": False, "beta": 0.0, "num_iterations": 1}
    of_trainer = {name: fields.pop(name, value) for name, value in of_trainer.items()}
    trainer = SimpleNamespace(max_completion_length=fields.pop("longest", 300), num_generations=8, **of_trainer)
    if (corrected := fields.pop("corrected", True)) is not None:
        trainer.vllm_importance_sampling_correction = corrected
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    job = SimpleNamespace(
        **{"trainer": trainer, "config": config, "device": device, "seq_len": 400, "world_size": world_size},
        **{"engine": engine, "dtype": "bfloat16", "quantization_config": quantization_config},
        elements=lambda: (10**9, 220 * 10**6),
        fields={**batch, **({"use_vllm": True} if trainer.use_vllm else {}), **fields},
    )
    return rollout_time(job, {"load": Peak(by_kind={"parameters": 5 * 10**9})}, 0.01, 0.02)


VLLM = {"use_vllm": True}
ROLLOUTS = [
    *({}, {"beta": 0.1}, {"num_iterations": 2}, {"num_iterations": 3}, {"corrected": None}, {"longest": 400}),
    *({"steps_per_generation": steps} for steps in (1, 2, 3, 8)),
    *({"gradient_accumulation_steps": 1, "num_iterations": 2}, {"per_device_train_batch_size": 64}),
    *({"world_size": 4, "engine": engine_named(name)} for name in ("ddp", "zero2", "zero3", "fsdp2")),
    *({"quantization_config": "4 bits"}, {"device": get_hardware("rtx_4090")}, {"device": get_hardware("a100_80gb")}),
    *({**VLLM, "corrected": corrected, "beta": beta} for corrected in (True, False) for beta in (0.0, 0.1)),
    *(VLLM | {"vllm_gpu_memory_utilization": share, "gradient_accumulation_steps": 99} for share in (0.24, 0.3, 0.9)),
    *(VLLM | {"vllm_tensor_parallel_size": cards, "world_size": 2} for cards in (1, 2)),
    *(
        VLLM | {"vllm_enable_sleep_mode": True},
        VLLM | {"num_generations": 4},
        VLLM | {"quantization_config": "4 bits"},
    ),
    *(VLLM | {"vllm_mode": "server", "world_size": ranks} for ranks in (1, 4)),
    VLLM | {"vllm_mode": "server", "vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True},
]


def test_seconds_of_generation_and_scoring_are_frozen():
    """The tests below say why they are what they are."""
    found = {}
    for fields in ROLLOUTS:
        names = {name: getattr(value, "name", value) for name, value in fields.items()}
        found[str(names)] = [frozen.figures(seconds) for seconds in rollout(**fields)]
    found["note"] = [generation_note(share) for share in (0.004, 0.5, 1.0)]
    frozen.check("rollouts", found)


def test_scoring_is_a_forward_pass_of_each_model_that_trl_asks():
    assert rollout(beta=0.1).scoring == pytest.approx(4 * 0.02), (
        "the host launches for longer than the device computes"
    )
    assert rollout(use_vllm=True).scoring == pytest.approx(4 * 0.02)
    assert rollout(use_vllm=True, beta=0.1).scoring == pytest.approx(8 * 0.02)
    assert rollout(use_vllm=True, corrected=False).scoring == 0
    assert rollout(corrected=None).scoring == pytest.approx(4 * 0.02), "RLOO"


def test_vllm_reads_a_prompt_once_for_all_its_completions():
    """Of 32 completions: 4 prompts in groups of 8, and 8 in groups of 4, of 100 tokens."""
    fewer, more = (rollout(use_vllm=True, num_generations=size).generation for size in (8, 4))
    assert fewer == rollout(use_vllm=True).generation
    assert more - fewer == pytest.approx((8 - 4) * 100 * 0.01 / (8 * 400))


def test_a_prompt_has_a_token_at_least():
    for length, longest, prompt in ((400, 300, 100), (301, 300, 1), (300, 300, 1), (200, 300, 1)):
        job = SimpleNamespace(seq_len=length, trainer=SimpleNamespace(max_completion_length=longest))
        assert lengths_of(job) == (prompt, 100, longest)


def test_4_bit_weights_are_widened_in_every_pass():
    job = SimpleNamespace(
        config=LlamaConfig(num_hidden_layers=2), quantization_config={}, elements=lambda: (100, 1000), dtype="bfloat16"
    )
    assert _own_weights(job, {"load": Peak(by_kind={"parameters": 3 * GIB})}) == 3 * GIB + 2 * 8 * 1000
