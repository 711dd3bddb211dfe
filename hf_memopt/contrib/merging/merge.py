"""Merges a LoRA adapter into its base model on disk, so that host memory never holds the model."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.contrib.merging.adapter import Adapted, check_adapter
from hf_memopt.contrib.merging.base import Base
from hf_memopt.contrib.merging.layout import Output, lay_out, split_into_files
from hf_memopt.contrib.merging.nf4 import Difference, Rounding, rounded_modules
from hf_memopt.contrib.merging.skeleton import Skeleton
from hf_memopt.contrib.merging.tensor_file import count_bytes, write_tensors
from hf_memopt.errors import InputError, as_input_error, choose
from hf_memopt.files import check_links, write_whole

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "merges.*")  # tokenizer, processor and generation config
_OF_WEIGHTS = (
    "*.safetensors.index.json",
    "*.bin.index.json",
    "adapter_config.json",
    "config.json",
    "training_args.json",
)
_OF_RUN = ("trainer_state.json", "memory_*.json", "README*", "requirements*")
_MODEL_FILES = ("*.safetensors", *_COPIED)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}  # as transformers counts max_shard_size

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Options of a merge.

    Args:
        base: folder or hub id of the base model; None for what adapter_config.json names.
        dtype: bfloat16, float16 or float32 for all weights; None keeps the base's.
        quantize: nf4 or fp4: round the base as training in 4 bits did, so that the merged weights are those that the
            adapter was trained on.
        double_quant: with quantize, as bnb_4bit_use_double_quant was.
        reference: folder or hub id of the unquantized model, to report what a base in 4 bits differs by.
        max_shard_size: most bytes of a file, as "5GB".

    Raises:
        InputError: an unknown dtype, quantization or size.
    """

    base: str | Path | None = None
    dtype: str | None = None
    quantize: str | None = None
    double_quant: bool = True
    reference: str | Path | None = None
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise choose("dtype", str(self.dtype), _DTYPES)
        if self.quantize not in (None, "nf4", "fp4"):
            raise choose("quantize", str(self.quantize), ("nf4", "fp4"))
        _ = self.shard_bytes

    @property
    def shard_bytes(self) -> int:
        """max_shard_size in bytes."""
        match = re.fullmatch(r"(\d+)(KB|MB|GB)", str(self.max_shard_size).upper())
        if match is None or int(match[1]) == 0:
            raise InputError(f"max_shard_size={self.max_shard_size!r}: give a size such as 500MB or 5GB")
        return int(match[1]) * _UNITS[match[2]]


@dataclass
class MergeResult:
    """The checkpoint that was written.

    Attributes:
        directory: where.
        files: names of the files in it.
        tensors: weights of the model.
        merged_tensors: those that the adapter changed.
        bytes: of all weights.
        tied: whether the head still shares the embedding's weight.
        dequantized: what 4 bits changed: quant_type, tensors, max_difference and mean_difference, in the weights'
            own unit, which are None without an unquantized model to compare with; None where nothing was in 4 bits.
    """

    directory: str
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    merged_tensors: int = 0
    bytes: int = 0
    tied: bool = False
    dequantized: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result, for JSON."""
        return asdict(self)


def merge_adapter(
    adapter: str | Path, directory: str | Path, *, progress: Progress | None = None, **options
) -> MergeResult:
    """Merge a LoRA adapter into its base model, tensor by tensor, and write a model that from_pretrained loads.

    The result is that of peft's merge_and_unload() and save_pretrained(). Host memory holds the adapter and a few
    tensors, never the model; no device is used. The folder appears when it is complete.

    Args:
        adapter: folder or hub id of a LoRA, rsLoRA or DoRA adapter.
        directory: an empty or new folder to write to.
        progress: called before each tensor with its number from 1, how many there are, and its name.
        options: fields of MergeOptions.

    Raises:
        InputError: an adapter that cannot be merged so, a base that it does not fit, or no room on the disk.

    Sources: huggingface/peft#1939, axolotl-ai-cloud/axolotl#3095 and #1263 (rounding the base as in training).
    """
    chosen = MergeOptions(**options)
    folder = find_folder(adapter)
    config = check_adapter(folder)
    target = Path(directory).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is not an empty folder: name an empty or new one")
    name = chosen.base or config.get("base_model_name_or_path")
    if not name:
        raise InputError(f"{folder} does not name its base model: give it with --base")
    base = Base(find_folder(name, None if chosen.base else config.get("revision")))
    if chosen.quantize and base.quantization:
        raise InputError(f"{base.folder} is in 4 bits already: leave quantize={chosen.quantize} out")
    if chosen.reference and not base.quantization:
        raise InputError(f"{base.folder} is not quantized: leave reference out, or give a base in 4 bits")
    return _Merge(folder, base, chosen).write(target, progress or (lambda *_: None))


def find_folder(name: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is; of a hub id, the folder of its downloaded files.

    Raises:
        InputError: neither.
    """
    path = Path(name).expanduser()
    if path.exists():
        return check_links(path) if path.is_dir() else path
    from huggingface_hub import snapshot_download

    with as_input_error(f"{name} is neither a folder nor a model on the hub", OSError, ValueError):
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(_MODEL_FILES)))


class _Merge:
    def __init__(self, adapter: Path, base: Base, options: MergeOptions) -> None:
        self.folder, self.base, self.options = adapter, base, options
        skeleton = Skeleton(base, adapter)
        self.config = skeleton.config
        self.rounding = None
        if options.quantize:
            self.rounding = Rounding(options.quantize, options.double_quant, rounded_modules(skeleton.model))
        self.reference = None if options.reference is None else Base(find_folder(options.reference))
        self.difference = Difference()
        self.rounded = 0
        self.tied = bool(skeleton.tied)
        self.layout = lay_out(base, skeleton, Adapted(skeleton.model, adapter), _DTYPES.get(options.dtype or ""))

    def write(self, target: Path, progress: Progress) -> MergeResult:
        outputs = self.layout.outputs
        total = sum(count_bytes(output.shape, output.dtype) for output in outputs)
        with as_input_error(f"cannot write to {target.parent}", OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(target.parent).free) < total:
                raise InputError(f"{target.parent} has {free:,} bytes free, and the model takes {total:,}: free some")
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
                model = Path(scratch) / "model"
                model.mkdir()
                self._write_weights(model, total, progress)
                self._write_others(model)
                if target.exists():
                    target.rmdir()
                model.rename(target)
        return MergeResult(
            directory=str(target),
            files=sorted(file.name for file in target.iterdir()),
            tensors=len(outputs),
            merged_tensors=sum(output.change is not None for output in outputs),
            bytes=total,
            tied=self.tied and not self.layout.untied,
            dequantized=self._dequantized(),
        )

    def _write_weights(self, folder: Path, total: int, progress: Progress) -> None:
        shards = split_into_files(self.layout.outputs, self.options.shard_bytes)
        count, done, weight_map = len(shards), 0, {}
        for number, outputs in enumerate(shards, 1):
            file = SAFE_WEIGHTS_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            layout = {output.name: (output.shape, output.dtype) for output in outputs}
            write_tensors(folder / file, layout, self._tensors(outputs, done, progress))
            weight_map |= dict.fromkeys(layout, file)
            done += len(outputs)
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_whole(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")

    def _tensors(self, outputs: list[Output], done: int, progress: Progress) -> Iterator[torch.Tensor]:
        for number, output in enumerate(outputs, done + 1):
            progress(number, len(self.layout.outputs), output.name)
            yield self._make(output)

    def _make(self, output: Output) -> torch.Tensor:
        weight = self.base.read(output.source)
        if self.base.tensors[output.source].state is not None:
            self._compare(output.source, weight)
        weight = weight.to(output.dtype)
        if self.rounding is not None and self.rounding.applies_to(output.parameter):
            self.rounded += 1
            exact, weight = weight, self.rounding.round(weight)
            self.difference.add(weight, exact)
            del exact
        if output.change is None:
            return weight
        merged = output.change(weight)
        if merged.is_floating_point() and not torch.isfinite(merged).all():
            raise InputError(f"{output.name} has values that are not finite when merged: the adapter has diverged")
        return merged.to(output.dtype)

    def _compare(self, name: str, weight: torch.Tensor) -> None:
        self.rounded += 1
        if self.reference is None:
            return
        stored = self.reference.tensors.get(name)
        if stored is None or stored.shape != tuple(weight.shape):
            raise InputError(f"{self.reference.folder} has no {name} of that shape: give the base's own model")
        self.difference.add(weight, self.reference.read(name))

    def _dequantized(self) -> dict[str, Any] | None:
        if not self.base.quantization and self.rounding is None:
            return None
        kind = self.options.quantize or self.base.quantization.get("bnb_4bit_quant_type", "nf4")
        return {"quant_type": kind, "tensors": self.rounded, **self.difference.to_dict()}

    def _write_others(self, model: Path) -> None:
        """Configuration, tokenizer, processor and generation settings; the adapter's own come first."""
        if self.layout.untied:
            self.config["tie_word_embeddings"] = False
        if self.options.dtype:
            self.config["dtype"] = self.options.dtype
        # As it is: write_json() would leave out what looks like a secret.
        write_whole(model / "config.json", json.dumps(self.config, indent=2) + "\n")
        for source in (self.folder, self.base.folder):
            for file in sorted({file for pattern in _COPIED for file in source.glob(pattern)}):
                skipped = any(file.match(pattern) for pattern in (*_OF_WEIGHTS, *_OF_RUN))
                if not skipped and file.is_file() and not (model / file.name).exists():
                    shutil.copyfile(file, model / file.name)
