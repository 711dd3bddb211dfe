"""No row is trained on that data.md refuses: damaged rows among good ones are all found, counted alike by plan and
recipe, and left out by one switch."""

import json
import random
import re

import pytest
from bad_inputs import GOOD, spoilt_rows
from conftest import flags, sweep
from transformers import AutoTokenizer

from hf_memopt.data.answers import find_answer_kind, to_trl
from hf_memopt.data.bad_rows import sift
from hf_memopt.data.pairs import check_pair, check_prompt
from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import check_text
from hf_memopt.errors import InputError
from hf_memopt.planner.data_use import find_use

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
}
BAD_PROMPTS = {
    "no prompt": {**PROMPTS, "prompt": None},
    "a blank prompt": {**PROMPTS, "prompt": " \n"},
    "an empty answer": {**PROMPTS, "completion": ""},
    "a number": {**PROMPTS, "completion": 4},
    "an empty message": {**PROMPTS, "prompt": [{"role": "user", "content": ""}]},
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
    if form in ("pairs", "prompts"):
        (kept,), bad = sift([rows], check_pair if form == "pairs" else check_prompt, source, skip)
    else:
        (kept,), bad = to_trl([rows], found, find_answer_kind(rows, found), tokenizer, source, skip=skip)
    return kept, bad


def damaged(form: str, seed: int, count: int = 40) -> tuple[list[dict], dict[int, str]]:
    """Rows of a form of which some are damaged, and what is wrong with those, by number."""
    draw = random.Random(seed)
    wrong = {number: draw.choice(list(DAMAGE[form])) for number in draw.sample(range(count), draw.randint(1, 12))}
    return [DAMAGE[form][wrong[number]] if number in wrong else GOOD_ROWS[form] for number in range(count)], wrong


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
    assert bad.counts == {
        "instruction must be a text, not 7": 1,
        "output is empty: fill it, or remove the row": 3,
    }


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
    train, _, form = load_rows(str(jsonl(rows)), held_out=0, streaming=True)
    (kept,), _ = to_trl([train], form, find_answer_kind(train, form), tokenizer, "rows", skip=True)
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
