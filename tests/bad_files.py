"""Bad files, for the table of bad inputs: data, configurations, models and what comes with them."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad_inputs import ASK, SAY, BadInput, built, command_line, commands, nested, rows, samples, settings, typed

# ---- files: every kind × every way to break it

_TEXT = '{"text": "A sentence that is long enough to be cut."}\n'
ROW_FILES: dict[str, dict[str, tuple[bytes, str | None]]] = {
    ".jsonl": {
        "empty": (b"", "is empty"),
        "blank": (b"\n\n", "is empty"),
        "truncated": ((_TEXT * 2).encode()[:-12], "line 2 is not JSON"),
        "a trailing comma": (_TEXT.encode() + b'{"text": "b",}\n', "line 2 is not JSON"),
        "no quotes": (_TEXT.encode() + b"{text: b}\n", "line 2 is not JSON"),
        "a number as row": (_TEXT.encode() + b"5\n", "line 2 holds 5"),
        "null as row": (_TEXT.encode() + b"null\n", "line 2"),
        "nan": (_TEXT.encode() + b'{"text": NaN}\n', "line 2"),
        "latin-1": (_TEXT.encode() + '{"text": "Größe"}\n'.encode("latin-1"), "line 2 is not UTF-8"),
        "utf-16": (_TEXT.encode("utf-16"), "UTF-16"),
        "binary": (bytes(range(1, 256)) * 8, "line 1"),
        "zeros": (bytes(4096), "line 1"),
        "half a surrogate": (rb'{"text": "\ud800"}' + b"\n", "surrogate"),
        "nested too deeply": (b"[" * 100_000, "line 1 is not JSON"),
        "other columns": (b'{"body": "a"}\n', "has the columns body; accepted are"),
        "a list of lists": (b"[[1], [2]]", "text must be a text"),
    },
    ".json": {
        "empty": (b"", "is empty"),
        "truncated": (b'[{"text": "a"}, {"te', "line 1 is not JSON"),
        "a mapping of rows": (b'{"data": [{"text": "a"}]}', "accepted are"),
        "numbers": (b"[1, 2]", "text must be a text"),
        "a row that is null": (b'[{"text": "a"}, null]', "text must be a text, not None"),
        "latin-1": ('[{"text": "Größe"}]'.encode("latin-1"), "line 1 is not UTF-8"),
    },
    ".csv": {
        "empty": (b"", "is empty"),
        "a header alone": (b"text\n", "is empty"),
        "too many cells": (b"text,id\na,1\nb,2,3\n", "line 3 has 3 cells"),
        "an open quote": (b'text\n"abc\n', "line 2 is not CSV"),
        "latin-1": ("text\nGröße\n".encode("latin-1"), "line 2 is not UTF-8"),
        "utf-16": ("text\na\n".encode("utf-16"), "UTF-16"),
        "other columns": (b"a,b\n1,2\n", "accepted are"),
        "binary": (bytes(range(1, 256)) * 8, "line"),
    },
    ".txt": {
        "empty": (b"", "is empty"),
        "latin-1": ("Größe".encode("latin-1"), "line 1 is not UTF-8"),
        "utf-16": ("abc".encode("utf-16"), "UTF-16"),
        "zeros": (bytes(4096), None),
    },
    ".parquet": {
        "empty": (b"", "is empty"),
        "truncated": (b"PAR1" + bytes(64), "not a complete parquet file"),
        "binary": (bytes(range(256)) * 8, "not a complete parquet file"),
        "text": (_TEXT.encode(), "not a complete parquet file"),
    },
    ".xlsx": {"an unknown suffix": (b"PK", "unknown suffix '.xlsx'")},
}


def row_files() -> Iterator[BadInput]:
    """Data files that cannot be read."""
    for ending, ways in ROW_FILES.items():
        for name, (content, expected) in ways.items():
            for streaming in (False, True):
                how = ", streamed" if streaming else ""
                yield BadInput(
                    f"data{ending}{how}: {name}", _with_file(f"data{ending}", content, samples, streaming), expected
                )
    for ending in ROW_FILES:
        yield BadInput(
            f"data{ending}: no such file",
            lambda folder, ending=ending: samples(folder / f"no{ending}"),
            "no such file",
        )
    yield BadInput("data: an empty folder", lambda folder: samples(folder), "data set")
    yield BadInput("data: a folder named like a file", _in_folder("data.jsonl", samples), "data.jsonl")


def _with_file(name: str, content: bytes, act: Callable, *more) -> Callable[[Path], Any]:
    def do(folder: Path):
        (folder / name).write_bytes(content)
        return act(folder / name, *more)

    return do


def _in_folder(name: str, act: Callable) -> Callable[[Path], Any]:
    def do(folder: Path):
        (folder / name).mkdir()
        return act(folder / name)

    return do


def _unreadable(name: str, act: Callable) -> Callable[[Path], Any]:
    def do(folder: Path):
        (folder / name).write_text("{}")
        os.chmod(folder / name, 0)
        return act(folder / name)

    return do


BROKEN = {
    "empty": b"",
    "truncated": b'{"a": [1, {"b": ',
    "binary": bytes(range(1, 256)),
    "zeros": bytes(512),
    "latin-1": "name: Größe\n".encode("latin-1"),
    "utf-16": "a: 1\n".encode("utf-16"),
    "a list": b"[1, 2]\n",
    "a word": b"word\n",
    "null": b"null\n",
    "tabs": b"a:\n\t- b\n",
    "an alias to nothing": b"a: *b\n",
    "nested too deeply": b"[" * 20_000,
    "many aliases": b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 30)),
    "huge": b"# " + b"x" * (2 * 2**20) + b"\na: 1\n",
    "keys of other kinds": b"1: 2\nnull: 3\n? [a, b]\n: 4\n",
    "an impossible date": b"a: 2024-13-45\n",
    "a number of many digits": b"a: " + b"9" * 10_000 + b"\n",
}


def configuration_files() -> Iterator[BadInput]:
    """Files of settings, of accelerate and of DeepSpeed."""
    from hf_memopt.compatibility import check_config_file

    def config(path: Path):
        return built(["--config", str(path)], path.parent)

    for name, act in (
        ("run.yaml", config),
        ("run.json", config),
        ("accelerate.yaml", check_config_file),
        ("deepspeed.json", check_config_file),
    ):
        for how, content in BROKEN.items():
            yield BadInput(f"{name} ({act.__name__}): {how}", _with_file(name, content, act), name)
        yield BadInput(f"{name} ({act.__name__}): a folder", _in_folder(name, act), "is a folder")
        yield BadInput(
            f"{name} ({act.__name__}): missing", lambda folder, act=act, name=name: act(folder / name), "no such file"
        )
        if os.name == "posix" and os.geteuid():  # root reads everything
            yield BadInput(f"{name} ({act.__name__}): unreadable", _unreadable(name, act), "cannot be read")


ACCELERATE = {
    "num_processes: many": "num_processes",
    "num_processes: 1.5": "num_processes",
    "num_processes: [8]": "num_processes",
    "num_processes: .nan": "num_processes",
    "mixed_precision: no": "mixed_precision",
    "use_cpu: maybe": "use_cpu",
    "distributed_type: MULTI_GPUS": "MULTI_GPUS",
    "fsdp_config: 5": "fsdp_config",
    "deepspeed_config: [1]": "deepspeed_config",
    "num_proceses: 8": "did you mean 'num_processes'",
    "fsdp_config: {fsdp_versio: 2}": "did you mean",
    "deepspeed_config: {deepspeed_config_file: 5}": "no such file",
}
DEEPSPEED: dict[str, tuple[Any, str]] = {
    "a stage that is a word": ({"zero_optimization": {"stage": "three"}}, "stage"),
    "no such stage": ({"zero_optimization": {"stage": 7}}, "stage"),
    "a block that is a number": ({"zero_optimization": 3}, "zero_optimization=3 must be a mapping"),
    "a switch as block": ({"bf16": True}, "bf16=True must be a mapping"),
    "a misspelt key": ({"zero_optimization": {"stag": 3}}, "did you mean 'stage'"),
    "a negative bucket": ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size"),
    "an unknown device": ({"zero_optimization": {"offload_optimizer": {"device": "tape"}}}, "device"),
}


def engine_files() -> Iterator[BadInput]:
    """Single wrong values in files of accelerate and DeepSpeed."""
    from hf_memopt.compatibility import check_config_file

    for line, expected in ACCELERATE.items():
        start = "" if line.startswith("distributed_type") else "distributed_type: MULTI_GPU\n"
        start += "" if line.startswith("num_processes") else "num_processes: 2\n"
        content = f"{start}{line}\n".encode()
        yield BadInput(f"accelerate.yaml: {line}", _with_file("accelerate.yaml", content, check_config_file), expected)
    for name, (content, expected) in DEEPSPEED.items():
        act = _with_file("deepspeed.json", json.dumps(content).encode(), check_config_file)
        yield BadInput(f"deepspeed.json: {name}", act, expected)


# ---- models

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_BAD_SIZES = {
    "zero": 0,
    "negative": -4,
    "a word": "big",
    "huge": 10**12,
    "a fraction": 1.5,
    "a switch": True,
    "a billion": 10**9,
    "a mapping": {"a": 1},
}


OTHER = {
    "hidden_act": 5,
    "rms_norm_eps": "x",
    "rope_parameters": 5,
    "tie_word_embeddings": "x",
    "attention_dropout": "x",
    "attention_bias": "x",
    "max_position_embeddings": "x",
}
# What a configuration's class takes, and a model's does not.
TRACED = {
    "head_dim": 0,
    "hidden_act": "nope",
    "rope_theta": "x",
    "pad_token_id": 10**9,
    "attention_dropout": 5.0,
    "text_config": 5,
    "quantization_config": {},
    "num_hidden_layers": 10**9,
}


def _estimated(content: dict) -> Callable[[Path], Any]:
    def act(folder: Path):
        (folder / "config.json").write_text(json.dumps(content))
        typed("estimate", str(folder), "--preset", "cpu", "--seq-len", "32")

    return act


def models() -> Iterator[BadInput]:
    """config.json with sizes that no model has, and files that are none."""
    from hf_memopt.estimator.architectures import load_config

    def config(content: Any):
        return _with_file("config.json", json.dumps(content).encode(), lambda path: load_config(str(path.parent)))

    for size in _SIZES:
        for name, value in _BAD_SIZES.items():
            yield BadInput(f"config.json: {size} is {name}", config({**LLAMA, size: value}), size)
    for name, value in {"zero": 0, "huge": 10**12}.items():
        nested = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 10**9, "hidden_size": value}}
        yield BadInput(f"config.json: vision_config.hidden_size is {name}", config(nested), "vision_config")
    for value in (5, [5], [None], "LlamaForCausalLM", {"a": 1}):
        yield BadInput(
            f"config.json: architectures is {value!r}", config({**LLAMA, "architectures": value}), "architectures"
        )
    for name, value in OTHER.items():
        yield BadInput(f"config.json: {name} is {value!r}", config({**LLAMA, name: value}), name)
    for name, value in TRACED.items():
        yield BadInput(f"estimate: {name} is {value!r}", _estimated({**LLAMA, name: value}), "")
    yield BadInput("config.json: heads that do not divide", config({**LLAMA, "num_attention_heads": 7}), "7")
    yield BadInput("config.json: shared heads that do not divide", config({**LLAMA, "num_key_value_heads": 3}), "3")
    yield BadInput("config.json: no model type", config({"hidden_size": 64}), "model_type")
    yield BadInput("config.json: an unknown model type", config({**LLAMA, "model_type": "lama"}), "lama")
    yield BadInput("config.json: a model type that is a list", config({**LLAMA, "model_type": ["llama"]}), "config")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    yield BadInput("config.json: code of its own", config(own), "code that comes with it")
    for name, content in BROKEN.items():
        act = _with_file("config.json", content, lambda path: load_config(str(path.parent)))
        yield BadInput(f"config.json: {name}", act, "model")
    for name in ("nowhere", "nowhere/at-all", "a" * 5000, "a\0b", "", "~/nowhere", "../..", "llama-3.1-8", "🤖"):
        yield BadInput(f"model {name[:20]!r}", lambda folder, name=name: load_config(name), "model")


# ---- a model's other files


TEMPLATES = (
    "{{ 1 / 0 }}",
    "{{ messages.x.y }}",
    "{{ raise_exception('no') }}",
    "{% for %}",
    "{{ messages[99].role }}",
    "{{ range(10**9) | list }}",
    "{{ messages | nope }}",
    "{{ 'a' * 10**15 }}",
    "{{ [] + 5 }}",
)


def model_files() -> Iterator[BadInput]:
    """Folders of models whose tokenizer, weights or chat template cannot be used."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        for name in ("empty", "truncated", "binary", "zeros", "a list", "null"):
            yield BadInput(f"{file}: {name}", _spoilt_model(file, BROKEN[name], _loads_tokenizer), "tokenizer")
    for name, content in {"empty": b"", "truncated": None, "binary": BROKEN["binary"], "zeros": bytes(4096)}.items():
        yield BadInput(
            f"model.safetensors: {name}", _spoilt_model("model.safetensors", content, _loads_model), "model"
        )
    for template in TEMPLATES:
        yield BadInput(f"chat template {template}", _templated(template), "chat template")


def _spoilt_model(file: str, content: bytes | None, act: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def do(folder: Path):
        from hf_memopt.data.builtin_model import builtin_model

        model = folder / "model"
        shutil.copytree(builtin_model(), model)
        whole = (model / file).read_bytes() if (model / file).exists() else b""
        (model / file).write_bytes(whole[: len(whole) // 2] if content is None else content)
        return act(model)

    return do


def _job(model: Path, *words: str):
    from hf_memopt.recipe import job as jobs

    out = str(model.parent / "out")
    return jobs.start(
        jobs.RecipeDefaults(),
        ["--preset", "cpu", "--model_name_or_path", str(model), "--dataset_name", "none", "--output_dir", out, *words],
    )


def _loads_tokenizer(model: Path):
    from hf_memopt.recipe import job as jobs

    return jobs.load_tokenizer(_job(model))


def _loads_model(model: Path):
    from hf_memopt.recipe import job as jobs

    job = _job(model)
    return jobs.load_model(job, jobs.load_config(job), jobs.load_tokenizer(job))


def _templated(template: str) -> Callable[[Path], Any]:
    def act(folder: Path):
        from transformers import AutoTokenizer

        from hf_memopt.data.builtin_model import builtin_model
        from hf_memopt.data.chat import Chat

        tokenizer = AutoTokenizer.from_pretrained(builtin_model())
        tokenizer.chat_template = template
        return Chat(tokenizer).text_and_answers([ASK, SAY])

    return act


def everything() -> list[BadInput]:
    """The whole table."""
    makers = (
        settings,
        command_line,
        nested,
        rows,
        row_files,
        configuration_files,
        engine_files,
        models,
        commands,
        model_files,
    )
    return [entry for maker in makers for entry in maker()]
