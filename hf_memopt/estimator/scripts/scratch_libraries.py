"""Libraries that scripts use on their way to train(): what these write by themselves is kept apart as in
scratch_files, uploads and trackers do nothing, pools have no processes. All else, the operating system denies."""

import contextlib
import functools
import importlib.util
import io
import multiprocessing.pool
import os
import pickle
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.scripts.scratch_files import Scratch, scratch_files

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
def nothing_written(*real_folders: str) -> Iterator[None]:
    """Keep apart what a script writes, and let uploads do nothing.

    Args:
        kept: folders where writing is real.
    """
    with scratch_files(*real_folders) as scratch, contextlib.ExitStack() as stack:
        for owner, name, replacement in (*_writers(scratch), *_senders(), *_pools()):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        with _transformers(scratch), mock.patch.dict(os.environ, _TRACKERS):
            yield


_SAVED = Part.DRY_RUN.replaces(
    "transformers:PreTrainedModel.save_pretrained(self, save_directory)",
    "transformers:PreTrainedModel.push_to_hub(self)",
    why="fake weights are not saved",
)
_FOUND = Part.DRY_RUN.replaces(
    "transformers.utils.hub:cached_files(path_or_repo_id, filenames)",
    why="libraries that read without Python need the real path of what a script wrote",
)


@contextlib.contextmanager
def _transformers(scratch: Scratch) -> Iterator[None]:
    find = _FOUND.original("cached_files")

    def cached_files(*args, **kwargs):
        return [scratch.read(path) for path in find(*args, **kwargs) or ()] or None

    def save_model(self, save_directory, *args, **kwargs):
        """Save what from_pretrained needs without weights."""
        os.makedirs(save_directory, exist_ok=True)
        self.config.save_pretrained(save_directory)

    with (
        _FOUND.replaced(cached_files=cached_files),
        _SAVED.replaced(save_pretrained=save_model, push_to_hub=lambda self, *args, **kwargs: None),
    ):
        yield


def _writers(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    """Owner, name and replacement of functions that write, or read what was written, without Python's open()."""
    import peft
    import safetensors.torch
    import tokenizers

    def at(where, function):
        @functools.wraps(function)
        def call(self, path, *args, **kwargs):
            return function(self, where(path), *args, **kwargs)

        return call

    yield tokenizers.Tokenizer, "save", at(scratch.write, tokenizers.Tokenizer.save)
    load = tokenizers.Tokenizer.from_file
    yield tokenizers.Tokenizer, "from_file", staticmethod(lambda path: load(scratch.read(path)))
    yield torch, "save", _saved(torch.save)
    yield safetensors.torch, "save_file", lambda tensors, filename, *args, **kwargs: open(filename, "wb").close()
    if importlib.util.find_spec("pyarrow"):
        import pyarrow

        memory_map = pyarrow.memory_map
        yield (
            pyarrow,
            "memory_map",
            lambda path, mode="r": memory_map((scratch.read if mode == "r" else scratch.write)(path), mode),
        )
    yield peft.PeftModel, "save_pretrained", lambda self, folder, *args, **kwargs: os.makedirs(folder, exist_ok=True)


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


def _pools() -> Iterator[tuple[object, str, object]]:
    """Replace what processes share, for one process: semaphores and shared tensors lie in /dev/shm, which belongs to
    all, and managers are servers. Dataset.map(num_proc=…) has a pool, a streamed data set a shared tensor."""
    yield multiprocessing.pool, "Pool", _Pool
    yield torch.Tensor, "share_memory_", lambda tensor: tensor
    if importlib.util.find_spec("datasets"):
        import datasets.parallel.parallel
        import multiprocess.pool

        yield multiprocess.pool, "Pool", _Pool
        yield datasets.parallel.parallel, "RLock", threading.RLock


class _Pool(contextlib.nullcontext):
    """multiprocessing.Pool without processes, with what datasets (5.2) asks of it."""

    def __init__(self, processes=None, initializer=None, initargs=(), *args, **kwargs):
        super().__init__(self)
        self._pool, self._ctx = [], SimpleNamespace(Manager=lambda: contextlib.nullcontext(queue))
        if initializer is not None:
            initializer(*initargs)

    def apply(self, func, args=(), kwds=None):
        return func(*args, **kwds or {})

    def apply_async(self, func, args=(), kwds=None, *callbacks, **named_callbacks):
        result: Any = Future()
        try:
            result.set_result(self.apply(func, args, kwds))
        except Exception as error:
            result.set_exception(error)
        result.get, result.ready = result.result, result.done
        return result

    def imap(self, func, iterable, chunksize=None):
        return map(func, iterable)

    def map(self, func, iterable, chunksize=None):
        return [func(item) for item in iterable]

    def starmap(self, func, iterable, chunksize=None):
        return [func(*item) for item in iterable]

    def close(self) -> None:
        pass

    imap_unordered, join, terminate = imap, close, close
