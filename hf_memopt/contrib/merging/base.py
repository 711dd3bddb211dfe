"""The checkpoint that an adapter was trained on, read one tensor at a time, in 4 bits or not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.contrib.merging.tensor_file import DTYPES
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.field_values import check_value
from hf_memopt.files import read_json

_STATE = ".quant_state.bitsandbytes__"  # bitsandbytes 0.50, functional.QuantState.as_dict(packed=True)
_STATISTICS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        file: the safetensors file that holds it.
        shape: elements in each dimension; None where it is stored in 4 bits.
        dtype: of the tensor, or of what 4 bits are dequantized to.
        state: name of the tensor with bitsandbytes' quantization state; None where it is not quantized.
    """

    file: Path
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    state: str | None = None


class Base:
    """A folder with a safetensors checkpoint, and its configuration.

    Attributes:
        folder: where it is.
        config: config.json.
        quantization: its `quantization_config`, empty where the weights are not quantized.
        tensors: name -> Stored, in the order of the files, without bitsandbytes' statistics.

    Raises:
        InputError: there are no safetensors, a file is missing or damaged, or the weights are quantized otherwise than
            in bitsandbytes' 4 bits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_json(folder / "config.json")
        check_value("quantization_config", dict | None, self.config.get("quantization_config"), f"{folder}: ")
        self.quantization = self.config.get("quantization_config") or {}
        if self.quantization and not self.quantization.get("load_in_4bit"):
            kind = self.quantization.get("quant_method", "another method")
            raise InputError(
                f"{folder} is quantized with {kind}, and only bitsandbytes' 4 bits are dequantized: give --base the "
                "model that it was made from"
            )
        self._files: dict[str, Path] = {}
        self.tensors: dict[str, Stored] = {}
        with as_input_error(f"{folder} cannot be read", OSError, ValueError, RuntimeError, KeyError, SafetensorError):
            for file in _files(folder):
                self._examine(file)

    def read(self, name: str) -> torch.Tensor:
        """A tensor of its own memory, dequantized."""
        stored = self.tensors[name]
        if stored.state is None:
            return self._load(name)
        from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = [name + suffix for suffix in _STATISTICS if name + suffix in self._files]
        state = QuantState.from_dict({part: self._load(part) for part in (*parts, stored.state)}, torch.device("cpu"))
        return dequantize_4bit(self._load(name), state)

    def _load(self, name: str) -> torch.Tensor:
        # Opened for each tensor: pages of an open file stay mapped, and count as memory of this process.
        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name).clone()

    def _examine(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            self._files |= dict.fromkeys(names, path)
            states = {name.partition(_STATE)[0]: name for name in names if _STATE in name}
            statistics = {name + suffix for name in states for suffix in _STATISTICS}
            for name in names:
                if name in statistics or _STATE in name:
                    continue
                if name in states:
                    from bitsandbytes.utils import unpack_tensor_to_dict

                    dtype = getattr(torch, unpack_tensor_to_dict(file.get_tensor(states[name]))["dtype"])
                    self.tensors[name] = Stored(path, None, dtype, states[name])
                    continue
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise InputError(
                        f"{path}: {name} is stored as {part.get_dtype()}: give --base an unquantized model"
                    )
                self.tensors[name] = Stored(path, tuple(part.get_shape()), DTYPES[part.get_dtype()])


def _files(folder: Path) -> Iterator[Path]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        files = read_json(index).get("weight_map")
        check_value("weight_map", dict[str, str], files, f"{index}: ")
        for name in sorted(set(files.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing: copy or download the model again")
            yield folder / name
    elif (folder / SAFE_WEIGHTS_NAME).is_file():
        yield folder / SAFE_WEIGHTS_NAME
    else:
        raise InputError(f"{folder} has no {SAFE_WEIGHTS_NAME} and no index of one: give --base one with safetensors")
