"""Libraries that write by themselves, or send: what they write is kept apart as scratch_files does, and nothing is
sent."""

import contextlib
import functools
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from hf_memopt.estimator.patches.replacement import original, replaced
from hf_memopt.estimator.scratch_files import Scratch, scratch_files

# Names in huggingface_hub's HfApi that change a repository, and what they return.
_SENT = (
    "create_branch",
    "create_collection",
    "create_commit",
    "create_repo",
    "create_tag",
    "delete_file",
    "delete_folder",
    "delete_repo",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
)
_TRACKERS = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """What a script writes is kept apart, and nothing is sent. Downloads go to the hub's cache as always."""
    from huggingface_hub import constants

    kept = (constants.HF_HUB_CACHE, constants.HF_XET_CACHE, os.path.join(constants.HF_HOME, "modules"))
    with scratch_files(*kept) as scratch, contextlib.ExitStack() as stack:
        for owner, name, replacement in (*_writers(scratch), *_senders()):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_transformers(scratch))
        stack.enter_context(mock.patch.dict(os.environ, _TRACKERS))
        yield


@contextlib.contextmanager
def _transformers(scratch: Scratch) -> Iterator[None]:
    find = original("transformers.utils.hub:cached_files")

    def cached_files(*args, **kwargs):
        return [scratch.read(path) for path in find(*args, **kwargs) or ()] or None

    def save_model(self, save_directory, *args, **kwargs):
        """What from_pretrained needs without weights."""
        os.makedirs(save_directory, exist_ok=True)
        self.config.save_pretrained(save_directory)

    with (
        replaced("transformers.utils.hub:cached_files", cached_files),
        replaced("transformers:PreTrainedModel.save_pretrained", save_model),
        replaced("transformers:PreTrainedModel.push_to_hub", lambda self, *args, **kwargs: None),
    ):
        yield


def _writers(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    """Owner, name and replacement of functions that write, or read what was written, without Python's open()."""
    import tokenizers

    save = tokenizers.Tokenizer.save
    yield (
        tokenizers.Tokenizer,
        "save",
        lambda self, path, *args, **kwargs: save(self, scratch.write(path), *args, **kwargs),
    )
    load = tokenizers.Tokenizer.from_file
    yield tokenizers.Tokenizer, "from_file", staticmethod(lambda path: load(scratch.read(path)))
    yield torch, "save", _saved(torch.save)
    if "safetensors" in sys.modules or importlib.util.find_spec("safetensors"):
        import safetensors.torch

        yield safetensors.torch, "save_file", lambda tensors, filename, *args, **kwargs: _touch(filename)
    if importlib.util.find_spec("pyarrow"):
        yield from _arrow(scratch)
    if importlib.util.find_spec("peft"):
        import peft

        yield (
            peft.PeftModel,
            "save_pretrained",
            lambda self, folder, *args, **kwargs: os.makedirs(folder, exist_ok=True),
        )


def _arrow(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    import pyarrow
    import pyarrow.parquet

    for name in ("memory_map", "OSFile"):
        yield pyarrow, name, _opened(getattr(pyarrow, name), scratch)
    start = pyarrow.parquet.ParquetWriter.__init__

    def init(self, where, *args, **kwargs):
        start(self, scratch.write(where) if isinstance(where, (str, os.PathLike)) else where, *args, **kwargs)

    yield pyarrow.parquet.ParquetWriter, "__init__", init


def _opened(function, scratch: Scratch):
    @functools.wraps(function)
    def call(path, mode="r", *args, **kwargs):
        return function((scratch.read if mode in ("r", "rb") else scratch.write)(path), mode, *args, **kwargs)

    return call


def _saved(save):
    """torch.save through Python's open(), which is kept apart.

    Fake tensors cannot be saved, and have nothing to save. What beside them cannot be saved is the script's own error.
    """

    @functools.wraps(save)
    def call(obj, f, *args, **kwargs):
        if not isinstance(f, (str, os.PathLike)):
            return save(obj, f, *args, **kwargs)
        with open(f, "wb") as file:
            try:
                save(obj, file, *args, **kwargs)
            except Exception:
                _WithoutTensors(io.BytesIO()).dump(obj)

    return call


class _WithoutTensors(pickle.Pickler):
    """Pickles what is beside the tensors of an object."""

    def persistent_id(self, obj):
        return "tensor" if isinstance(obj, torch.Tensor) else None


def _touch(path) -> None:
    with open(path, "wb"):
        pass


def _senders() -> Iterator[tuple[object, str, object]]:
    import huggingface_hub
    from huggingface_hub import hf_api

    def create_repo(*args, repo_id=None, **kwargs):
        name = repo_id or next((arg for arg in args if isinstance(arg, str)), "")
        return hf_api.RepoUrl(f"https://huggingface.co/{name}")

    for name in _SENT:
        replacement = create_repo if name == "create_repo" else lambda *args, **kwargs: None
        for owner in (hf_api.HfApi, hf_api, *([huggingface_hub] if name in vars(huggingface_hub) else [])):
            if hasattr(owner, name):
                yield owner, name, replacement
    if importlib.util.find_spec("datasets"):
        import datasets

        for kind in (datasets.Dataset, datasets.DatasetDict):
            yield kind, "push_to_hub", lambda self, *args, **kwargs: None
