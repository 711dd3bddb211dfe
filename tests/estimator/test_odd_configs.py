"""Every value of a model's JSON, replaced by each wrong one: used, or refused in one sentence."""

import contextlib
import json
import random

import pytest
from test_deepspeed_values import replaced

from hf_memopt import estimate
from hf_memopt.errors import IncompatibleLibrary, InputError
from hf_memopt.estimator.architectures import _FOLDER, list_architectures, load_config

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21


@contextlib.contextmanager
def one_sentence():
    try:
        yield
    except (InputError, IncompatibleLibrary) as error:
        assert str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 8 experts"),
        ("gpt-oss-20b", {"experts_per_token": 33}, "experts_per_token=33 is more than the 32 experts"),
        ("deepseek-v3", {"num_experts_per_tok": True}, "num_experts_per_tok=True must be a whole number"),
        ("qwen3-30b-a3b", {"num_experts": -1}, "num_experts=-1 must be a whole number"),
    ],
)
def test_experts_that_no_layer_has(name, change, message, tmp_path):
    content = json.loads((_FOLDER / f"{name}.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_config(str(tmp_path))


def contents(file, seed, number):
    """So many of a JSON file's changed contents."""
    contents = [content for _, content in replaced(json.loads(file.read_text()))]
    return random.Random(seed).sample(contents, min(number, len(contents)))


def _one_of_each_type():
    files = {}
    for name in list_architectures():
        file = _FOLDER / f"{name}.json"
        files.setdefault(json.loads(file.read_text())["model_type"], file)
    return files


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", _one_of_each_type())
def test_any_value_of_a_configuration_is_read_or_refused(kind, number, tmp_path):
    estimated = 0
    for content in contents(_one_of_each_type()[kind], number, number):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with one_sentence():
            load_config(str(tmp_path))
            if number > 100 and estimated < 5:
                estimate(str(tmp_path), {"per_device_train_batch_size": 1}, seq_len=32, hardware="a100_80gb")
                estimated += 1
