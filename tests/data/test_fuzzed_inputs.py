"""Any bytes, as rows or as settings, end in rows, in settings or in an InputError: in nothing else."""

import functools
import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_memopt.errors import InputError

# Bounded and the same on every machine: a failure in CI can be repeated.
BOUNDED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "weight", "name"]),
        st.sampled_from(["user", "assistant", "system", "tool", "gpt"]) | VALUES,
        max_size=4,
    ),
    max_size=4,
)
COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "output",
    "input",
    "history",
    "text",
    "system",
    "tools",
    "id",
)
ROWS = st.lists(st.dictionaries(st.sampled_from(COLUMNS), MESSAGES | VALUES, max_size=4), max_size=4)


def _spoil(draw_bytes: bytes, at: float, text: bytes) -> bytes:
    """A text with something put into it."""
    place = int(at * len(text))
    return text[:place] + draw_bytes + text[place:]


BYTES = st.binary(max_size=200) | st.builds(
    _spoil, st.binary(max_size=4), st.floats(0, 1), ROWS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".txt"])
@BOUNDED
@given(content=BYTES)
def test_any_bytes_as_rows(ending, content, tmp_path):
    from hf_memopt.data.row_files import numbered_rows

    path = tmp_path / f"rows{ending}"
    path.write_bytes(content)
    try:
        assert all(isinstance(row, dict) for _, row in numbered_rows(path))
    except InputError as error:
        assert str(error).startswith(str(path)), "the file's name comes first"


@pytest.fixture(scope="module")
def tokenizer(builtin_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin_model)


def is_trained(sample: dict) -> bool:
    """True of a row that TRL takes: a text, or messages whose answers all say something."""
    messages = sample.get("messages", sample.get("completion", sample.get("text")))
    if isinstance(messages, str):
        return bool(messages.strip())
    answers = [message for message in messages if message["role"] == "assistant"]
    return bool(answers) and all(one["content"].strip() or one.get("tool_calls") for one in answers)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
@settings(BOUNDED, max_examples=30)
@given(content=BYTES | ROWS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode()))
def test_any_rows_as_samples(streaming, content, tmp_path, tokenizer):
    import datasets
    from bad_inputs import good_answers

    from hf_memopt.data.chat import find_answer_kind, to_trl

    datasets.disable_progress_bars()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    try:
        rows, form = good_answers(str(path), tokenizer, streaming=streaming)
        samples = list(to_trl(rows, form, find_answer_kind(rows, form)))
        assert samples and all(is_trained(sample) for sample in samples)
    except InputError as error:
        assert str(error)


def _fields() -> list[str]:
    import dataclasses

    from transformers import TrainingArguments

    from hf_memopt.levers.arguments import MemoryArguments
    from hf_memopt.recipe.recipe_arguments import RecipeArguments

    return [
        field.name
        for kind in (TrainingArguments, MemoryArguments, RecipeArguments)
        for field in dataclasses.fields(kind)
        if field.name != "config"
    ]


SETTINGS = st.deferred(
    lambda: st.dictionaries(st.sampled_from([*_fields(), "lora", "quantization"]), VALUES, min_size=1, max_size=3)
)
NO_LINE_BREAKS = {"allow_unicode": False}


@BOUNDED
@given(content=st.binary(max_size=200) | SETTINGS.map(lambda found: yaml.safe_dump(found, **NO_LINE_BREAKS).encode()))
def test_any_bytes_as_settings(content, tmp_path, monkeypatch):
    from bad_inputs import built

    from hf_memopt.recipe import recipe_arguments

    monkeypatch.setattr(recipe_arguments, "_parser", _parser())
    (tmp_path / "run.yaml").write_bytes(content)
    try:
        built(["--config", str(tmp_path / "run.yaml")], tmp_path)
    except InputError as error:
        assert str(error)


@functools.cache
def _parser():
    from hf_memopt.recipe import recipe_arguments

    return functools.cache(recipe_arguments._parser)


@BOUNDED
@given(text=st.text(max_size=30) | VALUES.map(lambda value: yaml.safe_dump(value).strip()))
def test_any_text_behind_set(text):
    from bad_inputs import _set

    for name in ("learning_rate", "lora.r", "max_frames", "checkpoint_ratio", "quantization.load_in_4bit"):
        try:
            _set(f"{name}={text}")
        except InputError as error:
            assert str(error)
