"""Valid files with one random mistake: doctor refuses those that accelerate or DeepSpeed refuses, and no others."""

import copy
import json
import random

import pytest
import yaml
from conftest import slow
from library_verdicts import accelerate_verdicts, deepspeed_verdicts
from test_config_files import ACCELERATE, DEEPSPEED, refusal

from hf_memopt.compatibility.config_files import examine_files
from hf_memopt.findings import value_at

WRONG = ("many", True, -1, 2.5, [1], {"a": 1})


def places(content, keys=()):
    for key, value in content.items():
        yield (*keys, key)
        if isinstance(value, dict):
            yield from places(value, (*keys, key))


def misspelt(draw, content, parent, key):
    at = draw.randrange(len(key))
    letters = draw.choice((key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], f"{key}s"))
    parent[letters] = parent.pop(key)


def mistyped(draw, content, parent, key):
    parent[key] = copy.deepcopy(draw.choice([value for value in WRONG if type(value) is not type(parent[key])]))


def in_quotes(draw, content, parent, key):
    parent[key] = str(parent[key])


def moved(draw, content, parent, key):
    blocks = [content, *(block for block in content.values() if isinstance(block, dict))]
    draw.choice([block for block in blocks if block is not parent] or blocks)[key] = parent.pop(key)


def mutated(draw, content):
    content = copy.deepcopy(content)
    keys = draw.choice([keys for keys in places(content) if "params" not in keys])  # their optimizer judges them
    draw.choice((misspelt, mistyped, in_quotes, moved))(draw, content, value_at(content, keys[:-1]), keys[-1])
    return content


def mutations(files, parse, number, seed=7):
    """Mutations of the valid files, the same in every run."""
    draw = random.Random(seed)
    valid = [parse(text) for right, text in files.values() if right == "valid"]
    return [mutated(draw, draw.choice(valid)) for _ in range(number)]


def agree(contents, verdicts, examined):
    wrong = [
        f"{content}: doctor: {refusal(file)}; library: {verdict}"
        for content, verdict, file in zip(contents, verdicts, examined, strict=True)
        if (refusal(file) is None) != (verdict is None)
    ]
    refused = sum(verdict is not None for verdict in verdicts)
    assert not wrong, "\n".join(wrong)
    assert len(contents) / 5 < refused < len(contents) * 0.95


@pytest.mark.slow
def test_mutated_deepspeed_files(tmp_path):
    contents = mutations(DEEPSPEED, json.loads, 400)
    paths = [tmp_path / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    agree(contents, deepspeed_verdicts(contents), examine_files(paths).values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [30, slow(150)])
def test_mutated_accelerate_files(number, tmp_path):
    contents = mutations(ACCELERATE, yaml.safe_load, number)
    paths = [tmp_path / f"{number}.yaml" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(yaml.safe_dump(content))
    agree(contents, accelerate_verdicts(paths).values(), examine_files(paths).values())
