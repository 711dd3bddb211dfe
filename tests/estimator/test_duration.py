"""Time and cost of a training run, from its predicted speed."""

import pytest

from hf_memopt.estimator.timing.duration import Amount, duration


def test_time_and_cost_are_tokens_over_speed():
    found = duration(36_000_000, 1000, price=2.5, devices=4)
    assert (found.seconds, found.hours, found.cost) == (36_000, 10, 100)
    assert duration(1000, 10).cost is None


def test_epochs_count_every_sample_at_full_length():
    assert Amount(tokens=5).count_tokens(1024) == 5
    assert Amount(samples=100).count_tokens(1024) == 102_400
    assert Amount(samples=100, epochs=2.5).count_tokens(8) == 2000
    assert Amount().count_tokens(1024) is None


@pytest.mark.slow
def test_rows_of_a_data_set_are_an_amount(command, jsonl):
    """Their number is known when they are read; without any amount a price is still refused."""
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    asked = ("plan", "smollm2-135m", "--hardware", "rtx_3060", "--method", "lora", "--quick", "--price", "1")
    code, out, _ = command(*asked, "--dataset", jsonl([{"messages": turns}] * 40))
    assert code == 0 and "40 samples" in out and "cost in total" in out
    code, _, err = command(*asked)
    assert code == 2 and "price=1 needs an amount of training" in err


COUNTED = [
    ("1.5k tokens", "tokens", 1500),
    ("2k toks", "max_length", 2000),
    ("8 gpus", "world_size", 8),
    ("4 samples", "per_device_train_batch_size", 4),
    ("10M rows", "samples", 10**7),
    ("2 nodes", "machines", 2),
    ("5 steps", "learning_rate", None),
    ("10M tokens", "samples", None),
    ("4 gpus", "per_device_train_batch_size", None),
    ("24 tokens", "", None),
    ("7 bananas", "samples", None),
]


def test_a_word_behind_a_number_is_of_what_is_counted(subtests):
    for text, of, number in COUNTED:
        with subtests.test(f"{text} {of} {number}"):
            from hf_memopt.units import read_number

            assert read_number(text, of=of) == number
