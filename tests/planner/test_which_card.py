"""which_card(): the cards and boxes on which a job trains."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import frozen
import pytest
from transformers import AutoConfig

from hf_memopt import InputError, plan, which_card
from hf_memopt.cli.app import app
from hf_memopt.cli.cards import _OLD, _notes
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.measured import constant
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.planner.market import cards
from hf_memopt.planner.market.card_fits import BALANCED, SHARES
from hf_memopt.planner.market.prices import read_prices
from hf_memopt.presets.named_presets import preset_for

SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 200_000,
}
PRICES = """
currency = "€"
"RTX 3070" = 0.10
t4 = 0.20
"A100-80GB" = 1.60
"MI300X" = 2.00
"M2 8GB" = 0.05
"""


def config(layers: int = 3, **changes):
    return AutoConfig.for_model(num_hidden_layers=layers, **{**SHAPE, **changes})


def huge():
    """8.2e9 weights in one layer, quickly traced."""
    return config(layers=1, hidden_size=4096, vocab_size=1_000_000)


@pytest.fixture
def prices(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(PRICES, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """LoRA on five cards, and how often was traced."""
    file = tmp_path_factory.mktemp("prices") / "prices.toml"
    file.write_text(PRICES, encoding="utf-8")
    said: list[str] = []
    return which_card(config(), seq_len=512, method="lora", prices=str(file), tokens=10**7, say=said.append), said


@pytest.mark.slow
def test_cards_are_in_the_order_of_their_cost(answer):
    fits = answer[0].fits["lora"]
    assert {fit.device.name for fit in fits} == {"rtx_3070", "t4", "a100_80gb", "mi300x", "apple_m2_8gb"}
    assert [fit.cost for fit in fits] == sorted(fit.cost for fit in fits)
    for fit in fits:
        assert fit.hours == pytest.approx(10**7 / fit.tokens_per_second / 3600)
        assert fit.cost == pytest.approx(fit.hours * fit.price)
        assert fit.device_bytes <= fit.share * fit.device.memory * 1.01
    assert fits[0].estimated, "what is recommended is estimated in full"


@pytest.mark.slow
def test_one_trace_serves_all_cards(answer):
    # And one more the T4, whose attention keeps its scores.
    assert sum("tracing" in line for line in answer[1]) == 2
    assert sum("estimating" in line for line in answer[1]) <= cards._MOST_ESTIMATES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rtx_3070", "t4", "apple_m2_8gb"])
def test_a_card_gets_what_its_own_plan_says(answer, name):
    fit = next(fit for fit in answer[0].fits["lora"] if fit.device.name == name)
    assert fit.devices == 1
    made = plan(config(), name, effective_batch_size=32, seq_len=512, method="lora")
    balanced = next(profile for profile in made.profiles if profile.name == "balanced")
    # A sketch's speed beside an estimate's: the sketch counts a loss in chunks as one whole.
    assert fit.tokens_per_second == pytest.approx(balanced.tokens_per_second, rel=0.1)
    if fit.choice == balanced.choice:
        assert fit.device_bytes == pytest.approx(balanced.estimate.device_bytes, rel=0.1)


@pytest.mark.slow
def test_a_limit_per_hour_leaves_out_larger_boxes(prices):
    fits = which_card(config(), seq_len=512, method="lora", prices=prices, max_price=0.5, every=True).fits["lora"]
    assert {fit.name for fit in fits} == {"rtx_3070", "t4", "t4x2", "apple_m2_8gb"}


def test_boxes_are_looked_at_up_to_the_limit_per_hour(subtests):
    for per_hour, max_price, boxes in [
        *((None, None, [1, 2, 4, 8]), (None, 1.0, [1, 2, 4, 8]), ({}, 1.0, [1, 2, 4, 8])),
        *(({"t4": 0.5}, None, [1, 2, 4, 8]), ({"t4": 0.5}, 2.0, [1, 2, 4]), ({"t4": 0.5}, 1.99, [1, 2])),
        ({"t4": 0.5}, 0.49, []),
    ]:
        with subtests.test(per_hour=per_hour, max_price=max_price):
            prices = None if per_hour is None else SimpleNamespace(per_hour=per_hour)
            market = Mock(candidate=Mock(return_value=None))
            compared = cards._Comparison(prices=prices, max_price=max_price, every=True, tokens=None)
            assert compared._of_card(market, catalog()["t4"], "lora") == []
            asked = [call.args for call in market.candidate.call_args_list]
            assert asked == [(catalog()["t4"], devices, "lora") for devices in boxes]


@pytest.mark.slow
def test_where_nothing_fits_it_says_what_would(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text("rtx_3070 = 0.1")
    made = which_card(huge(), seq_len=128, effective_batch_size=8, method="full", prices=str(file))
    assert not any(made.fits.values())
    assert made.least[0] == "rtx_3070" and made.least[1] > catalog()["rtx_3070"].memory
    larger = made.instead[0]
    assert larger.method == "full" and larger.device.memory > catalog()["rtx_3070"].memory
    assert larger.price is None and larger.cost is None


def test_boxes_are_those_that_people_have():
    counts = {name: cards.boxes(catalog()[name]) for name in catalog()}
    single = {name for name, boxes in counts.items() if boxes == (1,)}
    assert {name for name in counts if "laptop" in name or name.startswith(("apple", "jetson", "dgx"))} <= single
    assert {"rtx_3070", "gtx_1080_ti", "gh200_96gb", "radeon_8060s_128gb"} <= single
    assert counts["rtx_3090"] == counts["rx_7900_xtx"] == counts["gb200_186gb"] == (1, 2, 4)
    assert counts["h100_80gb"] == counts["t4"] == counts["rtx_a6000"] == counts["mi300x"] == (1, 2, 4, 8)
    frozen.check("boxes", counts)


def test_typical_cards_have_every_kind():
    typical = cards.typical_cards()
    assert len(typical) < len(catalog()) / 2
    assert {"rtx_4090", "a100_80gb", "h100_80gb", "mi300x", "apple_m2_16gb"} <= {device.name for device in typical}
    memories = {(device.vendor, device.nominal_memory) for device in catalog().values() if device.backend != "cpu"}
    assert memories == {(device.vendor, device.nominal_memory) for device in typical}
    frozen.check("typical_cards", [device.name for device in typical])


def test_presets_of_all_cards_come_without_warnings(caplog):
    with caplog.at_level(logging.WARNING):
        for device in catalog().values():
            assert preset_for(device, "lora").hardware == device
    assert not caplog.records


def test_a_bad_price_is_named_with_its_file(tmp_path, subtests):
    for text, message in [
        *(('"RTX 9999" = 1', "unknown hardware"), ("A100 = 1", "could be")),
        *(('t4 = "cheap"', "t4='cheap' must be the price"), ("t4 = true", "t4=True must be the price")),
        *(("t4 = -1", "t4=-1 must be the price"), ("t4 = nan", "t4=nan must be the price")),
        *(("[t4]\nprice = 1", "must be the price"), ('"RTX 4090" = 1\n4090 = 2', "has a price already")),
        *(("RTX 4090 = 1", "not TOML"), ("", "no card has a price"), ("currency = 5", "currency=5 must be")),
        ("x = " + "[" * 5000, "not TOML"),
    ]:
        with subtests.test(text=str(text)):
            file = tmp_path / "mine.toml"
            file.write_text(text)
            with pytest.raises(InputError, match=r"mine\.toml") as error:
                read_prices(str(file))
            assert message in str(error.value)


def test_prices_take_names_as_people_write_them(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text('"RTX 4090" = 0.4\nH100-80GB-PCIe = 2\n"M4 Max 128GB" = 0')
    assert read_prices(str(file)).per_hour == {"rtx_4090": 0.4, "h100_pcie_80gb": 2.0, "apple_m4_max_128gb": 0.0}


def test_bad_arguments_are_refused(subtests):
    for arguments, message in [
        ({"max_price": 1.0}, "max_price=1 needs prices"),
        ({"max_price": float("nan")}, "max_price=nan must be above 0"),
        ({"tokens": 0}, "tokens=0 must be above 0"),
        ({"method": "magic"}, "unknown method"),
        ({"seq_len": 0}, "seq_len=0"),  # beyond the positions of a RoPE model is a note
        ({"effective_batch_size": 0}, "effective_batch_size=0"),
        ({"prices": "nowhere.toml"}, "nowhere.toml"),
    ]:
        with subtests.test(arguments=str(arguments)), pytest.raises(InputError, match=message):
            which_card(config(), **{"method": "lora", **arguments})


def run(capsys, *words) -> tuple[int, str, str]:
    try:
        code = app([str(word) for word in words], standalone_mode=False)
    except InputError as error:
        return 2, "", str(error)
    output = capsys.readouterr()
    return code or 0, output.out, output.err


@pytest.mark.slow
def test_the_table_fits_a_terminal(capsys, tmp_path, prices, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    config().save_pretrained(tmp_path / "model")
    words = ("plan", tmp_path / "model", "--hardware", "any", "--method", "lora", "--seq-len", 512, "--prices", prices)
    code, output, errors = run(capsys, *words, "--tokens", "10M")
    assert code == 0 and "tracing lora training" in errors
    lines = [line for line in output.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    assert "cheapest: " in output and "10M tokens" in output and "€/h" in output
    code, output, _ = run(capsys, *words, "--max-price", "0.01", "--epochs", 3, "--samples", "2k", "--json")
    answer = json.loads(output)
    assert answer["tokens"] == 3 * 2000 * 512
    assert code == 1 and answer["cards"] == [] and answer["instead"][0]["price_per_hour"] > 0.01


def test_options_that_do_not_go_together_are_refused(capsys, subtests):
    for words, message in [
        (("--prices", "p.toml"), "--prices compares cards: add --hardware any"),
        (("--all",), "--all compares cards"),
        (("--hardware", "any", "--memory", 8), "--memory belongs to one card"),
        (("--hardware", "ANY", "--strategy", "zero3"), "--strategy belongs to one card"),
        (("--hardware", "any", "--export", "there"), "--export belongs to one card"),
        (("--hardware", "any", "--frames", "max"), "--frames max is counted for one card"),
        (("--hardware", "any", "--tokens", "many"), "'many' must be a number"),
        (("--hardware", "any", "--epochs", 3), "epochs=3 needs the number of samples"),
        (("--hardware", "any", "--tokens", "10M", "--samples", "5k"), "say the same"),
    ]:
        with subtests.test(words=str(words)):
            code, _, error = run(capsys, "plan", "gpt2", *words)
            assert code == 2 and message in error


def test_shares_are_those_of_the_profiles():
    assert SHARES[BALANCED] == PLAN_PROFILES["balanced"][1]


def test_an_estimate_counts_for_the_cards_whose_bytes_it_has():
    """What it exceeds its sketch by counts for all cards that compute alike."""
    spec = JobSpec(model=config(), config=config(), method="lora", seq_len=64, effective_batch_size=4)
    market = cards._Market(spec, lambda text: None)
    made, same, alike, other = (
        market.candidate(catalog()[name], 1, "lora").search for name in ("rtx_4090", "rtx_4080", "h100_80gb", "mi300x")
    )
    choice = next(choice for choice in made.choices if choice in other.choices and choice in alike.choices)
    made.estimate([choice])
    assert [[*search.estimates] for search in (made, same, alike, other)] == [[choice], [choice], [], []]
    assert made.sketch_errors and made.sketch_errors == alike.sketch_errors and not other.sketch_errors
    assert alike.needs(choice) - made.needs(choice) == constant("context_bytes", alike.sketch.job.device).value - (
        constant("context_bytes", made.sketch.job.device).value
    )
    assert not any(search.quick for search in (made, same, alike, other))


def test_cards_whose_attention_keeps_scores_have_a_sketch_of_their_own():
    """Below compute capability 8.0 no fused kernel takes grouped heads: V100, T4, RTX 20."""
    spec = JobSpec(model=config(), config=config(), method="lora", seq_len=1024, effective_batch_size=4)
    market = cards._Market(spec, lambda text: None)
    old, new = (market.candidate(catalog()[name], 1, "lora").search for name in ("v100_32gb", "rtx_3090"))
    largest = max(old.choices, key=lambda choice: (choice.micro_batch, -choice.checkpointed, old.needs(choice)))
    pair = ((old, largest), (new, replace(largest, dtype="bfloat16")))
    with_scores, without = (search.needs(choice) for search, choice in pair)
    for search, choice in pair:
        search.estimate([choice])
    held, plain = (search.estimates[choice].peak_allocated_bytes for search, choice in pair)
    scores, sketched = held - plain, with_scores - without
    assert scores > 2**27 and sketched == pytest.approx(scores, rel=0.05)


def test_what_is_said_of_old_cards():
    for names, said in ((["mi300x", "apple_m2_16gb", "t4"], []), (["v100_32gb", "t4", "gtx_1080_ti"], [0, 2])):
        fits = [SimpleNamespace(device=catalog()[name]) for name in names]
        notes = [*_notes(SimpleNamespace(prices=None), fits, True)]
        old = _OLD.format(cards=", ".join(names[place] for place in said))
        assert (old in notes) == bool(said)
        assert len(notes) == len([*_notes(SimpleNamespace(prices=None), fits[:0], True)]) + 1 + bool(said)
