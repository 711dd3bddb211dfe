"""The recipes' default model: 4.2 million random weights, and a tokenizer trained on the embedded corpus."""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_memopt.files import cache_folder
from hf_memopt.stack.versions import installed

VOCABULARY = 4096
MAX_POSITIONS = 512  # tokens
_VERSION = 2  # raise it when anything below changes: it invalidates cached folders

# One turn: a role marker, the content, and an end marker that is also the end-of-text token. What the assistant writes
# is marked, so that the loss is on it alone.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def builtin_model() -> Path:
    """The folder with config, weights and tokenizer.

    Created on first use in the cache: $HF_MEMOPT_CACHE, by default ~/.cache/hf_memopt.
    """
    # The corpus comes with the Python, and a major version of transformers may not read another's files.
    versions = f"{_VERSION} {sys.version} {installed('transformers')[0]}"
    key = hashlib.sha256(versions.encode()).hexdigest()[:12]
    return cached(f"builtin-{key}", _make)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the cache, created by `make` if missing. Processes that race create the same content; one wins."""
    cache = cache_folder()
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache))
        try:
            make(temporary)
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_memopt.data.embedded import documents

    special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = train_tokenizer(documents(), VOCABULARY, special, MAX_POSITIONS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: list[str], length: int):
    """A byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2) for inputs of `length` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=length
    )
