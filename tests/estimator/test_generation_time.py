"""Seconds of what a step of GRPO and RLOO generates: by hand, and by what limits it."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from hf_memopt.engines import NO_ENGINE
from hf_memopt.estimator.accounting.ledger import Peak
from hf_memopt.estimator.timing.generation_time import SLEEPING, Decoder, Lengths, _own_weights, rollout_time
from hf_memopt.hardware import get_hardware
from hf_memopt.units import GIB

H100 = get_hardware("h100_80gb")
LAYERS, WEIGHTS, CACHE = 32, 16e9, 131_072  # Llama-3.1-8B in bf16: 2 × 32 layers × 8 heads × 128 × 2 bytes a token


def decoder(**settings) -> Decoder:
    return Decoder(device=H100, **{"weights": WEIGHTS, "cache": CACHE} | settings)


def test_a_completion_takes_as_long_as_reading_by_hand():
    """1,000 passes at 2.68 TB/s: 5.97 ms for the weights, 0.03 ms for 600 tokens of cache, 2.24 ms for 32 layers."""
    seconds = decoder(beside=32 * 70e-6).seconds(1, Lengths(100, 1000, 1000))
    assert seconds == pytest.approx(1000 * (0.00597 + 0.0000293 + 0.00224), rel=0.001)


def test_prompts_and_large_batches_are_computed():
    """256 completions of 40 µs a token compute for longer than the weights are read."""
    many = decoder(token_seconds=40e-6, cache=0)
    assert many.seconds(256, Lengths(100, 1000, 1000)) == pytest.approx(256 * 40e-6 * (100 + 1000))
    assert many.seconds(256, Lengths(100, 1000, 1000), prompts=8) == pytest.approx((8 * 100 + 256 * 1000) * 40e-6)


def test_the_longest_completion_decides_and_others_only_have_caches():
    seconds = [
        decoder().seconds(64, Lengths(100, mean, longest)) for mean, longest in ((100, 200), (100, 400), (200, 400))
    ]
    assert seconds == sorted(seconds) and seconds[1] > 1.9 * seconds[0] and seconds[2] < 1.1 * seconds[1]
    assert decoder(padded=True).seconds(64, Lengths(100, 100, 400)) > seconds[2], "ended ones are computed on"


def test_completions_without_room_wait():
    lengths = Lengths(100, 400, 400)
    room = 8 * CACHE * 500
    limited, free = decoder(room=room), decoder()
    assert limited.in_flight(64, lengths) == 8 and limited.in_flight(4, lengths) == 4
    assert free.seconds(8, lengths) == limited.seconds(8, lengths)
    assert limited.seconds(64, lengths) == pytest.approx(8 * free.seconds(8, lengths))
    assert decoder(room=0).in_flight(64, lengths) == 1


def test_the_host_bounds_small_models():
    assert decoder(weights=1e9, launching=0.05).seconds(4, Lengths(1, 100, 100)) == pytest.approx(5)


def rollout(world_size=1, device=H100, **fields):
    """Of an 8B model in 16 bits: 10 ms of forward a micro-batch of 8 samples, 20 ms to launch it."""
    names = {name: fields.pop(name) for name in ("beta", "num_iterations", "use_vllm", "corrected") if name in fields}
    trainer = SimpleNamespace(
        max_completion_length=300,
        num_generations=8,
        **{"use_vllm": False, "beta": 0.0, "num_iterations": 1}
        | {key: names[key] for key in names if key != "corrected"},
    )
    if names.get("corrected", True) is not None:
        trainer.vllm_importance_sampling_correction = names.get("corrected", True)
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )
    job = SimpleNamespace(
        trainer=trainer,
        config=config,
        device=device,
        seq_len=400,
        world_size=world_size,
        engine=NO_ENGINE,
        dtype="bfloat16",
        quantization_config=None,
        elements=lambda: (10**9, 220 * 10**6),
        fields={
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            **({"use_vllm": True} if trainer.use_vllm else {}),
            **fields,
        },
    )
    return rollout_time(job, {"load": Peak()}, 0.01, 0.02)


def test_a_generation_serves_the_steps_that_trl_has_it_serve():
    once = rollout()
    assert once.scoring == 0 and once.generation > 300 * 0.006
    twice = rollout(steps_per_generation=2)
    assert 1.5 * once.generation < twice.generation <= 2 * once.generation, "half the batch, two times"
    reused = rollout(num_iterations=2)
    assert reused.generation == pytest.approx(once.generation / 2) and reused.scoring == pytest.approx(4 * 0.02 / 2)
    assert rollout(steps_per_generation=8).generation < once.generation


def test_scoring_is_a_forward_pass_of_each_model_that_trl_asks():
    assert rollout(beta=0.1).scoring == pytest.approx(4 * 0.02), (
        "the host launches for longer than the device computes"
    )
    assert rollout(use_vllm=True).scoring == pytest.approx(4 * 0.02)
    assert rollout(use_vllm=True, beta=0.1).scoring == pytest.approx(8 * 0.02)
    assert rollout(use_vllm=True, corrected=False).scoring == 0
    assert rollout(corrected=None).scoring == pytest.approx(4 * 0.02), "RLOO"


def test_vllms_share_of_the_card_limits_it_and_a_server_has_its_own():
    small, large = (
        rollout(use_vllm=True, gradient_accumulation_steps=64, vllm_gpu_memory_utilization=share).generation
        for share in (0.24, 0.5)
    )
    assert small > 1.2 * large
    served = {"use_vllm": True, "vllm_mode": "server", "gradient_accumulation_steps": 64}
    shares = [rollout(**served, vllm_gpu_memory_utilization=share) for share in (0.24, 0.5)]
    assert shares[0] == shares[1], "no share of the card that trains"
    assert rollout(world_size=4, **served).generation > shares[0].generation, "the completions of all processes"


def test_vllm_reads_a_prompt_once_for_all_its_completions():
    """Of 32 completions: 4 prompts in groups of 8, and 8 in groups of 4, of 100 tokens."""
    fewer, more = (rollout(use_vllm=True, num_generations=size).generation for size in (8, 4))
    assert fewer == rollout(use_vllm=True).generation
    assert more - fewer == pytest.approx((8 - 4) * 100 * 0.01 / (8 * 400))


def test_sleeping_and_tensor_parallelism():
    awake = rollout(use_vllm=True)
    assert rollout(use_vllm=True, vllm_enable_sleep_mode=True).generation == pytest.approx(awake.generation + SLEEPING)
    two = rollout(use_vllm=True, world_size=2, vllm_tensor_parallel_size=2).generation
    assert awake.generation / 2 < two < awake.generation


def test_4_bit_weights_are_widened_in_every_pass():
    job = SimpleNamespace(
        config=LlamaConfig(num_hidden_layers=2), quantization_config={}, elements=lambda: (100, 1000), dtype="bfloat16"
    )
    assert _own_weights(job, {"load": Peak(by_kind={"parameters": 3 * GIB})}) == 3 * GIB + 2 * 8 * 1000
