"""Words for cards: every card of the catalog as people write it, alone and counted, is that card and that count."""

import itertools
import random
import re

import pytest

from hf_memopt.errors import InputError
from hf_memopt.hardware import device_names
from hf_memopt.hardware.catalog import catalog, read_devices
from hf_memopt.planner.devices import _machines

_SERIES = {"rtx", "gtx", "rx", "quadro", "arc", "apple", "pro", "radeon", "gpu", "nvidia", "amd", "intel"}
_CASES = (str, str.lower, str.upper, str.title)
_SEPARATORS = (" ", "-", "_", "")
COUNTS = (
    *("{card}", "{n}x{card}", "{n}x {card}", "{n} x {card}", "{n}× {card}", "{card}x{n}", "{card} x{n}"),
    *("{card} x {n}", "{card} * {n}", "{card}:{n}", "{card} ({n} GPUs)", "{card}, {n} gpus", "{n} of {card}"),
    *("{n}-{card}", "{n} {card}"),
)


def _spellings(key, device):
    """A card's names: the catalog's, the box's with and without brand and series, and each with its memory."""
    label = re.sub(r"\([^)]*\)|,.*", "", device.label).strip()
    parts = key.split("_")
    series = _SERIES if device.vendor != "apple" else {"apple"}  # an M1 Pro is no M1
    bare = [part for part in parts if part not in series] or parts
    written = {key, label, " ".join(parts), " ".join(bare)}
    size = f"{device.nominal_memory >> 30}GB"
    sized = {f"{name} {size}" for name in written if size.lower() not in re.sub(r"[\s_]+", "", name.lower())}
    return sorted(written | sized)


def _respelled(name, case, separator):
    """A name in another case and with other separators; digits that would run together keep theirs."""
    parts = case(name).replace("_", " ").split()
    joined = parts[0]
    for part in parts[1:]:
        runs_together = not separator and (joined[-1].isalnum() and part[0].isalnum())
        kept = runs_together and (joined[-1].isdigit() == part[0].isdigit() or joined[-1].isalpha())
        joined += (" " if kept else separator) + part
    return joined


def _family(text, count):
    """The cards that a text was taken or asked for, and the count."""
    try:
        card, devices = read_devices(text)
    except InputError as error:
        asked = ("which card?", "which of the numbers", f": {count} of them, or {count} GB?")
        assert any(question in str(error) for question in asked), (text, str(error))
        if asked[-1] in str(error):
            return _family(re.search(r"Write '([^']*)'", str(error))[1], count)  # the sentence's own fix
        found = set(re.findall(r"\w+", str(error)))
        return ({*found, *catalog()} if " more" in str(error) else found), count
    written, _ = device_names.counted(text, catalog())
    return {card, *device_names.names_meant(written, catalog())}, devices


def _counts(key):
    """Usual counts, and those that are a number of the card's own name: 4 T4."""
    return (2, 4, 8, 16, 512, *(int(number) for number in re.findall(r"\d+", key) if int(number) <= 1024))


def _cases():
    for key, device in catalog().items():
        for name in _spellings(key, device):
            words = itertools.product([key], [name], _CASES, _SEPARATORS, COUNTS)
            yield from ((*word, n) for word, n in zip(words, itertools.cycle(_counts(key)), strict=False))


def _check(case):
    key, name, change, separator, form, n = case
    text = form.format(card=_respelled(name, change, separator), n=n)
    expected = 1 if form == "{card}" else n
    family, count = _family(text, expected)
    assert key in family and count == expected, f"{text!r}: {sorted(family)[:5]} × {count}, written for {key}"


@pytest.mark.kept
@pytest.mark.slow
def test_words_for_cards():
    """Some of the words of a third of the cards, drawn anew in every run."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    for key, device in drawn.sample(sorted(catalog().items()), len(catalog()) // 3):
        spellings = _spellings(key, device)
        for form in COUNTS:
            one = (drawn.choice(spellings), drawn.choice(_CASES), drawn.choice(_SEPARATORS))
            _check((key, *one, form, drawn.choice(_counts(key))))


@pytest.mark.sweep
@pytest.mark.slow
def test_all_words_for_cards():
    wrong = []
    cases = list(_cases())
    for case in cases:
        try:
            _check(case)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, f"{len(wrong)} of {len(cases)} words:\n" + "\n".join(wrong[:40])


def test_a_card_and_its_count(subtests):
    for text, expected in [
        *(("4090x2", ("rtx_4090", 2)), ("2x4090", ("rtx_4090", 2)), ("1080 x 2", ("gtx_1080", 2))),
        *(("A2x4", ("a2", 4)), ("4 T4", ("t4", 4)), ("2 a2", ("a2", 2)), ("8 H100s", ("h100_80gb", 8))),
        *(("V100S PCIe", ("v100s_pcie_32gb", 1)), ("h100 8x", ("h100_80gb", 8))),
        *(("RTX 6000 24GB", ("quadro_rtx_6000", 1)), ("a100 80", ("a100_80gb", 1))),
        *(("m4 max 64", ("apple_m4_max_64gb", 1)), ("8xMI300X", ("mi300x", 8)), ("MI300Xx8", ("mi300x", 8))),
        *(("16GB MacBook Air M2", ("apple_m2_16gb", 1)), ("4080 mobile", ("rtx_4080_laptop", 1))),
        *(("jetson", ("jetson_orin_nano_8gb", 1)), ("4t4", ("t4", 4)), ("L4:4", ("l4", 4))),
        *(("m2 2 gpus", ("apple_m2_8gb", 2)), ("rtx 3070 * 8", ("rtx_3070", 8)), ("MI300x8", ("mi300x", 8))),
        *(("MI250x8", ("mi250", 8)), ("8x V100s", ("v100_sxm2_16gb", 8)), ("8x nvidia L40s", ("l40s", 8))),
        *(("Titan RTX + Titan RTX", ("titan_rtx", 2)), ("4090 + 2x 4090", ("rtx_4090", 3))),
        *(("dual 3090", ("rtx_3090", 2)), ("eight H100s", ("h100_80gb", 8)), ("H100 (8)", ("h100_80gb", 8))),
        *(("A100x8-80GB", ("a100_80gb", 8)), ("2x a100_80gb_x8", ("a100_80gb", 16))),
        *(("2 nodes of 8xH100", ("h100_80gb", 16)), ("kaggle 2xT4", ("t4", 2)), ("T4 (colab)", ("t4", 1))),
        *(("my 4090 w/ 24576MiB", ("rtx_4090", 1)), ("3090 (24 gigs each)", ("rtx_3090", 1))),
        *(("4070M", ("rtx_4070_laptop", 1)), ("3060 12", ("rtx_3060", 1)), ("4070tisuper", ("rtx_4070_ti_super", 1))),
        ("Apple M4 Max (40-core GPU) 128GB unified", ("apple_m4_max_128gb", 1)),
        *(("NVIDIA H100 80GB HBM3", ("h100_80gb", 1)), ("NVIDIA GH200 480GB", ("gh200_96gb", 1))),
        *(("AMD Instinct MI250X/MI250", ("mi250x", 1)), ("AMD Instinct MI300X OAM", ("mi300x", 1))),
    ]:
        with subtests.test(text=text, expected=expected):
            assert read_devices(text) == expected


def test_a_size_left_out_counts_less_than_a_word_that_is(subtests):
    for name, meant in [
        *(("rtx_4090", ["rtx_4090"]), ("3050", ["rtx_3050_6gb", "rtx_3050_8gb"])),
        *(("rtx 3080 laptop", ["rtx_3080_16gb_laptop", "rtx_3080_8gb_laptop"]), ("v100 16gb", ["v100_sxm2_16gb"])),
        ("no such card", []),
    ]:
        with subtests.test(name=name):
            assert device_names.names_meant(name, catalog()) == meant


def test_words_that_name_no_card_are_asked_about(subtests):
    for text, message in [
        ("16", "hardware='16': which card? a16, rtx_4080"),
        ("24GB", "which card? With 24 GB there are rtx_3090, rtx_3090_ti, rtx_4090"),
        ("24 GB VRAM", "With 24 GB there are rtx_3090"),
        ("2x 24GB", "which card? With 24 GB"),
        ("6000", "which card? quadro_rtx_6000, rtx_a6000, rtx_6000_ada"),
        ("rtx", "which card? rtx_3060"),
        ("laptop", "which card? rtx_3050_laptop"),
        ("RTX 3090 12GB", "no such card has 12 GB; there are rtx_3090 (24 GB)"),
        ("16 t4", "16 of them, or 16 GB? Write '16x t4' or 't4 16GB'"),
        ("0x4090", "the number of devices must be at least 1"),
        ("2000x h100", "write --hardware 'h100' --world-size 2000"),
        ("4090, 3090", "2 names of cards (rtx_4090, rtx_3090)"),
        ("4090 + 2x 3090", "2 names of cards"),
        ("4090 and 3090", "2 names of cards"),
        ("T4 4", "hardware='T4 4': 4 of them? Write '4x T4'"),
        ("16-mac mini m2", "hardware='16-mac mini m2': 16 of them, or 16 GB?"),
        ("rx 580", "unknown hardware 'rx 580'"),
        ("gtx 970", "unknown hardware 'gtx 970'"),
        ("MX450", "unknown hardware 'MX450'"),
        ("Tesla M40", "unknown hardware 'Tesla M40'"),
        ("Tesla M4", "unknown hardware 'Tesla M4'"),
        ("rtx 20", "which card? rtx_2060"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "unknown hardware"),
    ]:
        with subtests.test(text=text, message=message):
            with pytest.raises(InputError) as refused:
                read_devices(text)
            assert message in str(refused.value)


def test_a_clouds_machine_is_what_is_in_it(subtests):
    """Every name alone, as its cloud writes it, and several of them; families of machines are none."""
    devices = catalog()
    forms = {"Standard_{}": 1, "AWS {}": 1, "{} (Azure)": 1, "2x {}": 2, "2 nodes of {}": 2, "{} x4": 4}
    turns = itertools.cycle(forms.items())
    for (name, cards), (form, times) in zip(device_names._MACHINES.items(), turns, strict=False):
        count, card = cards.split("x ", 1)
        assert card in devices
        for text, number in ((name, 1), (form.format(name), times), (form.format(name.upper()), times)):
            found = device_names.counted(text, devices)
            assert (device_names.match(found[0], devices), found[1]) == (card, number * int(count)), text
    for name, expected in {
        "p5.48xlarge": ("h100_80gb", 8),
        "g5.12xlarge": ("a10g", 4),
        "g6e.24xlarge": ("l40s", 4),
        "a2-ultragpu-4g": ("a100_80gb", 4),
        "g2-standard-24": ("l4", 2),
        "Standard_ND96amsr_A100_v4": ("a100_80gb", 8),
        "gpu_8x_a100_80gb_sxm4": ("a100_80gb", 8),
        "gpu_1x_h100_pcie": ("h100_pcie_80gb", 1),
    }.items():
        with subtests.test(name):
            card, count = device_names.counted(name, devices)
            assert (device_names.match(card, devices), count) == expected
    for name in ("g5", "p5.96xlarge", "a2-highgpu-3g", "xp5.48xlarge", "p5.48xlarge.v2"):
        with pytest.raises(InputError, match=f"unknown hardware '{name}'"):
            device_names.match(device_names.counted(name, devices)[0], devices)


def test_machines_have_equally_many_devices(subtests):
    for devices, machines in [(1, 1), (8, 1), (9, 3), (12, 2), (16, 2), (24, 3), (128, 16)]:
        with subtests.test(f"{devices} {machines}"):
            assert _machines(devices) == machines


def test_devices_that_divide_into_no_machines_are_refused():
    with pytest.raises(InputError, match="11 devices do not divide into machines of at most 8: plan 8 or 16"):
        _machines(11)
