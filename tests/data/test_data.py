"""Files, splits and blocks of texts, with the built-in tokenizer and rows made here."""

import ast
import json
import math
from pathlib import Path

import pytest
import torch

from hf_memopt.data import embedded
from hf_memopt.data.bad_rows import BadRows
from hf_memopt.data.sample_batches import _content, relative_sizes, sample_lengths, with_positions
from hf_memopt.data.sources import (
    _by_split,
    _count_held_out,
    _files_of_rows,
    _hold_out_streaming,
    load_rows,
    local_path,
)
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
    with pytest.raises(InputError, match="some-hub/name"):
        load_rows("some-hub/name")  # offline: one line, not a traceback


# ---- how many rows are held out


def test_how_many_rows_are_held_out():
    """(held_out, rows, whether it is a default) -> the number; None where no row would be left."""
    for (held_out, rows, adapts), count in {
        **{(0, 1, False): 0, (0, 9, True): 0, (0.05, 1, False): 0, (1, 1, True): 0, (1, 1, False): None},
        **{(0.05, 5, False): 1, (0.05, 30, False): 2, (3, 4, False): 3, (4, 4, False): None, (2.9, 4, False): 2},
        **{(0.9, 2, False): None, (0.5, 2, False): 1, (1, 2, False): 1, (1, 2, True): 1},
        **{(5, 20, True): 5, (6, 20, True): 1, (6, 20, False): 6, (200, 100, True): 5, (10, 30, True): 2},
    }.items():
        if count is None:
            with pytest.raises(InputError, match=rf"held_out={held_out} leaves none of the {rows} rows of 'x'"):
                _count_held_out(held_out, rows, adapts, "x")
        else:
            assert _count_held_out(held_out, rows, adapts, "x") == count, (held_out, rows, adapts)


class Stream(list):
    """What `datasets` does with a stream, and how many rows are read of it."""

    read = 0

    def __iter__(self):
        for row in super().__iter__():
            self.read += 1
            yield row

    def take(self, count):
        return Stream(self[:count])

    def skip(self, count):
        return Stream(self[count:])

    def shuffle(self, seed, buffer_size):
        return self


def test_how_many_rows_of_a_stream_are_held_out():
    for (held_out, adapts, rows), held in {
        **{(10, False, 100): 10, (10, False, 10): None, (10, False, 11): 10, (1, False, 1): None, (0, False, 5): 0},
        **{(0, False, 1001): 0, (0.05, False, 201): 10, (1, False, 5): 1},
        **{(0.05, False, 500): 25, (0.05, False, 1000): 50, (0.05, False, 1001): 200, (0.05, False, 1): 0},
        **{(400, True, 1500): 75, (400, True, 1601): 400, (400, True, 1600): 400, (8, True, 1000): 8, (8, True, 9): 1},
    }.items():
        if held is None:
            with pytest.raises(InputError, match="leaves none of the"):
                _hold_out_streaming(Stream(range(rows)), None, held_out, adapts, 7, 1, "x")
            continue
        whole = Stream(range(rows))
        train, test = _hold_out_streaming(whole, None, held_out, adapts, 7, 1, "x")
        most = held_out if not adapts and held_out in (0, 1, 10) else 1600 if held_out == 400 else 1000
        assert whole.read == min(rows, most + 1)
        assert (train, test or []) == ([*range(held, rows)], [*range(held)]), (held_out, adapts, rows)
    assert _hold_out_streaming(Stream(range(5)), "test", 2, False, 7, 1, "x") == ([*range(5)], "test")
    with pytest.raises(InputError, match="'x' is empty: the split has no rows"):
        _hold_out_streaming(Stream(), None, 0, False, 7, 1, "x")


def test_files_of_a_folder_and_their_splits(tmp_path):
    names = ("train-00.jsonl", "my_dev.json", "valid.csv", "Test_2.jsonl", "evaluation.txt", "latest.jsonl", "a.csv")
    for name in (*names, ".hidden", "README.md"):
        (tmp_path / name).touch()
    files = _files_of_rows(tmp_path)
    assert [file.name for file in files] == sorted(names)
    splits = {split: [file.name for file in of] for split, of in _by_split(files).items()}
    assert splits == {
        "test": ["Test_2.jsonl", "evaluation.txt"],
        "train": ["a.csv", "latest.jsonl", "train-00.jsonl"],
        "validation": ["my_dev.json", "valid.csv"],
    }
    (tmp_path / "more").mkdir()
    assert _files_of_rows(tmp_path) == []
    (tmp_path / "more").rmdir()
    (tmp_path / "a.parquet").touch()
    assert _files_of_rows(tmp_path) == []


# ---- lengths


class Table(list):
    column_names = ("pixels",)


def test_sizes_of_samples():
    for value, size in (
        (torch.zeros(2, 3), 6),
        (torch.tensor(5), 1),
        ("abcd", 4),
        ([[1, 2], [3]], 3),
        ([1.5, 2], 2),
        (["ab", "c"], 3),
        ([], 0),
        (None, 1),
        (7, 1),
        ({"a": "xyz", "b": 5, "c": [torch.zeros(4), torch.zeros(1, 2)]}, 10),
    ):
        assert _content(value) == size, value
    alike, last = Table([{"pixels": "ab"}] * 64), {"pixels": "abcde"}
    assert relative_sizes(alike) == relative_sizes(Table([*alike, last])) == [2] * 64, "64 stand for all"
    unlike = Table([last, *alike])
    assert relative_sizes(unlike) == [5, *[2] * 64] and relative_sizes(unlike, 3) == [5, 2, 2]
    for row, length in (({"input_ids": [1, 2, 3]}, 3), ({"x": 1}, 1), ([1, 2], 2), (5, 1)):
        assert sample_lengths([row, row, row], 2) == relative_sizes([row] * 3, 2) == [length, length, 1]
    with_length = Table()
    with_length.column_names = ("pixels", "length")
    with_length.__class__ = type("Named", (Table,), {"__getitem__": lambda self, name: (4, 6)})
    assert relative_sizes(with_length) == [4, 6]
    own = type("Own", (), {"sizes": lambda self, most: [most], "lengths": lambda self: [8]})()
    assert (relative_sizes(own, 9), relative_sizes(own), sample_lengths(own)) == ([9], [math.inf], [8])


def test_positions_are_of_the_sample_and_padded_for_all_processes():
    def batch(length, **more):
        tokens = torch.ones(2, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens, "weights": torch.ones(2), **more}

    for length, processes, padded in ((5, 4, 8), (8, 4, 8), (9, 4, 12), (3, 1, 3)):
        found = with_positions(lambda rows: batch(rows), processes)(length)
        missing = padded - length
        assert found["input_ids"].tolist() == [[1] * length + [0] * missing] * 2
        assert found["labels"].tolist() == [[1] * length + [-100] * missing] * 2
        assert found["position_ids"].tolist() == [[*range(length)] + [0] * missing] * 2
        assert found["weights"].tolist() == [1, 1]
    own = torch.tensor([[3, 4, 5]] * 2)
    assert (
        with_positions(lambda rows: batch(3, position_ids=own), 2)(None)["position_ids"].tolist() == [[3, 4, 5, 0]] * 2
    )


# ---- what is said and asked


def test_bad_rows_are_summed_up():
    for kinds, more in ((1, ""), (5, ""), (6, "; 1 other reasons"), (8, "; 3 other reasons")):
        counts = {f"why {kind}": kind + 1 for kind in range(kinds)}
        bad = BadRows(4321, counts, [f"row {kind}: why {kind}" for kind in range(kinds)])
        shown = "; ".join(f"row {n}: why {n} ({n + 1} row{'s' * (n > 0)})" for n in range(min(kinds, 5)))
        assert bad.listed() == shown + more
        assert str(bad) == f"{sum(counts.values())} of 4,321 rows left out: {shown}{more}"
        bad.refuse(None)
        with pytest.raises(
            InputError, match=rf"{sum(counts.values())} of 4,321 rows cannot be .* leave them out by -x"
        ):
            bad.refuse("-x")
    BadRows(1).refuse("-x")
    with pytest.raises(InputError, match=r"row 0: why .1 row.: none of 1 row can be trained on"):
        BadRows(1, {"why": 1}, ["row 0: why"]).refuse(None)


MODULE = """
'''About m.'''
def public(a, b=1):
    '''{short}'''
def _private():
    '''{usual}'''
async def waits():
    '''{usual}

    More.'''
class Kind:
    '''{longest}'''
    def method(self):
        '''{too_long}'''
    def _hidden(self):
        '''{usual}'''
    def bare(self): pass
class _Own:
    '''{usual}'''
VALUE = 1
"""


def test_questions_are_of_documented_functions(monkeypatch):
    """Of which the first paragraph has 20 to 600 letters."""
    texts = {"short": "s" * 19, "usual": "u" * 20, "longest": "w " * 299 + "ww", "too_long": "x" * 601}
    assert len(texts["longest"]) == 600
    monkeypatch.setattr(embedded, "_modules", lambda: [("m", ast.parse(MODULE.format(**texts)))])
    assert [question for question, _ in embedded.questions.__wrapped__()] == [
        *("What does m.waits do?", "What does m.Kind do?"),
    ]
    answers = dict(embedded.questions.__wrapped__())
    assert answers["What does m.waits do?"] == f"{'u' * 20}\n\nSignature: m.waits()"
    (text,) = [text for text in embedded.documents.__wrapped__() if text.startswith("m\n=\n\nAbout m.")]
    documented = [line for line in text.splitlines() if line.startswith("m.")]
    assert documented == ["m.public(a, b=1)", "m.waits()", "m.Kind", "m.Kind.method(self)"]
    assert f"m.waits()\n    {'u' * 20}\n\n    More.\n\nm.Kind" in text
    monkeypatch.setattr(embedded, "questions", lambda: [(f"q{n}", f"a{n}\n\nSignature: s") for n in range(41)])
    pairs = embedded.preferences.__wrapped__()
    assert [question for question, *_ in pairs] == ["q0", "q8", "q16", "q24", "q32", "q40"]
    frames = [embedded._FRAMES[place] for place in (0, 1, 2, 3, 0, 1)]
    answers = [f"a{number}" for number in range(0, 41, 8)]
    assert [both for _, *both in pairs] == [
        [chosen + a, not_ + a] for (chosen, not_), a in zip(frames, answers, strict=True)
    ]


def test_what_may_be_a_name_on_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "notes.doc").write_text("x")
    for source in ("rows.jsonl", "owner/name", "name", str(tmp_path)):
        assert local_path(source) == Path(source)
    for source in ("other.jsonl", "./name", "/no/such", "~/no/such", "owner/rows.parquet"):
        with pytest.raises(InputError, match="no such file or folder"):
            local_path(source)
    with pytest.raises(InputError, match=r"unknown suffix '\.doc'; known are "):
        local_path("notes.doc")
