"""Every entry of bad_inputs.py ends as one line that names what is wrong, soon, and leaves no file behind."""

import functools
import json
import os
import time

import bad_files
import pytest
from conftest import ROOT, flags, run_forked, sweep

from hf_memopt.errors import InputError, one_line

LONGEST = 20.0  # seconds: a person waits so long for an answer and no longer


@pytest.fixture
def quiet_parser(monkeypatch):
    """One parser for all entries: making it takes longer than parsing."""
    from hf_memopt.recipe import recipe_arguments

    monkeypatch.setattr(recipe_arguments, "_parser", functools.cache(recipe_arguments._parser))


def walk(entries, tmp_path, monkeypatch) -> list[str]:
    """What is wrong with how the entries end."""
    here = tmp_path / "working folder"
    here.mkdir()
    monkeypatch.chdir(here)
    return [
        f"{entry.name}: {wrong}"
        for number, entry in enumerate(entries)
        if (wrong := _ends_badly(entry, tmp_path / str(number), here))
    ]


def _ends_badly(entry, folder, here) -> str | None:
    folder.mkdir()
    began = time.monotonic()
    said = None
    try:
        entry.act(folder)
    except InputError as error:
        said = one_line(error)
    except BaseException as error:
        return f"{type(error).__name__}: {one_line(error)[:300]}"
    if time.monotonic() - began > LONGEST:
        return f"took {time.monotonic() - began:.0f} s"
    if left := [*os.listdir(here), *(name for name in os.listdir(folder) if name == "out")]:
        return f"left {left}"
    if entry.expected is None:
        return None
    if said is None:
        return "was accepted"
    return None if entry.expected in said and len(said) < 1000 else f"said: {said[:300]}"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("maker", "every"),
    [
        *(("settings", 4), ("command_line", 1), ("nested", 1), ("configuration_files", 1), ("engine_files", 1)),
        *(("models", 1), ("commands", 1), ("model_files", 1), ("rows", 7), ("row_files", 2), sweep("settings", 1)),
        *(sweep("rows", 1), sweep("row_files", 1)),
    ],
)
def test_bad_inputs_end_as_one_line(
    maker, every, tmp_path, monkeypatch, quiet_parser, no_progress_bars, builtin_model
):
    """In `make test` some of the longest lists, spread over all fields, forms and formats."""
    entries = list(getattr(bad_files, maker)())[::every]
    wrong = walk(entries, tmp_path, monkeypatch)
    assert not wrong, f"{len(wrong)} of {len(entries)}:\n" + "\n".join(wrong)


def test_the_table_is_long():
    entries = bad_files.everything()
    assert len({entry.name for entry in entries}) == len(entries) >= 400
    assert sum(entry.expected is not None for entry in entries) >= 400


ENDS = {
    "--learning_rate inf": "learning_rate",
    "--lora.r abc --method lora": "lora.r",
    "--config run.yaml": "bf16",
    "--dataset_name rows.jsonl": "rows.jsonl: line 2",
    "--dataset_name one.jsonl --streaming true --max_steps 3": "streams 1 samples",
    "--preset rtx_4009": "unknown preset or hardware 'rtx_4009'",
    "--dataset_name empty.jsonl": "is empty",
    "--dataset_name columns.jsonl": "has the columns body; accepted are",
}


@pytest.mark.slow
def test_a_recipe_ends_with_one_line_and_code_2(tmp_path):
    for name, text in {
        "run.yaml": "bf16: [1]\n",
        "rows.jsonl": '{"text": "a"}\n{"text": 5,}\n',
        "one.jsonl": '{"prompt": "What?", "completion": " That."}\n',
        "empty.jsonl": "",
        "columns.jsonl": '{"body": "x"}\n',
    }.items():
        (tmp_path / name).write_text(text)
    usual = flags(preset="cpu", output_dir="out", effective_batch_size=4, per_device_train_batch_size=2)
    for words, expected in ENDS.items():
        done = run_forked("python", ROOT / "recipes" / "sft.py", *usual, *words.split(), cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert expected in line and not (tmp_path / "out").exists(), words


OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}


@pytest.mark.parametrize(
    "words",
    [
        *(("doctor",), ("estimate",), ("plan",), ("dry-run",), ("report",), ("migrate",)),
        *(("plan", "qwen3-0.6b", "--hardware", "rtx_3060", "--dataset"), ("estimate", "qwen3-0.6b", "--strategy")),
        ("estimate", "qwen3-0.6b", "--hardware"),
    ],
)
def test_no_files_name_is_as_long(words, command):
    code, _, errors = command(*words, "a" * 300)
    assert code == 2 and len(errors.splitlines()) == 1 and "aaaa" in errors


@pytest.mark.slow
@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_a_model_s_own_code_is_never_run_whatever_stdin_says(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OWN_CODE))
    (tmp_path / "configuration_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = run_forked("hf-memopt", command, tmp_path, cwd=tmp_path, stdin="y\n" * 9)
    assert done.returncode == 2 and "code that comes with it" in done.stderr and not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_no_call_leaves_trust_remote_code_open():
    """transformers asks on stdin where it is None, and a pipe may answer."""
    import ast

    loading = ("from_pretrained", "from_config")
    for file in sorted((ROOT / "hf_memopt").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in loading:
                owner = ast.unparse(node.func.value)
                if owner.startswith(("Auto", "auto")) and owner != "AutoHfQuantizer":
                    assert any(one.arg == "trust_remote_code" for one in node.keywords), (file, node.lineno)


def test_a_mixed_column_keeps_texts_that_are_json(tmp_path, no_progress_bars):
    """datasets would read `"true"` as True and `"[1, 2]"` as a list where other rows' content is a list."""
    from hf_memopt.data.sources import load_rows

    ask = {"role": "user", "content": [{"type": "text", "text": "Two plus "}, {"type": "text", "text": "two?"}]}
    answers = ["4.", "true", '{"a": 1}', "[1, 2]", '"q"', "null", "Four."]
    rows = [{"messages": [ask, {"role": "assistant", "content": answer}]} for answer in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name in ("rows.jsonl", "rows.json"):
        for streaming in (False, True):
            read, _, _ = load_rows(str(tmp_path / name), held_out=0, streaming=streaming)
            assert sorted(row["messages"][1]["content"] for row in read) == sorted(answers)
            assert all(row["messages"][0] == ask for row in read)


def test_cells_of_csv_are_texts(tmp_path, no_progress_bars):
    from hf_memopt.data.sources import load_rows

    (tmp_path / "rows.csv").write_text("prompt,completion\n2 + 2,4\nNothing?,None\nNot?,NA\n")
    for streaming in (False, True):
        read, _, _ = load_rows(str(tmp_path / "rows.csv"), held_out=0, streaming=streaming)
        assert sorted(row["completion"] for row in read) == ["4", "NA", "None"]


@pytest.mark.parametrize(("rows", "held_out", "left"), [(1, 0.05, 1), (3, 0.05, 2), (250, 0.05, 238), (3, 2, 1)])
def test_a_short_stream_keeps_rows_to_train_on(rows, held_out, left, jsonl, no_progress_bars):
    from hf_memopt.data.sources import load_rows

    source = jsonl([{"text": f"Text {number}."} for number in range(rows)])
    train, test, _ = load_rows(source, held_out=held_out, streaming=True)
    assert len(list(train)) == left and len(list(test or ())) == rows - left
    with pytest.raises(InputError, match=f"leaves none of the {rows} rows"):
        load_rows(source, held_out=rows, streaming=True)


def test_doctor_lists_every_fault_with_its_line(tmp_path, command):
    text = "distributed_type: FSDP\nnum_proceses: 8\nmixed_precision: no\nfsdp_config:\n  fsdp_versio: 2\n"
    (tmp_path / "bad.yaml").write_text(text)
    (tmp_path / "bad.json").write_text('{\n\t"zero_optimization": {\n\t\t"stag": 3,\n\t\t"stage": "x"\n\t}\n}\n')
    code, out, err = command("doctor", tmp_path / "bad.yaml", tmp_path / "bad.json")
    lines = err.splitlines()
    assert code == 2 and not out and all(line.startswith("error: ") for line in lines)
    expected = [
        ("bad.yaml: line 2", "did you mean 'num_processes'"),
        ("bad.yaml: line 3", "mixed_precision"),
        ("bad.yaml: line 5", "did you mean 'fsdp_version'"),
        ("bad.json: line 3", "did you mean 'stage'"),
        ("bad.json: line 4", "stage"),
        ("bad.json: ", "neither train_batch_size nor train_micro_batch_size_per_gpu"),
    ]
    assert len(lines) == len(expected)
    for line, (place, said) in zip(lines, expected, strict=True):
        assert place in line and said in line
    code, out, _ = command("doctor", tmp_path / "bad.yaml", "--json")
    assert code == 2 and [fault["line"] for fault in json.loads(out)["faults"]] == [2, 3, 5]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "distributed_type: FSPD\n", ["line 1: distributed_type='FSPD' is unknown: did you mean 'FSDP'?"]),
        (
            "b.yaml",
            "distributed_type: MULTIGPU\nnum_proceses: 2\nmixed_precision: bf17\nfsdp_config:\n  fsdp_versoin: 2\n",
            [
                "line 1: distributed_type='MULTIGPU' is unknown: did you mean 'MULTI_GPU'?",
                "did you mean 'num_processes'?",
                "line 3: mixed_precision='bf17' is unknown: did you mean 'bf16'? valid are no, fp8, fp16, bf16",
                "did you mean 'fsdp_version'?",
            ],
        ),
        ("c.yaml", "a:\n   b: 1\n  c: 2\n", ["line 3: not readable as YAML: expected <block end>"]),
        ("README.md", "# A title\n\n```\npip install it\n```\n", ["is neither an accelerate configuration (.yaml)"]),
        ("notes.txt", "some words\n", ["is neither an accelerate configuration (.yaml)"]),
    ],
)
def test_doctor_says_what_is_true_of_a_file(name, text, said, tmp_path):
    from hf_memopt.compatibility.config_files import find_faults

    (tmp_path / name).write_text(text)
    faults = find_faults(tmp_path / name)
    assert len(faults) == len(said)
    for fault, part in zip(faults, said, strict=True):
        assert part in str(fault)


def test_a_configuration_may_have_any_name(tmp_path):
    from hf_memopt.compatibility.config_files import find_faults

    (tmp_path / "default").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n")
    assert find_faults(tmp_path / "default") == []
