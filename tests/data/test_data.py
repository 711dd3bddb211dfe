"""Files, splits and blocks of texts, with the built-in tokenizer and rows made here."""

import json

import pytest

from hf_memopt.data import embedded
from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import packed
from hf_memopt.errors import InputError


@pytest.fixture
def tokenizer(builtin_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin_model)


@pytest.mark.slow
def test_the_corpus_is_real_text():
    texts = embedded.documents()
    assert len(texts) > 300 and sum(map(len, texts)) > 1_000_000
    assert any("assert" in text and "AssertionError" in text for text in texts)  # the language reference
    assert any(text.startswith("json\n====") and "json.dumps(" in text for text in texts)
    assert embedded.documents() is texts


@pytest.mark.slow
def test_questions_come_from_documented_functions():
    pairs = dict(embedded.questions())
    answer = pairs["What does json.dumps do?"]
    assert answer.startswith("Serialize ``obj`` to a JSON formatted ``str``") and "Signature: json.dumps(obj" in answer
    assert len(pairs) > 2000


def test_the_builtin_tokenizer_is_lossless(tokenizer):
    text = "def f(x): return x ** 2  # Größe, 大小\n\t'quoted'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 4096


def test_packing_loses_nothing_but_the_rest(tokenizer):
    from datasets import Dataset

    texts = [f"Text number {number} is here." for number in range(50)]
    blocks = packed(Dataset.from_dict({"text": texts}), tokenizer, 32)
    joined = [token for row in blocks for token in row["input_ids"]]
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert joined == expected[: len(joined)] and len(expected) - len(joined) < 32
    assert all(row["labels"] == row["input_ids"] for row in blocks)
    with pytest.raises(InputError, match="shorter than one block"):
        packed(Dataset.from_dict({"text": ["short"]}), tokenizer, 32)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "txt"])
def test_local_files(ending, tmp_path):
    from datasets import Dataset

    texts = [f"text {number}" for number in range(40)]
    path = tmp_path / f"rows.{ending}"
    if ending == "txt":
        path.write_text("\n\n".join(texts))
    elif ending == "json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        getattr(Dataset.from_dict({"text": texts}), {"jsonl": "to_json"}.get(ending, f"to_{ending}"))(str(path))
    train, held_out, columns = load_rows(str(path), held_out=0.1)
    assert columns == "text" and len(train) == 36 and len(held_out) == 4
    assert sorted(row["text"].strip() for part in (train, held_out) for row in part) == sorted(texts)


def test_a_folder_and_a_saved_data_set(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"text": ["one", "two", "three"]})
    (tmp_path / "folder").mkdir()
    rows.to_json(str(tmp_path / "folder" / "train.jsonl"))
    rows.save_to_disk(str(tmp_path / "saved"))
    for name in ("folder", "saved"):
        train, held_out, _ = load_rows(str(tmp_path / name), held_out=1)
        assert len(train) == 2 and len(held_out) == 1


def test_streams_hold_out_their_first_rows_and_shuffle_the_rest(jsonl, tokenizer):
    path = jsonl([{"text": f"text number {number}"} for number in range(100)])
    train, held_out, _ = load_rows(path, streaming=True, held_out=10, buffer=50)
    assert [row["text"] for row in held_out] == [f"text number {number}" for number in range(10)]
    order = [int(row["text"].split()[-1]) for row in train]
    assert sorted(order) == list(range(10, 100)) and order != sorted(order)
    blocks = list(packed(train, tokenizer, 16))
    assert blocks and all(len(row["input_ids"]) == 16 for row in blocks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text(""), "empty"),
        (lambda path: path.write_text('{"body": "a", "title": "b"}\n'), "has the columns body, title; accepted are"),
        (lambda path: path.write_text("{broken\n"), "rows.jsonl"),
        (lambda path: None, "no such file"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_data_is_one_sentence(make, message, streaming, tmp_path):
    make(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match=message) as caught:
        load_rows(str(tmp_path / "rows.jsonl"), streaming=streaming)
    assert "\n" not in str(caught.value)


def test_other_bad_data(jsonl, tmp_path):
    with pytest.raises(InputError, match="unknown suffix"):
        (tmp_path / "rows.xls").write_text("x")
        load_rows(str(tmp_path / "rows.xls"))
    with pytest.raises(InputError, match="has no split 'test'"):
        load_rows(jsonl([{"text": "a"}]), split="test")
    with pytest.raises(InputError, match="leaves none of the 2 rows"):
        load_rows(jsonl([{"text": "a"}, {"text": "b"}]), held_out=2)
    with pytest.raises(InputError, match="some-hub/name"):
        load_rows("some-hub/name")  # offline: one line, not a traceback
