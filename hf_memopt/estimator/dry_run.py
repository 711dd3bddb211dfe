"""Run a training script up to trainer.train(), without loading weights."""

import contextlib
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memopt.errors import InputError
from hf_memopt.estimator.patches.replacement import replaced
from hf_memopt.estimator.tracing.fake_tensors import cast_in_place
from hf_memopt.estimator.tracing.model import quantize
from hf_memopt.estimator.tracing.process_state import generators_kept


class Ready(BaseException):
    """The script called train(). A BaseException, so that the script's own `except Exception` does not catch it."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer


def catch_trainer(script: str, arguments: list[str]):
    """The Trainer that a script builds, caught when it calls train().

    from_pretrained and from_config return models on fake tensors. Evaluation before training is skipped. Folders that
    the Trainer creates for its output are removed again.

    Raises:
        InputError: there is no such script, it ends with an error code, or it never calls train().
    """
    path = Path(script)
    if not path.is_file():
        raise InputError(f"{script}: no such file")
    with generators_kept(), _script_environment(path, arguments), _fake_models(), _caught_at_train():
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Ready as ready:
            return ready.trainer
        except SystemExit as end:
            if end.code not in (None, 0):
                raise InputError(f"{script} ended with exit code {end.code} before trainer.train()") from end
    raise InputError(f"{script} ended without calling train() of a transformers Trainer")


@contextlib.contextmanager
def _script_environment(path: Path, arguments: list[str]):
    """sys.argv and sys.path as `python script.py` sets them. What the script prints goes to stderr: stdout is for the
    command's result."""
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
        contextlib.redirect_stdout(sys.stderr),
    ):
        yield


@contextlib.contextmanager
def _fake_models():
    from transformers import PreTrainedModel

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = PreTrainedModel._from_config.__func__

    def from_config(cls, config, **kwargs):
        with mode, replaced("torch.nn:Module.to", cast_in_place):
            return real(cls, config, **kwargs)

    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        config=None,
        dtype="auto",
        torch_dtype=None,
        attn_implementation=None,
        quantization_config=None,
        **kwargs,
    ):
        if config is None:
            config = cls.config_class.from_pretrained(pretrained_model_name_or_path)
        dtype = torch_dtype or dtype or "auto"
        dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
        model = from_config(cls, config, dtype=dtype, **attention)
        if quantization_config is not None:
            with mode:
                quantize(model, quantization_config)
        model.name_or_path = str(pretrained_model_name_or_path)
        return model.eval()

    with (
        replaced("transformers:PreTrainedModel.from_pretrained", classmethod(from_pretrained)),
        replaced("transformers:PreTrainedModel._from_config", classmethod(from_config)),
        replaced("torch.nn:Module.to", cast_in_place),
    ):
        yield


@contextlib.contextmanager
def _caught_at_train():
    from transformers import Trainer

    start = Trainer.__init__

    def init(self, *args, **kwargs):
        created: list[Path] = []
        makedirs = os.makedirs

        def remember(name, *args, **kwargs):
            folder = Path(name)
            created.extend(part for part in (folder, *folder.parents) if not part.exists())
            makedirs(name, *args, **kwargs)

        with mock.patch.object(os, "makedirs", remember):
            start(self, *args, **kwargs)
        for folder in created:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def train(self, *args, **kwargs):
        raise Ready(self)

    with (
        replaced("transformers:Trainer.__init__", init),
        replaced("transformers:Trainer.train", train),
        replaced("transformers:Trainer.evaluate", lambda self, *args, **kwargs: {}),
    ):
        yield
