"""The short answer: a verdict first, within 24 lines of 80 columns, and a command that can be pasted."""

import json
import re
import shlex
from random import Random

import pytest
from transformers import AutoTokenizer

from hf_memopt import InputError
from hf_memopt.cli.answer_printed import command_lines, memory_bar, note_lines, one_each, paragraph, print_answer
from hf_memopt.estimator.result import Estimate
from hf_memopt.planner.samples.data_use import Use, find_use
from hf_memopt.terminal import PlainStream, clear_status, show_status
from hf_memopt.units import GIB, MIB, size


def _lines(out: str) -> list[str]:
    lines = out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, out
    return lines


def _pasted(lines: list[str]) -> list[str]:
    """The words that a shell reads of the lines behind "run"."""
    first = next(index for index, line in enumerate(lines) if line.startswith("run "))
    last = next(index for index in range(first, len(lines)) if not lines[index].endswith("\\"))
    return shlex.split("\n".join(line[7:] for line in lines[first : last + 1]).replace("\\\n", ""))


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --config_file a.yaml recipes/sft.py --preset a100_80gb --dataset_name 'my chats.jsonl'",
        'accelerate launch --multi_gpu --num_machines 2 --machine_rank "$MACHINE_RANK" recipes/sft.py --x ' + "y" * 90,
        "python train.py --name 'a\tb' --other 'a\nb' "
        + " ".join(f"--option_{number} {number}" for number in range(40)),
    ],
)
def test_a_command_in_lines_is_the_command(command):
    lines = command_lines(command)
    assert _pasted(lines) == shlex.split(command) and len(lines) > 1
    assert all(len(line) <= 80 or "y" * 90 in line for line in lines)
    assert not any(line.endswith("--option_7 \\") for line in lines), "an option and its value stand together"


def test_no_line_ends_within_quotes():
    """Options whose values are JSON, paths with spaces and variables, at every place of a line."""
    random = Random(0)
    values = ["1", "a.yaml", '{"use_reentrant": false, "every_n_layers": 2}', "my own chats.jsonl", "it's", '"$RANK"']
    for _ in range(300):
        words = ["accelerate", "launch"]
        for number in range(random.randint(1, 30)):
            value = random.choice(values)
            words += [f"--{'o' * random.randint(1, 30)}{number}", value if "$" in value else shlex.quote(value)]
        assert _pasted(command_lines(" ".join(words))) == shlex.split(" ".join(words))


def test_reasons_give_way_to_the_command(capsys):
    head, tail = paragraph("YES"), command_lines("a " + " ".join(f"--option_{n} {n}" for n in range(40)))
    print_answer(head, one_each("not", [f"reason {n}: " + "word " * 40 for n in range(30)]), tail)
    lines = _lines(capsys.readouterr().out)
    assert lines[0] == "YES" and lines[1].startswith("not    reason 0") and lines[2].startswith("         word")
    assert set(tail) <= set(lines)
    words = " ".join(lines).split().count("word")
    assert words and words % 40 == 0, "no reason ends in the middle"


@pytest.mark.parametrize(
    ("sizes", "printed"), [([1] * 30, 24), ([20, 1, 1], 24), ([19, 3, 1], 22), ([21], 24), ([22], 3)]
)
def test_a_small_terminal_is_filled_with_whole_reasons(sizes, printed, capsys):
    print_answer(["YES"], [["reason"] * size for size in sizes], ["run"])
    lines = _lines(capsys.readouterr().out)
    assert len(lines) == printed and lines[0] == "YES" and lines[-2] == "run"


def test_parts_have_the_unit_of_the_whole():
    kinds = {"parameters": 15 * GIB, "logits": 1000 * MIB}
    bar = memory_bar(Estimate(16 * GIB, 16 * GIB, 17 * GIB, 1, "forward", kinds, {}, 24 * GIB, {}, ()))
    assert " ".join(bar[1:]).split(": ")[1].split() == (
        ["parameters", "15.00", "GiB,", "logits", "0.98", "GiB,", "allocator", "and", "context", "1.02", "GiB"]
    )
    assert not any(line.strip().startswith("GiB") for line in bar), "a number and its unit stand together"
    assert size(1000 * MIB) == "1,000.0 MiB" and size(2**10, beside=GIB) == "1.0 KiB"


def test_notes_that_every_answer_has_stand_with_the_tables():
    notes = [
        "speed: ±20% is what …",
        "a choice of this plan",
        "ordinary segments would reserve 1 GiB more",
        "reserved and device bytes follow a model of …",
    ]
    assert note_lines(notes) == ["note   a choice of this plan"]


def test_progress_goes_away(monkeypatch):
    class Terminal:
        written = ""

        def write(self, text):
            self.written += text

        def flush(self):
            pass

        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", PlainStream(terminal))
    show_status("estimating 1 of 2")
    show_status("estimating 2 of 2")
    clear_status()
    shown = terminal.written.split("\r")
    assert shown[0] == "estimating 1 of 2" and shown[2] == "estimating 2 of 2"
    assert not shown[1].strip() and not shown[3].strip() and "\n" not in terminal.written


# ---- data sets

CHAT = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
PAIR = {"chosen": "a", "rejected": "b", "prompt": "?"}
CLIP = {"type": "video", "video": "clip.mp4"}


def test_rows_say_what_they_train_for(jsonl, subtests):
    for row, asked, use in [
        (CHAT, None, Use("sft", 3, media=False)),
        ({"instruction": "a", "output": "b"}, None, Use("sft", 3, media=False)),
        ({"prompt": "a", "completion": "b"}, None, Use("sft", 3, media=False)),
        ({"prompt": "a", "completion": "b"}, "grpo", Use("grpo", 3, media=False)),
        ({"prompt": "a", "completion": "b", "label": True}, "kto", Use("kto", 3, media=False)),
        (PAIR, None, Use("dpo", 3, media=False)),
        (PAIR, "reward", Use("reward", 3, media=False)),
        ({"text": "a"}, None, Use(None, None, media=False)),  # cut into blocks: rows are no samples
        ({"text": "a"}, "sft", Use("sft", 3, media=False)),
        ({"video": "clip.mp4", "caption": "A door."}, None, Use(None, 3, media=True)),
        ({"messages": [{"role": "user", "content": [CLIP]}, CHAT["messages"][1]]}, None, Use(None, 3, media=True)),
    ]:
        with subtests.test(row=str(row)):
            assert find_use(str(jsonl([row] * 3)), asked) == use


def test_rows_that_a_recipe_refuses_are_refused(jsonl, subtests):
    for rows, asked, reason in [
        ([{"foo": 1}], None, "has the columns foo; accepted are: messages; "),
        ([{}], None, "is empty: the file has no rows"),
        ([CHAT], "dpo", "task=dpo needs chosen and rejected"),
        ([CHAT], "grpo", "task=grpo needs prompt"),
        ([CHAT, PAIR], None, "row 1: the column 'chosen' would not be trained on"),
        ([CHAT, {"id": 1}], None, "row 1: messages must be a list of messages, not None"),
        ([CHAT, {**CHAT, "label": True}], None, "row 1: the column 'label' would not be trained on"),
        ([{"caption": "A door."}], None, "has the columns caption; accepted are"),
        ([], None, "is empty"),
    ]:
        with subtests.test(rows=str(rows)), pytest.raises(InputError, match=re.escape(reason)):
            find_use(str(jsonl(rows)), asked)


@pytest.mark.slow
def test_rows_longer_than_a_sample_are_counted(jsonl, builtin_model):
    """By the model's tokenizer where it is here, whose chat template counts, too; by bytes where it is not."""
    source = str(jsonl([{"prompt": "a " * count, "completion": "b"} for count in (10, 100, 300)]))
    use = find_use(source)
    assert use.lengths == (6, 51, 151) and use.longer_than(51) == 1 and use.longer_than(50) == 2
    (note,) = use.notes(50)
    assert note.startswith("2 of 3 rows are longer than 50 tokens by 4 bytes a token, the longest has 151: ")
    assert use.to_dict(50) == {"rows": 3, "bad_rows": {}, "longer": 2, "longest": 151, "tokens_are": "estimated"}
    counted = find_use(source, model=str(builtin_model))
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    assert counted.lengths == tuple(len(tokenizer("a " * count + "b")["input_ids"]) for count in (10, 100, 300))
    assert "bytes" not in counted.notes(50)[0] and counted.notes(max(counted.lengths)) == []
    pairs = find_use(str(jsonl([{"prompt": "abcd", "chosen": "efgh", "rejected": "ijklmnop"}])))
    assert pairs.lengths == (3,), "of the longer answer, behind the prompt"
    chat = find_use(str(jsonl([CHAT])), model=str(builtin_model))
    assert chat.lengths == (len(tokenizer.apply_chat_template(CHAT["messages"], return_dict=False)),)


@pytest.mark.parametrize("kind", ["parquet", "folder", "saved"])
def test_local_data_of_any_kind_are_judged(kind, tmp_path, no_progress_bars):
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": "?", "completion": answer} for answer in ("yes", "", "no")])
    source = tmp_path / ("rows.parquet" if kind == "parquet" else "rows")
    if kind == "saved":
        rows.save_to_disk(source)
    else:
        source.mkdir() if kind == "folder" else None
        rows.to_parquet(source / "rows.parquet" if kind == "folder" else source)
    with pytest.raises(InputError, match=r"row 1: completion is empty.* 1 of 3 rows cannot be trained on"):
        find_use(str(source))
    assert find_use(str(source), skip=True) == Use("sft", 2, media=False)


def test_columns_that_are_ignored(jsonl, no_progress_bars):
    source = str(jsonl([{"prompt": "?", "completion": "yes", "label": 1}]))
    with pytest.raises(InputError, match="the column 'label' would not be trained on"):
        find_use(source)
    assert find_use(source, ignore=("label",)) == Use("sft", 1, media=False)
    with pytest.raises(InputError, match=r"unknown column of ignore_columns 'labels'\. Did you mean 'label'"):
        find_use(source, ignore=("labels",))


@pytest.mark.slow
def test_what_is_not_a_file_of_rows(tmp_path):
    assert find_use("trl-lib/Capybara") is None
    for nowhere in ("nowhere.jsonl", "nowhere.parquet", "./nowhere"):
        with pytest.raises(InputError, match="no such file or folder"):
            find_use(nowhere)
    with pytest.raises(InputError, match="is an empty folder"):
        find_use(str(tmp_path))
    (tmp_path / "Chats.JSONL").write_text("{}")
    with pytest.raises(InputError, match=r"unknown suffix '\.JSONL'"):
        find_use(str(tmp_path / "Chats.JSONL"))
    (tmp_path / "Chats.JSONL").rename(tmp_path / "a.mp4")
    with pytest.raises(InputError, match=r"a\.mp4 of 1 files without a caption"):
        find_use(str(tmp_path), with_media=True)
    (tmp_path / "a.txt").write_text("A door opens.")
    assert find_use(str(tmp_path), with_media=True) == Use(None, 1, media=True)


# ---- whole answers


@pytest.mark.parametrize(
    ("words", "code", "begin"),
    [
        (["plan", "smollm2-135m", "--hardware", "rtx_3060"], 0, "YES, with full: "),
        (["plan", "smollm2-135m", "--hardware", "rtx_4090x4", "--method", "lora"], 0, "YES, with lora: "),
        (["plan", "smollm2-135m", "--hardware", "rtx_3060", "--method", "full", "--memory", "0.2"], 1, "NO: "),
        (["estimate", "smollm2-135m", "--hardware", "rtx_3060", "--levers"], 0, "YES, it fits: "),
        (["estimate", "llama-2-7b", "--hardware", "rtx_3060", "--method", "full"], 1, "NO, it does not fit:"),
    ],
)
@pytest.mark.slow
def test_answers_fit_a_terminal(words, code, begin, command):
    made, out, err = command(*words, *(["--tokens", "10M", "--price", "0.5"] if code == 0 else []))
    lines = _lines(out)
    assert made == code and lines[0].startswith(begin), err
    if code == 0:
        assert any(line.startswith("time ") for line in lines)
    if words[0] == "plan" and code == 0:
        assert json.loads(command(*words, "--json")[1])["profiles"][1]["launch"] == " ".join(_pasted(lines))


@pytest.mark.slow
def test_the_data_stand_in_the_command(command, jsonl):
    data = jsonl([{"prompt": f"{n}?", "completion": "yes"} for n in range(8)])
    code, out, err = command("plan", "smollm2-135m", "--hardware", "rtx_3060", "--method", "lora", "--dataset", data)
    assert code == 0, err
    words = _pasted(out.splitlines())  # a longer line than a terminal's: the path of the data
    assert words[words.index("--dataset_name") + 1] == str(data) and "recipes/sft.py" in words
    assert any(line.startswith("time ") for line in out.splitlines())
    more = jsonl([{"prompt": "?", "completion": "yes" * (n > 0), "label": 1, "mask": 1} for n in range(8)])
    asked = (
        *("plan", "smollm2-135m", "--hardware", "rtx_3060", "--method", "lora", "--dataset", more, "--skip-bad-rows"),
    )
    code, out, err = command(*asked, "--ignore-columns", "label, mask")
    assert code == 0 and "--ignore_columns label mask --skip_bad_rows true" in " ".join(_pasted(out.splitlines())), err
    clips = jsonl([{"video": "a.mp4", "caption": "A door."}], "clips.jsonl")
    code, _, err = command("plan", "smollm2-135m", "--hardware", "rtx_3060", "--dataset", clips)
    assert code == 2 and "has videos or images, and smollm2-135m takes none" in err
    pairs = jsonl([PAIR] * 64, "pairs.jsonl")
    asked = ("plan", "smollm2-135m", "--hardware", "rtx_3060", "--method", "lora", "--dataset", pairs, "--json")
    made = json.loads(command(*asked)[1])
    steps = 64 / made["effective_batch_size"]
    for profile in made["profiles"]:  # a pair is two answers: by tokens of one it took half the time
        took = made["durations"][profile["profile"]]
        assert took["seconds"] == pytest.approx(steps * profile["estimate"]["step_seconds"])
    for refused in (["--hardware", "any"], ["--hardware", "rtx_3060", "--seq-len", "max"]):
        code, _, err = command("plan", "smollm2-135m", *refused, "--dataset", data)
        assert code == 2 and "leave --dataset out" in err
