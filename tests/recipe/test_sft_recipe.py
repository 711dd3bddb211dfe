"""recipes/sft.py on TRL's trainer: which tokens the loss is on, and what it refuses before it trains."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from hf_memopt.errors import InputError
from hf_memopt.recipe import answers, summary
from hf_memopt.recipe.answers import check_samples

CHAT = [
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three plus three?"},
    {"role": "assistant", "content": "Six."},
]
MESSAGES = {"messages": CHAT}
TEXTS = {"prompt": "Two plus two is", "completion": " four."}
# It rewrites earlier turns, and marks nothing.
REWRITING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content if loop.last or m.role == 'user' else m.content[:1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def prepared(recipe, jsonl, tmp_path, monkeypatch, builtin_model):
    """The trainer of recipes/sft.py on rows, and a function that says what a sample trains."""
    monkeypatch.setattr(summary, "announce", lambda *_: None)  # which predicts, and prints

    def prepare(*rows, template=None, more=()):
        tokenizer = AutoTokenizer.from_pretrained(builtin_model)
        if template is not None:
            tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        argv = ["--preset", "cpu", "--held_out", "0", "--output_dir", str(tmp_path / "out"), "--dry_run"]
        argv += ["--tokenizer_name", str(tmp_path / "tokenizer"), "--dataset_name", jsonl(list(rows)), *more]
        trainer = recipe("sft")(argv)

        def trained(row) -> str:
            return tokenizer.decode([label for label in row["labels"] if label != -100])

        return trainer, [trained(row) for row in trainer.train_dataset]

    return prepare


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("row", "more", "trained"),
    [
        (MESSAGES, (), "Four.<|end|>\nSix.<|end|>\n"),
        (TEXTS, (), " four.<|end|>"),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, (), "Six.<|end|>\n"),
        ({"instruction": "Add.", "input": "2 + 2", "output": "Four."}, (), "Four.<|end|>\n"),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4."}]}, (), "4.<|end|>\n"),
        ({"text": "Every word counts."}, (), "Every word counts.<|end|>"),
        (TEXTS, ("--completion_only_loss", "false"), "Two plus two is four.<|end|>"),
        ({"messages": CHAT[:2]}, ("--assistant_only_loss", "false"), "<|user|>\nWhat is two plus two?<|end|>\n"),
    ],
)
def test_the_loss_is_on_answers_unless_said_otherwise(row, more, trained, prepared):
    _, (found,) = prepared(row, more=more)
    assert found == trained or (more == ("--assistant_only_loss", "false") and found.startswith(trained))


def test_without_marks_each_answer_is_a_sample(prepared, caplog):
    """Every answer is trained once, with the turns before it as the model will see them."""
    trainer, trained = prepared(MESSAGES, template=REWRITING)
    assert trained == ["Four.\n", "Six.\n"] and not trainer.args.assistant_only_loss
    assert "the chat template does not mark answers" in caplog.text


def test_a_template_that_trl_knows_is_trained_whole(prepared):
    from trl.chat_template_utils import qwen3_chat_template

    trainer, (trained,) = prepared(MESSAGES, template=qwen3_chat_template)
    assert trainer.args.assistant_only_loss and "Four." in trained and "Six." in trained and "plus" not in trained


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([MESSAGES], {"template": ""}, "no chat template for rows of messages"),
        (
            [{"prompt": "word " * 300, "completion": "lost"}],
            {},
            "no row of data set .* has an answer within 256 tokens",
        ),
        ([TEXTS], {"more": ("--assistant_only_loss", "true")}, "SFTTrainer: .*not conversational"),
        ([MESSAGES], {"template": REWRITING, "more": ("--assistant_only_loss", "true")}, "SFTTrainer: .*generation"),
        ([TEXTS], {"more": ("--loss_chunk_size", "64")}, "loss_chunk_size goes without"),
        ([TEXTS], {"more": ("--dataset_text_field", "body")}, "dataset_text_field is not taken.*name the column text"),
        ([TEXTS], {"more": ("--chat_template_path", "a.jinja")}, "chat_template_path is not taken.*tokenizer_name"),
        ([TEXTS] * 9, {"more": ("--packing", "--packing_strategy", "wrapped")}, "packing_strategy=wrapped"),
        ([{"prompt": CHAT[:2], "completion": CHAT[2:3]}], {}, "row 0: completion has no answer"),
    ],
)
def test_what_is_refused(rows, settings, said, prepared):
    with pytest.raises(InputError, match=said):
        prepared(*rows, **settings)


def test_long_rows_are_cut_and_rows_without_an_answer_left_out(prepared, caplog):
    lost, long = {"prompt": "word " * 300, "completion": "lost"}, {"prompt": "a", "completion": "word " * 300}
    trainer, _ = prepared(lost, long)
    assert [len(row["input_ids"]) for row in trainer.train_dataset] == [256]
    assert "1 of 2 rows dropped: no answer within max_length=256" in caplog.text


def _rows_that_are_dropped_or_cut_are_said(columns, says, caplog):
    trainer = SimpleNamespace(train_dataset=Dataset.from_dict(columns), eval_dataset=None)
    job = SimpleNamespace(
        recipe=SimpleNamespace(dataset_name="rows"),
        args=SimpleNamespace(max_length=4),
        bad_rows=SimpleNamespace(counts={}),
        given=(),
    )
    caplog.clear()
    check_samples(job, trainer, 4)
    assert ("rows fill max_length" in caplog.text) == bool(says) and says in caplog.text and not job.bad_rows.counts
    caplog.clear()
    check_samples(job, trainer, 6)
    assert "2 of 6 rows dropped" in caplog.text and list(job.bad_rows.counts.values()) == [2]


def test_rows_that_are_dropped_or_cut_are_said(caplog, subtests):
    for columns, says in [
        ({"input_ids": [[1] * 4, [1] * 3, [1] * 5, [1]]}, "2 of 4 rows fill max_length=4"),
        ({"input_ids": [[1] * 3] * 4}, ""),
        ({"text": ["a"] * 4}, ""),
    ]:
        with subtests.test(says=says):
            _rows_that_are_dropped_or_cut_are_said(columns, says, caplog)


def test_no_sample_left_ends_the_run_and_none_held_out_does_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(answers, "remove_new_folders", lambda job: None)
    none, some = Dataset.from_dict({"input_ids": []}), Dataset.from_dict({"input_ids": [[1]]})
    job = SimpleNamespace(recipe=SimpleNamespace(dataset_name="rows"), args=SimpleNamespace(max_length=4), given=())
    for train, held_out, given in ((none, some, ()), (some, none, ("held_out",))):
        job.given = given
        with pytest.raises(InputError, match="no row of data set 'rows' has an answer within 4 tokens"):
            check_samples(job, SimpleNamespace(train_dataset=train, eval_dataset=held_out, args=None), 1)
    job.given, evaluated = (), []
    monkeypatch.setattr(answers, "evaluate_nothing", evaluated.append)
    trainer = SimpleNamespace(train_dataset=some, eval_dataset=none, args="its arguments")
    check_samples(job, trainer, 1)
    assert trainer.eval_dataset is None and evaluated == ["its arguments"]
