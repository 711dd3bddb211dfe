"""A run as a page. In a browser: tests/ui/test_pages.py; what the recipes write: tests/recipe/test_recipes.py."""

import base64
import json
import struct
import xml.etree.ElementTree as ElementTree

import pytest
from runs import ENDED, RECOVERED, reading, report, write_run

from hf_memopt import charts
from hf_memopt.estimator.accounting.ledger import KINDS, ROLLOUT_PHASES, WEIGHT_SYNC
from hf_memopt.oom.events import describe_event
from hf_memopt.reports.next_steps import larger_batch, suggest_next_steps
from hf_memopt.reports.run import read_run
from hf_memopt.reports.run_report import compare_page, differences, figures, run_page
from hf_memopt.units import size

PHASES = ("load", "forward", "forward", "backward", "forward", "backward", "optimizer", "forward", "backward")
TIMELINE = [(phase, 2**30) for phase in PHASES]
READINGS = [reading(0, "eval", speed=None), *(reading(step) for step in range(10, 50, 10)), reading(40, "save")]


@pytest.mark.slow
def test_everything_is_on_the_page(tmp_path):
    run = read_run(write_run(tmp_path / "one", report(), READINGS))
    text = run_page(run)
    for told in (
        "Ran 40 steps of a/model on 2 × NVIDIA GeForce RTX 4090. Peak 18.00 GiB allocated, measured; predicted 18.00 "
        "GiB (0.0 %). Recovered",
        "RTX 4090",
        "emergency",
        "97%",
        "23.28 GiB",
        "activations",
        "step 4: out of memory in backward, recovered: 8 → 4",
        "1,000",
        "1.5000",
        "per_device_train_batch_size",
        "2.13.0",
        "chunks of down to 4 samples",
        "a note &lt;b&gt;",
    ):
        assert told in text, told
    assert "<script" not in text and "http://" not in text.replace("http://www.w3.org", "")
    for part in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_the_end_of_a_run(tmp_path):
    run = read_run(write_run(tmp_path, report(), READINGS, ended=ENDED))
    text = run_page(run)
    assert "Ended out of memory in forward of step 8: it fitted for 7 steps" in text
    steps = suggest_next_steps(run)
    assert steps[0] == "loss_chunk_size=512: predicted to save 3.00 GiB."
    assert "out/checkpoint-7" in steps[1]


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"events": []}, "Nothing"),
        ({"events": [], "measured": {"peak_allocated_bytes": 2**31, "peak_reserved_bytes": 2**31}}, "Only 8%"),
        (
            {"events": [], "measured": {"peak_allocated_bytes": 2**34, "peak_reserved_bytes": 23 * 2**30}},
            "expandable_segments",
        ),
        (
            {"events": [], "measured": {"peak_allocated_bytes": 23 * 2**30, "peak_reserved_bytes": 23 * 2**30}},
            "96% full",
        ),
        (
            {
                "events": [],
                "hardware": {"memory_bytes": 25 * 2**30},
                "measured": {"peak_allocated_bytes": 23 * 2**30, "peak_reserved_bytes": 23 * 2**30},
            },
            "Nothing",  # 92 %
        ),
        ({"events": [{"event": "memory_grows", "step": 3, "label": "leak"}]}, "Memory grew (leak)"),
        ({"events": [RECOVERED]}, "per_device_train_batch_size=4"),
    ],
)
def test_what_to_try_next(changed, advice, tmp_path):
    assert advice in suggest_next_steps(read_run(write_run(tmp_path, report(**changed))))[0]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            {
                "event": "micro_batch_lowered",
                "status": "critical",
                "utilization": 0.953,
                "micro_batch_before": 8,
                "micro_batch_after": 4,
            },
            "step 10: memory critical at 95%: batch reduced from 8 to 4 samples at once",
        ),
        (
            {"event": "micro_batch_restored", "piece_elements": 512, "samples_at_once": 4},
            "step 10: memory stayed low: batch restored to 4 samples at once",
        ),
        (
            {"event": "micro_batch_restored", "piece_elements": None},
            "step 10: memory stayed low: batch restored to more samples at once",
        ),
        ({"event": "memory_grows", "label": "leak"}, "step 10: memory grows: leak"),
        (
            {
                "event": "effective_batch_kept",
                "effective_batch_size": 32,
                "world_size": 2,
                "gradient_accumulation_steps": 4,
            },
            "step 10: effective batch size kept at 32, on 2 process(es): gradient_accumulation_steps=4",
        ),
        ({"event": "of another version", "field": 1}, "step 10: of another version: field=1"),
    ],
)
def test_events_are_sentences(event, words):
    assert describe_event({"step": 9, "process": 0, **event}) == words


@pytest.mark.slow
def test_a_log_alone_is_enough(tmp_path):
    """Of a plain Trainer with MemoryCallback; the last line of a killed run is torn; older runs in it are left out."""
    write_run(tmp_path, readings=[reading(50, peak=23.0), *READINGS])
    with (tmp_path / "memory_log.jsonl").open("a") as file:
        file.write('{"step": 50, "ph')
    run = read_run(tmp_path)
    assert len(run.readings) == len(READINGS)
    assert "Ran 40 steps. Peak 18.00 GiB" in run_page(run)


@pytest.mark.slow
def test_what_is_written_is_escaped(tmp_path):
    bad = "<img src=x onerror=alert(1)>"
    events = [{"event": bad, "step": 3, "of another version": bad}, RECOVERED | {"message": bad}]
    text = run_page(read_run(write_run(tmp_path, report(model=bad, preset=bad, events=events), READINGS)))
    assert "<img" not in text and "&lt;img" in text


@pytest.mark.slow
def test_runs_side_by_side(tmp_path):
    one = write_run(tmp_path / "one", report(), READINGS)
    other = write_run(tmp_path / "other", report(method="qlora", global_step=30), READINGS)
    runs = [read_run(one), read_run(other)]
    assert differences(runs) == {"method": ["lora", "qlora"]}
    text = compare_page(runs)
    assert text.index('<th scope="col">one') < text.index('<th scope="col">other') and "qlora" in text


@pytest.mark.slow
def test_the_command_line(tmp_path, command, monkeypatch):
    one = write_run(tmp_path / "one", report(), READINGS)
    other = write_run(tmp_path / "other", report(method="qlora"), READINGS)
    code, output, _ = command("report", one)
    assert code == 0 and "18.00 GiB" in output and (one / "memory_report.html").is_file()
    code, output, _ = command("report", one, other, "--output", tmp_path / "new" / "both.html", "--json")
    told = json.loads(output)
    assert code == 0 and told["differences"] == {"method": ["lora", "qlora"]}
    assert told["runs"][str(one)]["peak_allocated_bytes"] == 18 * 2**30
    assert (tmp_path / "new" / "both.html").is_file()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "memory_report.json").write_text("[1]")
    damaged = write_run(tmp_path / "damaged", report(estimate=[1]), READINGS)
    for wrong in (
        *((tmp_path / "none",), (tmp_path,), (tmp_path / "bad",), (damaged,), (one, "--output", tmp_path / "x.txt")),
    ):
        code, output, errors = command("report", *wrong)
        assert (code, output) == (2, "") and len(errors.splitlines()) == 1


def test_sizes_for_people(subtests):
    for value, told in [
        *((0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (3 * 2**20, "3.0 MiB"), (2**30, "1.00 GiB")),
        (None, "unknown"),
    ]:
        with subtests.test(value=str(value)):
            assert size(value) == told


@pytest.mark.slow
def test_figures_have_units_and_the_training_time(tmp_path, command):
    folder = write_run(tmp_path / "one", report(train_seconds=3725.0, data_wait_share=0.00584), READINGS)
    _, output, _ = command("report", folder)
    shown = dict(line.strip("│ ").split("│") for line in output.splitlines() if line.count("│") == 3)
    shown = {name.strip(): value.strip() for name, value in shown.items()}
    assert shown["data wait share"] == "1%" and shown["training time"] == "62 min"
    assert all(len(value) < 16 for value in shown.values()), "no figure with sixteen digits"
    assert "training time" in (folder / "memory_report.html").read_text()
    alone = read_run(write_run(tmp_path / "alone", readings=READINGS))
    assert figures(alone)["training_time_seconds"] == 40.0  # what the readings span


@pytest.mark.slow
@pytest.mark.parametrize(("peak", "unit"), [(0.2, "MiB"), (18.0, "GiB")])
def test_axes_have_the_unit_of_the_job(peak, unit, tmp_path):
    readings = [reading(step, allocated=peak / 2, peak=peak) for step in range(0, 40, 10)]
    text = run_page(read_run(write_run(tmp_path, readings=readings)))
    assert f">{unit}</text>" in text


@pytest.mark.slow
def test_what_is_numbered_in_the_timeline_is_counted_below_it(tmp_path):
    text = run_page(read_run(write_run(tmp_path, report(predicted_timeline=TIMELINE), READINGS)))
    assert "by phase, with 3 forward passes." in text and "two steps" not in text
    svg = text.split("<svg")[1].split("</svg>")[0]
    assert all(f">{number}</text>" in svg for number in (1, 2, 3)) and ">4</text>" not in svg.split("ytick")[0]


@pytest.mark.slow
def test_a_chart_in_html_is_narrow_on_phones(tmp_path):
    charts.save(tmp_path / "a.html", "a <b> × 2", lambda axes, narrow: charts.by_phase(axes, narrow, TIMELINE, 2**30))
    text = (tmp_path / "a.html").read_bytes().decode("ascii")
    assert "<figcaption>a &lt;b&gt; &#215; 2</figcaption>" in text and 'alt="a &lt;b&gt; &#215; 2"' in text
    narrow, wide = (base64.b64decode(part.split('"')[0]) for part in text.split("data:image/png;base64,")[1:])
    width, height = struct.unpack(">II", narrow[16:24])
    assert narrow[:4] == wide[:4] == b"\x89PNG" and width < 1.5 * height < struct.unpack(">I", wide[16:20])[0]


@pytest.mark.slow
def test_rows_and_videos_left_out_are_named(tmp_path):
    rows = {"total": 2000, "dropped": {"the answer is empty": 1200, "no question": 1, "damaged": 0}}
    page = run_page(read_run(write_run(tmp_path, report(rows=rows, bad_videos=["a.mp4: <torn>"]))))
    assert "Rows left out: 1,201 of 2,000: the answer is empty (1,200); no question (1)." in page
    assert "Videos left out: 1: a.mp4: &lt;torn&gt;." in page
    page = run_page(read_run(write_run(tmp_path, report(rows={"total": 9, "dropped": {}}, bad_videos=[]))))
    assert "left out" not in page


def _lightness_and_hue(colour: str) -> tuple[float, float, float]:
    """CIELAB, whose distances are those that people see."""
    rgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_one_colour_has_one_meaning():
    from itertools import combinations
    from math import dist, hypot

    parts = {name: _lightness_and_hue(colour) for name, colour in charts.PARTS.items()}
    assert {*KINDS, "temporaries", "context and allocator"} == set(parts)
    for (one, place), (other, another) in combinations(parts.items(), 2):
        assert dist(place, another) > 25, (one, other)
    for name, (lightness, *hue) in parts.items():
        assert hypot(*hue) > 14, f"{name} is grey"
        assert 40 < lightness < 62, f"{name} is seen neither on a white nor on a dark page"
    for phase, (colour, _) in charts.PHASES.items():
        assert colour == "white" or hypot(*_lightness_and_hue(colour)[1:]) < 9, f"{phase} has a part's hue"
    assert len(set(charts.PHASES.values())) == len(charts.PHASES)
    assert {*ROLLOUT_PHASES, WEIGHT_SYNC} <= set(charts.PHASES)


@pytest.mark.slow
def test_no_header_is_empty_or_keeps_a_table_wide(tmp_path):
    text = run_page(read_run(write_run(tmp_path, report(), READINGS)))
    assert 'scope="col"></th>' not in text and 'class="number"></th>' not in text
    assert "th.number { text-align: right; white-space: nowrap" not in text


def test_a_larger_batch_of_the_same_samples():
    otherwise = "a larger per_device_train_batch_size with fewer gradient_accumulation_steps"
    for batch, steps, says in (
        (4, 2, "per_device_train_batch_size=8 with gradient_accumulation_steps=1"),
        (3, 8, "per_device_train_batch_size=6 with gradient_accumulation_steps=4"),
        *((4, steps, otherwise) for steps in (3, 1, 0, None)),
        (None, 4, otherwise),
    ):
        assert larger_batch(batch, steps) == says
