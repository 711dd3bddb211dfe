"""Scripts that are dry-run in a folder with a model without weights."""

import contextlib
import textwrap

import pytest

from hf_memopt.errors import InputError
from hf_memopt.estimator.scripts.dry_run import caught_trainer
from hf_memopt.estimator.scripts.launched import ScriptCommand

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
TRAIN = """
from transformers import Trainer, TrainingArguments, default_data_collator

def train(model, **fields):
    args = TrainingArguments("out", per_device_train_batch_size=2, report_to="none", **fields)
    rows = [{"input_ids": [7] * 16, "labels": [7] * 16}] * 8
    Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()
"""
MODEL = """
import torch
from training import train
from transformers import AutoModelForCausalLM
"""


def prepare(tmp_path, monkeypatch):
    """The test's folder, now the current one: a model without weights, a tokenizer and a module that trains."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path / "model")
    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "</s>", "a", "b", "c"])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c a"}\n' * 8)
    (tmp_path / "training.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@contextlib.contextmanager
def caught(script: str, hardware: str = "cpu", arguments=()):
    """The Trainer of a script that is written into the current folder."""
    with open("train.py", "w") as file:
        file.write(textwrap.dedent(script))
    with caught_trainer(ScriptCommand("train.py", list(arguments)), hardware) as trainer:
        yield trainer


def refusal(script: str, hardware: str = "cpu") -> str:
    with pytest.raises(InputError) as refused, caught(script, hardware):
        pass
    return str(refused.value)


def listing(folder) -> dict:
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}
