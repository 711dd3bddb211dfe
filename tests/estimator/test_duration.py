"""Time and cost of a training run, from its predicted speed."""

from types import SimpleNamespace

import pytest

from hf_memopt.errors import InputError
from hf_memopt.estimator.timing.duration import Amount, duration, parse_count, run_duration, training_steps
from hf_memopt.units import read_number


def test_time_and_cost_are_tokens_over_speed():
    found = duration(36_000_000, 1000, price=2.5, devices=4)
    assert (found.tokens, found.seconds, found.hours, found.cost, found.steps) == (36_000_000, 36_000, 10, 100, None)
    assert duration(1000, 10).cost is None and duration(3600, 1, price=2.5).cost == 2.5
    found = run_duration(100, 36.0, 3.0, 2)
    assert (found.tokens, found.seconds, found.cost, found.steps) == (None, 3600, 6, 100)
    assert run_duration(100, 36.0, 3.0).cost == 3
    assert run_duration(None, 36.0) is run_duration(100, None) is None


def test_amounts_of_training(subtests):
    """Samples over all epochs, a part of one rounded up, at full length; None where nothing is asked."""
    for asked, samples, tokens in [
        *(({}, None, None), ({"tokens": 5}, None, 5), ({"samples": 100}, 100, 102_400)),
        *(({"samples": 100, "epochs": 2.5}, 250, 256_000), ({"samples": 3, "epochs": 0.5}, 2, 2048)),
        *(({"samples": 0, "epochs": 3}, 0, 0), ({"tokens": 5, "samples": 100}, "say the same", None)),
        *(({"tokens": 0, "epochs": 1}, "say the same", None), ({"epochs": 2.5}, "epochs=2.5 needs", None)),
        *(({"price": 0.5}, "price=0.5 needs", None), ({"price": 0.5, "samples": 0}, 0, 0)),
        ({"price": 0.5, "tokens": 0}, None, 0),
    ]:
        with subtests.test(str(asked)):
            if isinstance(samples, str):
                with pytest.raises(InputError, match=samples):
                    Amount(**asked)
            else:
                amount = Amount(**asked)
                assert (amount.count_samples(), amount.count_tokens(1024)) == (samples, tokens)

    assert (parse_count("1", "tokens"), parse_count("9e17", "tokens")) == (1, 9 * 10**17)
    for wrong in ("0.9", "1e18"):
        with pytest.raises(InputError, match="must be a number such as"):
            parse_count(wrong, "tokens")


def test_steps_of_a_trainer_are_counted():
    """A real Trainer counts the same: test_speed.test_a_scripts_steps_are_those_that_its_trainer_counts."""
    settings = {"max_steps": -1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    settings |= {"dataloader_drop_last": False, "num_train_epochs": 1}
    for more, samples, devices, steps in [
        *(({}, 12, 1, 2), ({}, 13, 1, 3), ({}, 12, 2, 1), ({}, 13, 2, 2), ({}, 1, 1, 1)),
        *(({"dataloader_drop_last": True}, 13, 1, 2), ({"dataloader_drop_last": True}, 1, 1, 1)),
        *(({"num_train_epochs": 1.5}, 13, 1, 5), ({"max_steps": 7}, 13, 1, 7), ({"max_steps": 1}, None, 1, 1)),
        *(({"max_steps": 0}, 13, 1, 3), ({}, None, 1, None)),
    ]:
        data = object() if samples is None else range(samples)
        trainer = SimpleNamespace(args=SimpleNamespace(**settings | more), train_dataset=data)
        assert training_steps(trainer, devices) == steps, (more, samples, devices)


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
    *(("1.5k tokens", "tokens", 1500), ("2k toks", "max_length", 2000), ("8 gpus", "world_size", 8)),
    *(("4 samples", "per_device_train_batch_size", 4), ("10M rows", "samples", 10**7), ("2 nodes", "machines", 2)),
    *(("5 steps", "learning_rate", None), ("10M tokens", "samples", None)),
    *(("4 gpus", "per_device_train_batch_size", None), ("24 tokens", "", None), ("7 bananas", "samples", None)),
]


def test_a_word_behind_a_number_is_of_what_is_counted(subtests):
    for text, of, number in COUNTED:
        with subtests.test(f"{text} {of} {number}"):
            assert read_number(text, of=of) == number
