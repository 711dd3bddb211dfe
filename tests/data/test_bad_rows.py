"""No row is trained on that data.md refuses: damaged rows among good ones are all found, counted alike by plan and
recipe, and left out by one switch."""

import json
import os
import random
import re

import pytest
from bad_inputs import GOOD, good_answers, spoilt_rows
from conftest import flags, sweep
from transformers import AutoTokenizer

from hf_memopt.data.bad_rows import sift
from hf_memopt.data.chat import answer_judge, find_answer_kind, to_trl
from hf_memopt.data.pairs import check_prompt, pair_judge
from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import check_text
from hf_memopt.data.turns import is_blank
from hf_memopt.errors import InputError
from hf_memopt.planner.samples.data_use import find_use

ASK, SAY, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "2 + 2?"), ("assistant", "4."), ("assistant", "5."))
)
EMPTY = [{"role": "assistant", "content": ""}]
PAIRS = {"prompt": [ASK], "chosen": [SAY], "rejected": [OTHER]}
PROMPTS = {"prompt": "2 + 2?", "completion": "4"}
BAD_PAIRS = {
    "no chosen": {**PAIRS, "chosen": None},
    "an empty chosen": {**PAIRS, "chosen": EMPTY},
    "a blank rejected": {**PAIRS, "rejected": [{"role": "assistant", "content": " "}]},
    "a null part": {**PAIRS, "rejected": [{"role": "assistant", "content": [{"type": "text", "text": None}]}]},
    "the same twice": {**PAIRS, "rejected": [SAY]},
    "a text among messages": {**PAIRS, "chosen": "4."},
    "no prompt": {**PAIRS, "prompt": []},
    "an unknown role": {**PAIRS, "prompt": [{"role": "zork", "content": "2 + 2?"}]},
    "a number for content": {**PAIRS, "chosen": [{"role": "assistant", "content": 4}]},
    "parts, of which TRL writes the Python text": {
        **PAIRS,
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "4."}]}],
    },
    "a key that the template leaves out": {**PAIRS, "chosen": [{**SAY, "reasoning_content": "Adding."}]},
    "a question as the answer": {**PAIRS, "chosen": [ASK]},
    "a prompt that ends with an answer": {**PAIRS, "prompt": [ASK, SAY]},
    "tools that the template leaves out": {**PAIRS, "tools": [{"type": "function", "function": {"name": "add"}}]},
    "tools that are none": {**PAIRS, "tools": "add"},
    "template settings that are none": {**PAIRS, "chat_template_kwargs": "x"},
    "nothing that both begin with": {**PAIRS, "prompt": None},
}
BAD_PROMPTS = {
    "no prompt": {**PROMPTS, "prompt": None},
    "a blank prompt": {**PROMPTS, "prompt": " \n"},
    "an empty answer": {**PROMPTS, "completion": ""},
    "a number": {**PROMPTS, "completion": 4},
    "an empty message": {**PROMPTS, "prompt": [{"role": "user", "content": ""}]},
    "a message without content": {**PROMPTS, "prompt": [{"role": "user"}]},
    "a column that GRPO leaves out": {**PROMPTS, "system": "Be brief."},
    "an image": {**PROMPTS, "images": ["a.png"]},
    "parts": {**PROMPTS, "completion": [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]},
}
ANSWERS = {form: {wrong: row for of, wrong, row in spoilt_rows() if of == form} for form in GOOD}
DAMAGE = {**ANSWERS, "pairs": BAD_PAIRS, "prompts": BAD_PROMPTS}
GOOD_ROWS = {**GOOD, "pairs": PAIRS, "prompts": PROMPTS}
TASKS = {"pairs": "dpo", "prompts": "grpo", "text": "sft"}


@pytest.fixture(scope="module")
def tokenizer(builtin_model):
    return AutoTokenizer.from_pretrained(builtin_model)


def sifted(form: str, source: str, tokenizer, skip: bool):
    """Rows as the recipe of a form keeps them, and its bad rows."""
    rows, _, found = load_rows(source, held_out=0, pairs=form == "pairs")
    judges = {"pairs": lambda: pair_judge(tokenizer), "prompts": lambda: check_prompt}
    judge = judges.get(form, lambda: answer_judge(found, find_answer_kind(rows, found), tokenizer))()
    (kept,), bad = sift([rows], judge, source, skip)
    if form not in judges:
        kept = to_trl(kept, found, find_answer_kind(kept, found))
    return kept, bad


def damaged(form: str, seed: int, count: int = 40) -> tuple[list[dict], dict[int, str]]:
    """Rows of a form of which some are damaged, and what is wrong with those, by number."""
    draw = random.Random(seed)
    wrong = {number: draw.choice(list(DAMAGE[form])) for number in draw.sample(range(count), draw.randint(1, 12))}
    return [DAMAGE[form][wrong[number]] if number in wrong else GOOD_ROWS[form] for number in range(count)], wrong


@pytest.mark.drawn(3)
@pytest.mark.parametrize("form", DAMAGE)
@pytest.mark.parametrize("draw", [0, *map(sweep, range(1, 12))])
def test_all_damaged_rows_are_found(form, draw, jsonl, tokenizer, builtin_model, no_progress_bars):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where the test fails
    rows, wrong = damaged(form, seed)
    source = str(jsonl(rows, "rows.jsonl"))
    with pytest.raises(InputError) as refused:
        sifted(form, source, tokenizer, skip=False)
    said = str(refused.value)
    assert f": {len(wrong)} of 40 rows cannot be trained on; " in said and "--skip_bad_rows" in said, wrong
    assert re.match(rf".*: line {min(wrong) + 1}, row {min(wrong)}: ", said), "the first row is named first"
    kept, bad = sifted(form, source, tokenizer, skip=True)
    assert (len(kept), bad.count, bad.total) == (40 - len(wrong), len(wrong), 40), wrong
    whole, _ = sifted(form, str(jsonl([GOOD_ROWS[form]], "good.jsonl")), tokenizer, skip=False)
    assert all(row == whole[0] for row in kept.select_columns(whole.column_names)), "the good ones are left"
    with pytest.raises(InputError) as planned:
        find_use(source, TASKS.get(form), model=str(builtin_model))
    assert str(planned.value).replace("--skip-bad-rows", "--skip_bad_rows") == said, "plan and recipe say the same"
    use = find_use(source, TASKS.get(form), model=str(builtin_model), skip=True)
    assert (use.samples, use.bad.counts) == (len(kept), bad.counts)


def test_each_kind_of_damage_is_counted(jsonl, tokenizer, no_progress_bars):
    rows = [GOOD["alpaca"]] * 200
    for number in (31, 120, 150):
        rows[number] = {**GOOD["alpaca"], "output": ""}
    rows[30] = {**GOOD["alpaca"], "instruction": 7}
    with pytest.raises(InputError) as refused:
        sifted("alpaca", str(jsonl(rows)), tokenizer, skip=False)
    assert re.fullmatch(
        r"\S+rows\.jsonl: line 31, row 30: instruction must be a text, not 7 \(1 row\); "
        r"\S+rows\.jsonl: line 32, row 31: output is empty: fill it, or remove the row \(3 rows\): "
        r"4 of 200 rows cannot be trained on; correct them, or leave them out by --skip_bad_rows",
        str(refused.value),
    )
    _, bad = sifted("alpaca", str(jsonl(rows)), tokenizer, skip=True)
    assert bad.counts == {"instruction must be a text, not 7": 1, "output is empty: fill it, or remove the row": 3}


def test_reasons_are_counted_apart(jsonl, tokenizer, no_progress_bars):
    """Although the same line of code refuses them."""
    rows = [GOOD["prompt/completion"]] * 30
    rows[3], rows[8] = {**rows[0], "prompt": ""}, {**rows[0], "completion": ""}
    rows[9], rows[11] = {**rows[0], "weight": 1}, {**rows[0], "label": 1}
    _, bad = sifted("prompt/completion", str(jsonl(rows)), tokenizer, skip=True)
    assert [reason.split(":")[0][:22] for reason in bad.counts] == [
        "prompt is empty",
        "completion is empty",
        "the column 'weight' wo",
        "the column 'label' wou",
    ]


@pytest.mark.parametrize("held_out", [0, 1, 0.05, 0.5])
def test_rows_have_the_numbers_of_the_file(held_out, jsonl, tokenizer, no_progress_bars):
    """However few are held out, whichever of them those are."""
    rows = [{**GOOD["prompt/completion"], "completion": "" if number == 15 else "4"} for number in range(20)]
    with pytest.raises(InputError, match="line 16, row 15: "):
        good_answers(str(jsonl(rows)), tokenizer, held_out=held_out)


def test_what_is_left_is_held_out(jsonl, tokenizer, no_progress_bars):
    rows = [{**GOOD["prompt/completion"], "completion": "" if number % 2 else "4"} for number in range(20)]
    train, _ = good_answers(str(jsonl(rows)), tokenizer, skip=True, held_out=4)
    assert len(train) == 6, "of ten good rows"


def test_what_cannot_be_seen_is_no_text():
    for letter in ["\u200b", "\ufeff", "\u00ad", "\u200e", "\u2800", "\u3164", "\x00", "\u00a0", "\u3000"]:
        seen = is_blank(letter * 2), is_blank(f" {letter}\n"), is_blank(f"{letter}a"), is_blank("…")
        assert seen == (True, True, False, False), letter


def test_few_pairs_among_damaged_ones_are_pairs(jsonl, no_progress_bars):
    rows = [PAIRS, *[{**PAIRS, "chosen": None}] * 3]
    with pytest.raises(InputError, match=r"row 1: chosen is empty.* 3 of 4 rows cannot be trained on"):
        find_use(str(jsonl(rows)))
    assert find_use(str(jsonl(rows)), skip=True).samples == 1


def test_where_no_row_is_good_there_is_nothing_to_skip(jsonl, tokenizer, no_progress_bars):
    with pytest.raises(InputError, match=r"output is empty.* \(2 rows\): none of 2 rows can be trained on"):
        sifted("alpaca", str(jsonl([{**GOOD["alpaca"], "output": ""}] * 2)), tokenizer, skip=True)


def test_what_may_be_empty(jsonl, tokenizer, no_progress_bars):
    """A call without words, what a tool returns, instructions, and a text of pretraining, whose end is a token."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    )
    messages = [{"role": "system", "content": ""}, ASK, call, {"role": "tool", "content": ""}, SAY]
    kept, bad = sifted("messages", str(jsonl([{"messages": messages}])), tokenizer, skip=False)
    assert bad.count == 0 and [one["content"] for one in kept[0]["messages"]] == ["", "2 + 2?", "", "", "4."]
    assert check_text({"text": ""}, "row 0") is None
    with pytest.raises(InputError, match="row 0: text must be a text, not None"):
        check_text({"text": None}, "row 0")


def test_a_stream_leaves_bad_rows_out_as_they_come(jsonl, tokenizer, caplog):
    rows = [GOOD["alpaca"], {**GOOD["alpaca"], "output": ""}] * 3
    kept, _ = good_answers(str(jsonl(rows)), tokenizer, skip=True, streaming=True)
    assert len(list(kept)) == 3 and caplog.text.count("output is empty") == 1, "each kind is said once"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("sft", [*[{"prompt": f"{n}?", "completion": "yes"} for n in range(7)], {"prompt": "?", "completion": ""}]),
        ("pretrain", [*[{"text": f"{n} is a number. " * 20} for n in range(7)], {"text": None}]),
        ("dpo", [*[{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(7)], BAD_PAIRS["no chosen"]]),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL 1.16 reads names that transformers 5.23 deprecates
@pytest.mark.slow
def test_recipes_train_on_what_is_left(name, rows, recipe, jsonl, tmp_path, builtin_model, capsys):
    quick = {"preset": "cpu", "model_name_or_path": builtin_model, "max_steps": 1, "max_length": 32, "held_out": 0}
    words = [*flags(**quick), "--dataset_name", str(jsonl(rows)), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(InputError, match="1 of 8 rows cannot be trained on"):
        recipe(name)(words)
    assert not (tmp_path / "out").exists()
    trainer = recipe(name)([*words, "--skip_bad_rows"])
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["rows"]["total"] == 8 and list(report["rows"]["dropped"].values()) == [1]
    assert "held out, 1 left out" in capsys.readouterr().out and trainer.state.global_step == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_pairs_that_are_too_long_are_named(recipe, jsonl, tmp_path, builtin_model, caplog):
    """TRL drops them without a word, and ends in the loader where none is left."""
    long = {"prompt": "w " * 200, "chosen": "a", "rejected": "b"}
    good = {**long, "prompt": "?"}
    quick = {"preset": "cpu", "model_name_or_path": builtin_model, "max_steps": 1, "max_length": 64, "held_out": 0}
    words = [*flags(**quick), "--output_dir", str(tmp_path / "out"), "--dataset_name"]
    recipe("dpo")([*words, str(jsonl([long, good, good]))])
    assert "1 of 3 rows dropped: no answer within max_length=64" in caplog.text
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["rows"]["dropped"] == {"no answer within max_length=64": 1}
    with pytest.raises(InputError, match="has an answer within 64 tokens: raise max_length"):
        recipe("dpo")([*words, str(jsonl([long], "long.jsonl")), "--overwrite"])


def test_a_folder_of_files_is_read_as_its_files(tmp_path, no_progress_bars):
    """`datasets` would make texts of numbers, and other texts of texts that are JSON themselves."""
    rows = [
        {"prompt": "a", "completion": '"Yes"'},
        {"prompt": 5, "completion": "4."},
        {"prompt": "b", "completion": True},
    ]
    for name, content in {"a.jsonl": rows[:1], "b.jsonl": rows[1:], "test.jsonl": rows[:1]}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (tmp_path / "README.txt").write_text("No rows.")
    train, test, _ = load_rows(str(tmp_path), held_out_split="test")
    assert (list(train), list(test)) == (rows, rows[:1])
    streamed, _, _ = load_rows(str(tmp_path), held_out=0, streaming=True, buffer=1)
    assert sorted(map(str, streamed)) == sorted(map(str, rows))


def test_files_of_one_name_are_two(tmp_path, monkeypatch, no_progress_bars):
    """Although `datasets` keeps what it read by the arguments, and these have the same size and time."""
    for word in ("one", "two"):
        (tmp_path / word).mkdir()
        file = tmp_path / word / "rows.jsonl"
        file.write_text(json.dumps({"text": word}))
        os.utime(file, (1, 1))
        monkeypatch.chdir(tmp_path / word)
        assert list(load_rows("rows.jsonl", held_out=0)[0]) == [{"text": word}]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_packed_samples_without_an_answer_are_left_out(recipe, jsonl, tmp_path, builtin_model, caplog):
    rows = [*[{"prompt": "w " * 200, "completion": "x"}] * 3, *[{"prompt": "a", "completion": "b"}] * 3]
    quick = {"preset": "cpu", "model_name_or_path": builtin_model, "max_steps": 1, "max_length": 64, "held_out": 0}
    words = [*flags(**quick, packing="true"), "--output_dir", str(tmp_path / "out"), "--dataset_name"]
    trainer = recipe("sft")([*words, str(jsonl(rows))])
    assert len(trainer.train_dataset) == 1 and "3 of 4 packed samples dropped" in caplog.text
    with pytest.raises(InputError, match="no packed sample has an answer within 64 tokens: raise max_length"):
        recipe("sft")([*words, str(jsonl(rows[:3], "long.jsonl")), "--overwrite"])
