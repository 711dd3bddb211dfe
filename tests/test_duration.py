"""Time and cost of a training run, from its predicted speed."""

import pytest

from hf_memopt.errors import InputError
from hf_memopt.estimator.duration import Amount, duration, parse_count, time_text


@pytest.mark.parametrize(
    ("text", "count"),
    [("10M", 10**7), ("2.5B", 25 * 10**8), ("300k", 300_000), ("1e9", 10**9), ("1_000_000", 10**6), ("7", 7)],
)
def test_counts_are_read_as_people_write_them(text, count):
    assert parse_count(text, "tokens") == count


@pytest.mark.parametrize("text", ["", "0", "-3", "M", "ten", "1e99", "0.5", "nan", "10 MB"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(InputError, match="must be a number such as"):
        parse_count(text, "samples")


def test_time_and_cost_are_tokens_over_speed():
    found = duration(36_000_000, 1000, price=2.5, devices=4)
    assert (found.seconds, found.hours, found.cost) == (36_000, 10, 100)
    assert duration(1000, 10).cost is None


def test_epochs_count_every_sample_at_full_length():
    assert Amount(tokens=5).count_tokens(1024) == 5
    assert Amount(samples=100).count_tokens(1024) == 102_400
    assert Amount(samples=100, epochs=2.5).count_tokens(8) == 2000
    assert Amount().count_tokens(1024) is None


@pytest.mark.parametrize("amount", [{"tokens": 5, "epochs": 1}, {"epochs": 3}, {"price": 2.0}])
def test_an_amount_that_is_said_twice_or_not_at_all_is_refused(amount):
    with pytest.raises(InputError):
        Amount(**amount)


def test_times_are_written_in_the_unit_that_people_use():
    assert [time_text(seconds) for seconds in (40, 700, 19_000, 270_000, 86400 * 1234)] == [
        "40 s",
        "12 min",
        "5.3 h",
        "3.1 days",
        "1,200 days",
    ]


@pytest.mark.slow
def test_rows_of_a_data_set_are_an_amount(command, jsonl):
    """Their number is known when they are read; without any amount a price is still refused."""
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    asked = ("plan", "smollm2-135m", "--hardware", "rtx_3060", "--method", "lora", "--quick", "--price", "1")
    code, out, _ = command(*asked, "--dataset", jsonl([{"messages": turns}] * 40))
    assert code == 0 and "40 samples" in out and "cost in total" in out
    code, _, err = command(*asked)
    assert code == 2 and "price=1 needs an amount of training" in err


@pytest.mark.parametrize(
    ("text", "thousand", "number"),
    [
        ("2k", 1024, 2048),
        ("2k", 1000, 2000),
        ("2,048", 1000, 2048),
        ("1e3", 1000, 1000),
        ("1e999", 1000, None),
        ("1,5", 1000, None),
        ("k", 1000, None),
        ("-1", 1000, -1),
    ],
)
def test_numbers_as_people_write_them(text, thousand, number):
    from hf_memopt.units import read_number

    assert read_number(text, thousand) == number


@pytest.mark.parametrize(
    ("text", "of", "number"),
    [
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
    ],
)
def test_a_word_behind_a_number_is_of_what_is_counted(text, of, number):
    from hf_memopt.units import read_number

    assert read_number(text, of=of) == number


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GB", 24 * 10**9), ("24 GiB", 24 * 2**30), ("512M", 512 * 10**6), ("24", None), ("GB", None)],
)
def test_bytes_as_people_write_them(text, count):
    from hf_memopt.units import read_bytes

    assert read_bytes(text) == count
