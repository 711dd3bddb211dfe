"""Run folders that are damaged, of other versions, or by somebody else: a result, or one line that says what."""

import json

import pytest
from runs import ENDED, RECOVERED, reading, report, write_run

from hf_memopt.errors import InputError
from hf_memopt.files import write_whole
from hf_memopt.monitor.callback import LOG_FILE
from hf_memopt.reports.advice import advise
from hf_memopt.reports.log import MOST_EVENTS, MOST_READINGS, Events, Readings, read_log
from hf_memopt.reports.next_steps import suggest_next_steps
from hf_memopt.reports.run import LOG, OOM, REPORT_FILE, read_run
from hf_memopt.reports.run_report import compare_page, figures, run_page

HUGE = 10**400
DEEP = "[" * 3000 + "]" * 3000


def line(**changes) -> str:
    return json.dumps(reading(1) | changes)


def ended(**changes) -> str:
    return json.dumps(ENDED | changes)


def reported(**changes) -> str:
    return json.dumps(report(**changes))


# File, content, and what the error names; None where the page can be made.
DAMAGED = [
    (LOG, line(step=None), "step is missing"),
    (LOG, line(peak_allocated=None), "peak_allocated is missing"),
    (LOG, line(allocated="9 GiB"), "allocated is '9 GiB', not a number of bytes"),
    (LOG, line(allocated=float("nan")), "allocated is nan"),
    (LOG, line(allocated=2**64), "allocated is 18446744073709551616"),
    (LOG, line(allocated=HUGE), "allocated is"),
    (LOG, line(allocated=-1), "allocated is -1"),
    (LOG, line(allocated=True), "allocated is True"),
    (LOG, line(time="now"), "time is 'now', not a time in seconds"),
    (LOG, line(step=1.5), "step is 1.5"),
    (LOG, line(phase=["train"]), "phase is list, not a text"),
    (LOG, line(status={"x": 1}), "status is dict"),
    (LOG, line(capacity=[1]), "capacity is list"),
    (LOG, line(tokens_per_second="fast"), "tokens_per_second is 'fast'"),
    (LOG, line() + "\n" + line(step="2"), "line 2: step is '2'"),
    (LOG, line(capacity=None), None),
    (LOG, line(free=None, tokens_per_second=None, status=None), None),
    (LOG, line(capacity=0, peak_allocated=0, allocated=0), None),
    (LOG, line(phase="[/x] \x1b[31m \ud800 $x^$"), None),
    (LOG, '{"event": 5}', "event is 5, not a text"),
    (LOG, '{"event": "oom_recovered", "step": "one"}', "step is 'one'"),
    (LOG, '{"event": "oom_recovered", "step": null}', None),
    (LOG, '{"event": "oom_recovered"}', None),
    (LOG, '{"event": null}', None),
    (LOG, json.dumps({"event": "of another version", "step": 3, "nested": {"a": [1]}}), None),
    (LOG, json.dumps(RECOVERED | {"shapes": [1]}), "shapes is list, not an object"),
    (LOG, json.dumps(RECOVERED | {"shapes": {"a": 3}}), "shapes.a is 3, not a list"),
    (LOG, json.dumps(RECOVERED | {"micro_batch_after": "4"}), "micro_batch_after is '4'"),
    (LOG, json.dumps(RECOVERED | {"message": 3}), "message is 3"),
    (LOG, json.dumps({"event": "memory_grows", "step": 1, "label": []}), "label is list"),
    (LOG, json.dumps({"event": "micro_batch_lowered", "step": 1, "utilization": "all"}), "utilization is 'all'"),
    (LOG, DEEP + "\n" + line(), None),
    (LOG, "[1]\n3\nnull\n" + line(), None),
    (LOG, line() + '\n{"step": 50, "ph', None),
    (LOG, "\x00\xff" * 1000, None),
    (LOG, "no json\n" * 3, "none of its 3 lines is a JSON object"),
    (LOG, "", None),
    (REPORT_FILE, "", "not readable as JSON"),
    (REPORT_FILE, "{", "not readable as JSON"),
    (REPORT_FILE, "[]", "holds a list"),
    (REPORT_FILE, DEEP, "not readable as JSON"),
    (REPORT_FILE, "\x00\x01", "not readable as JSON"),
    (REPORT_FILE, "{}", None),
    (REPORT_FILE, reported(measured=[1]), "measured is list, not an object"),
    (REPORT_FILE, reported(measured={"peak_allocated_bytes": "much"}), "measured.peak_allocated_bytes is 'much'"),
    (REPORT_FILE, reported(measured={"phases": {"forward": None}}), "measured.phases.forward is None"),
    (REPORT_FILE, reported(estimate=[1]), "estimate is list"),
    (REPORT_FILE, reported(estimate={"breakdown": {"of another version": 5}}), None),
    (REPORT_FILE, reported(estimate={"notes": "one"}), "estimate.notes is 'one', not a list"),
    (REPORT_FILE, reported(predicted_timeline=[["load"]]), "predicted_timeline[0] is list, not a phase and its bytes"),
    (REPORT_FILE, reported(predicted_timeline=[["load", float("inf")]]), "predicted_timeline[0][1] is inf"),
    (REPORT_FILE, reported(hardware="a card"), "hardware is 'a card'"),
    (REPORT_FILE, reported(versions=["2.13"]), "versions is list"),
    (REPORT_FILE, reported(held_out_loss=[3.0]), "held_out_loss is list"),
    (REPORT_FILE, reported(held_out_loss={"0": "low"}), "held_out_loss.0 is 'low'"),
    (REPORT_FILE, reported(held_out_loss={"0": float("nan")}), None),
    (REPORT_FILE, reported(events={"event": "x"}), "events is dict, not a list"),
    (REPORT_FILE, reported(events=[3]), "events[0] is 3, not an object"),
    (REPORT_FILE, reported(global_step="40"), "global_step is '40'"),
    (REPORT_FILE, reported(settings=[]), "settings is list"),
    (REPORT_FILE, reported(settings={"x": {"y": [1]}}), None),
    (REPORT_FILE, reported(memory_arguments={"warning_threshold": "high"}), "memory_arguments.warning_threshold"),
    (REPORT_FILE, reported(model="[/x] <b> \x1b[2J \ud800"), None),
    (REPORT_FILE, json.dumps(dict.fromkeys(report())), None),
    (OOM, "{torn", "not readable as JSON"),
    (OOM, ended(kind="of another version"), "kind is 'of another version', not one of device"),
    (OOM, ended(step="seven"), "step is 'seven'"),
    (OOM, ended(next=[{"saved_bytes": "much"}]), "next[0].saved_bytes is 'much'"),
    (OOM, ended(next="a change"), "next is 'a change', not a list"),
    (OOM, ended(next=[{}]), None),
    (OOM, ended(held_bytes={"parameters": None}), "held_bytes.parameters is None"),
    (OOM, json.dumps(dict.fromkeys(ENDED) | {"event": "out_of_memory"}), None),
    (OOM, '{"event": "out_of_memory"}', None),
    (OOM, ended(message="[/x] \x1b[31m\n\ud800"), None),
]


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("name", "content", "error"), DAMAGED)
def test_a_damaged_file_is_one_line_or_a_page(name, content, error, tmp_path):
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    if error is None:
        run = read_run(tmp_path)
        text = run_page(run)
        compare_page([run, run])
        assert suggest_next_steps(run) and figures(run)
        write_whole(tmp_path / "page.html", text)
        advise(str(tmp_path))
        return
    with pytest.raises(InputError) as refused:
        read_run(tmp_path)
    assert error in str(refused.value) and name in str(refused.value)
    assert (
        "delete" in str(refused.value)
        or "not readable as JSON" in str(refused.value)
        or "holds a" in str(refused.value)
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (LOG, line(step=None), "step is missing"),
        (LOG, line(phase="[/x]"), None),
        (REPORT_FILE, reported(preset="[/x]", events=[{"event": "[/x]", "step": 1}]), None),
        (REPORT_FILE, reported(estimate=[1]), "estimate is list"),
        (OOM, ended(kind="x"), "kind is 'x'"),
        (OOM, ended(message="[/x] \x1b[31m"), None),
    ],
)
def test_the_command_line(name, content, error, tmp_path, command):
    (tmp_path / name).write_text(content)
    for words in (
        ("monitor", tmp_path, "--once"),
        ("monitor", tmp_path, "--json"),
        ("report", tmp_path),
        ("advise", tmp_path),
    ):
        code, output, errors = command(*words)
        if code == 2:
            assert error and error in errors and len(errors.splitlines()) == 1 and not output
            assert not (tmp_path / "memory_report.html").exists()
        else:
            assert code in (0, 1) and not errors and "\x1b" not in output
            assert words[0] == "advise" or not error


def test_folders_and_links_in_the_files_places(tmp_path):
    (tmp_path / LOG).mkdir()
    with pytest.raises(InputError, match=f"{LOG} is a folder: give a file"):
        read_run(tmp_path)
    (tmp_path / LOG).rmdir()
    (tmp_path / REPORT_FILE).symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="has none of"):
        read_run(tmp_path)


@pytest.mark.slow
def test_the_page_goes_where_it_can(tmp_path, command):
    one = write_run(tmp_path / "one", report(), [reading(1)])
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    for output in (
        tmp_path / "folder.html",
        tmp_path / "file" / "x.html",
        tmp_path / "file" / "y" / "x.html",
        tmp_path / f"{'n' * 300}.html",
    ):
        code, printed, errors = command("report", one, "--output", output)
        assert (code, printed) == (2, "") and len(errors.splitlines()) == 1, errors
    code, _, errors = command("report", one, f"{one}/../one")
    assert code == 2 and "more than once" in errors


@pytest.mark.slow
def test_names_of_folders_are_shown_as_they_are(tmp_path, command):
    """Bytes that are no UTF-8, markup, control characters, and what matplotlib takes for a formula."""
    one, other = tmp_path / "[/x] \udcff \x1b[31m", tmp_path / "$x^$"
    for folder in (one, other):
        write_run(folder, report(), [reading(1), reading(2)])
    for words in (("report", one), ("monitor", one, "--once"), ("report", one, other, "--output", one / "both.html")):
        code, output, errors = command(*words)
        assert code == 0 and not errors and "\x1b" not in output, errors
        output.encode()


def test_a_run_that_ends_is_not_failed_by_what_an_older_one_left(tmp_path, capsys):
    from hf_memopt.recipe import summary

    (tmp_path / LOG).write_text(line(step=None))
    summary._write_page(str(tmp_path))
    assert "no HTML report" in capsys.readouterr().out


# ---- long runs


def test_of_a_long_log_each_stretchs_fullest_stays():
    readings = Readings(limit=100)
    for step in range(10_000):
        readings.add({"step": step, "time": step, "allocated": 5 if step == 7777 else step % 2, "peak_allocated": 5})
    kept = readings.to_list()
    assert readings.seen == 10_000 and 100 <= len(kept) <= 200
    assert (kept[0]["step"], kept[-1]["step"]) == (0, 9999)
    assert 7777 in [one["step"] for one in kept]
    assert [one["step"] for one in kept] == sorted(one["step"] for one in kept)


def test_of_very_many_events_the_latest_stay_and_all_count():
    events = Events(limit=10)
    for step in range(25):
        events.add({"event": "oom_recovered", "step": step})
    assert [event["step"] for event in events.to_list()] == list(range(15, 25))
    assert events.left_out == {"oom_recovered": 15}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_very_long_log_makes_a_page_of_bounded_size(tmp_path):
    lines = 3 * MOST_READINGS
    with (tmp_path / LOG).open("w") as file:
        for step in range(lines):
            file.write(json.dumps(reading(step)) + "\n" + json.dumps(RECOVERED | {"step": step}) + "\n")
    run = read_run(tmp_path)
    assert len(run.readings) <= 2 * MOST_READINGS and len(run.events) <= MOST_EVENTS
    assert run.logged == lines and figures(run)["recovered_out_of_memory"] == lines
    assert figures(run)["steps"] == lines - 1
    assert f"{len(run.readings)} of {lines} readings" in run_page(run)


def test_only_the_logs_end_is_read(tmp_path):
    (tmp_path / LOG).write_text("".join(json.dumps(reading(step)) + "\n" for step in range(100)))
    readings, _ = read_log(tmp_path / LOG, largest=2000)
    assert readings.to_list()[-1]["step"] == 99 and 0 < readings.seen < 10


def test_a_bad_line_is_named_by_its_place(tmp_path):
    line, bad = json.dumps(reading(1)) + "\n", json.dumps(reading(2) | {"allocated": "x"}) + "\n"
    (tmp_path / LOG).write_text(3 * line + bad)
    for largest, place in ((10**6, "line 4: "), (len(line + bad), "line 2 of its end: ")):
        with pytest.raises(InputError, match=f"{LOG} {place}allocated"):
            read_log(tmp_path / LOG, largest)


def test_a_file_without_a_json_object_is_no_log(tmp_path):
    (tmp_path / LOG).write_text("torn\n[1]\n")
    with pytest.raises(InputError, match="none of its 2 lines is a JSON object"):
        read_log(tmp_path / LOG)
    for text in ("", "torn\n", "[1]\n{}\n"):
        (tmp_path / LOG).write_text(text)
        assert read_log(tmp_path / LOG)[0].to_list() == []


def test_the_log_has_one_name():
    assert LOG == LOG_FILE
