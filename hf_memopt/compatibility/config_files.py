"""Check an accelerate YAML or a DeepSpeed JSON: its library is asked, in a child process, and rows add what it accepts
without doing it."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memopt.child_process import in_child
from hf_memopt.compatibility.accelerate_files import examine_accelerate
from hf_memopt.compatibility.deepspeed_files import examine_deepspeed
from hf_memopt.errors import InputError, brief, one_line
from hf_memopt.findings import Effect, Finding, Keys
from hf_memopt.yaml_values import read_text, read_yaml

_ENDINGS = (".yaml", ".yml", ".json")
_NEITHER = (
    "is neither an accelerate configuration (.yaml) nor a DeepSpeed configuration (.json), the files that are checked"
)


@dataclass(frozen=True)
class Fault:
    """What is wrong in a file.

    Attributes:
        line: counted from 1; None where it is of the whole file.
        text: names the key, its value and what to do.
        refused: by accelerate or DeepSpeed; otherwise they take it, and it does nothing.
    """

    path: str | Path
    line: int | None
    text: str
    refused: bool = True

    def __str__(self) -> str:
        return f"{self.path}: line {self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


@dataclass(frozen=True)
class Examined:
    """What a file is, what is wrong in it, in the order of its lines, and what it does otherwise than it looks."""

    kind: str
    faults: list[Fault]
    notes: list[str]


def check_config_file(path: str | Path, processes: int | None = None) -> str:
    """Check a file of either kind, by its ending.

    Args:
        processes: how many were started with it; by default what the file says.

    Returns:
        "accelerate" or "deepspeed".

    Raises:
        InputError: unreadable, an unknown key, or settings that its library refuses: the first of them.
    """
    examined = examine_files([path], processes)[str(path)]
    if faults := examined.faults:
        more = f" ({len(faults) - 1} more: hf-memopt doctor {path})" if len(faults) > 1 else ""
        raise InputError(f"{faults[0]}{more}")
    return examined.kind


def find_faults(path: str | Path) -> list[Fault]:
    """All that is wrong in a file, in the order of its lines; what is wrong with all of it comes last."""
    return examine_files([path])[str(path)].faults


def examine_files(paths: Iterable[str | Path], processes: int | None = None) -> dict[str, Examined]:
    """What is found in each file."""
    parsed = {str(path): _Parsed.of(Path(path)) for path in paths}
    contents = {path: file.content for path, file in parsed.items() if file.fault is None}
    if processes is not None:  # which the launcher's command line overrides
        contents = {
            path: content | {"num_processes": processes} if "distributed_type" in content else content
            for path, content in contents.items()
        }
    asked = [(parsed[path].kind, content) for path, content in contents.items()]
    findings = dict(zip(contents, in_child(_examine, asked), strict=True)) if asked else {}
    return {path: file.examined(findings.get(path, ())) for path, file in parsed.items()}


def _examine(asked: list[tuple[str, dict[str, Any]]]) -> list[list[Finding]]:
    examine = {"accelerate": examine_accelerate, "deepspeed": examine_deepspeed}
    return [list(examine[kind](content)) for kind, content in asked]


class _Parsed:
    """A file's content and lines, or the fault for which it has none."""

    def __init__(self, path: Path, kind: str, text: str = "", content: Any = None, fault: Fault | None = None) -> None:
        self.path, self.kind, self.content, self.fault = path, kind, content, fault
        self._lines = Lines(text)

    @classmethod
    def of(cls, path: Path) -> "_Parsed":
        # A name that says nothing may be a configuration; a file that cannot be read at all says so itself.
        by_its_ending = path.suffix.lower() in _ENDINGS or not path.is_file()
        kind = "deepspeed" if path.suffix == ".json" else "accelerate"
        try:
            text = read_text(path, "")
            content = _parsed_json(text) if path.suffix == ".json" else read_yaml(text, "")
        except InputError as error:
            return cls(path, kind, fault=_fault(path, str(error).removeprefix(": ") if by_its_ending else _NEITHER))
        if not isinstance(content, dict):
            said = f"holds no settings, but {brief(content)}" if by_its_ending else _NEITHER
            return cls(path, kind, fault=_fault(path, said))
        # accelerate reads JSON as well. Its own loader refuses a file without distributed_type
        # (config_args.process_config), and no key of DeepSpeed is named so.
        kind = "accelerate" if "distributed_type" in content else kind
        if kind == "accelerate" and (tool := foreign_tool(content)):
            return cls(path, kind, fault=_fault(path, f"is a configuration of {tool}, not of accelerate"))
        return cls(path, kind, text, content)

    def examined(self, findings: Iterable[Finding]) -> Examined:
        """The faults and notes that the findings are."""
        if self.fault:
            return Examined(self.kind, [self.fault], [])
        faults, notes = [], []
        for keys, text, effect in findings:
            fault = Fault(self.path, self._lines.line_of(keys), text, effect is Effect.REFUSED)
            (notes if effect is Effect.NOTED else faults).append(fault)
        first_lines = sorted(faults, key=lambda fault: fault.line or math.inf)
        return Examined(
            self.kind, first_lines, [f"line {note.line}: {note.text}" if note.line else note.text for note in notes]
        )


def _fault(path: Path, said: str) -> Fault:
    """A fault of a file without content; a parser's text begins with the line."""
    line = re.match(r"line (\d+): ", said)
    return Fault(path, int(line[1]), said[line.end() :]) if line else Fault(path, None, said)


def _parsed_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f": line {error.lineno}: not readable as JSON: {one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not readable as JSON: {one_line(error)}") from error


class Lines:
    """The lines that the keys of a YAML or JSON text stand on."""

    def __init__(self, text: str) -> None:
        import yaml

        try:
            self._root = yaml.compose(text.replace("\t", " "))  # JSON may be indented by tabs, YAML may not
        except yaml.YAMLError:
            self._root = None

    def line_of(self, keys: Keys) -> int | None:
        """The line of a key within keys; None where it is not in the text."""
        import yaml

        node, line = self._root, None
        for key in keys:
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            found = next((pair for pair in pairs if pair[0].value == key), None)
            if found is None:
                return line
            line, node = found[0].start_mark.line + 1, found[1]
        return line


# A tool, keys that all of its files have, and keys of which they have one.
_TOOLS = (
    ("axolotl", {"base_model"}, {"datasets", "pretraining_dataset", "adapter", "sequence_len", "micro_batch_size"}),
    ("axolotl", {"base_model"}, {"rl", "val_set_size", "learning_rate", "optimizer", "plugins"}),
    ("LLaMA-Factory", {"model_name_or_path"}, {"finetuning_type", "cutoff_len", "template", "dataset_dir"}),
    ("LLaMA-Factory's v1 trainer", {"model"}, {"model_class", "dist_config", "kernel_config"}),
    ("ms-swift", {"model"}, {"train_type", "tuner_type", "rlhf_type", "swift_version", "split_dataset_ratio"}),
    ("TRL", {"model_name_or_path"}, {"dataset_name", "dataset_mixture", "dataset_mixer", "datasets", "output_dir"}),
)


def foreign_tool(content: Mapping[str, Any]) -> str | None:
    """The tool whose file this is; None where it may be accelerate's."""
    if "distributed_type" in content:
        return None
    if any(isinstance(block, Mapping) and "_component_" in block for block in content.values()):
        return "torchtune"
    return next(
        (tool for tool, all_of, one_of in _TOOLS if all_of <= content.keys() and one_of & content.keys()), None
    )
