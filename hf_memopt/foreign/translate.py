"""Apply a tool's table to the settings of a file: a JobSpec, and what became of every key."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief, closest, one_line
from hf_memopt.field_values import fit, hints_of
from hf_memopt.foreign.key_table import Row, Table, as_text, is_off
from hf_memopt.foreign.values import VIA
from hf_memopt.job.spec import JobSpec, Tool
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.presets.quantization_fields import check_quantization

_GROUPS = ("training", "lora", "quantization", "sizes", "memory", "own")
# Fields of JobSpec that a table may set, as it takes them.
_OWN = {
    "seq_len": int,
    "unbounded": str,  # the reason that there is none
    "prompt_len": int,  # of a sample whose completion is generated
    "world_size": int,
    "sequence_parallel": int,
    "effective_batch_size": int,
    "packed": bool,
    "padded": bool,
    "kbit_preparation": bool,
    "expandable": bool,
    "autocast_adapter_dtype": bool,
}
# Fields of a training configuration that lengths and batches are computed of.
_COUNTS = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length"), int)
# What transformers compares with a DeepSpeed file (integrations/deepspeed.py, trainer_config_process).
_COMPARED = dict.fromkeys(
    ("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"), float
)
# Parts of a micro-batch -> our field of their tokens, and the tokens of the largest where their number is not set (0).
_PARTS = {"loss_chunks": ("loss_chunk_size", 1), "mlp_tiles": ("mlp_tile_size", 32768)}
EVALUATION = ("eval_strategy", "do_eval")  # a recipe's own, on rows that it holds out
_COMPLETION = 512  # max_completion_length by default, in ms-swift and in TRL 1.16


@dataclass(frozen=True)
class Remark:
    """What became of a key of theirs: `text` is how it is approximated, or why it is refused."""

    key: str
    value: Any
    text: str = ""

    def __str__(self) -> str:
        return f"{self.key}={brief(self.value)}{f': {self.text}' if self.text else ''}"


@dataclass
class Translation:
    """A file in our words.

    Attributes:
        fields: ours, dotted -> value.
        run: ours that memory does not depend on -> value, which a run takes.
        translated: key of theirs -> ours.
        neutral: keys without effect on memory.
        unwritten: keys of which a migrated job has nothing, or a part.
        approximated, refused, unknown: the rest.
    """

    table: Table
    fields: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)
    neutral: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    approximated: list[Remark] = field(default_factory=list)
    refused: list[Remark] = field(default_factory=list)
    unknown: list[Remark] = field(default_factory=list)

    def faults(self) -> Iterator[tuple[str, str]]:
        """Every key that keeps the file from being answered, and its sentence."""
        for remark in self.refused:
            yield remark.key, str(remark)
        for remark in self.unknown:
            near = closest(remark.key, (row.key for row in self.table.rows), cutoff=0.8)
            advice = f"did you mean {near}?" if near else "leave it out if memory does not depend on it"
            yield remark.key, f"{remark.key} is not known ({self.table.name} {self.table.version}): {advice}"

    def check(self) -> None:
        """Raise for the first setting that cannot be answered.

        Raises:
            InputError: a refused or an unknown key.
        """
        if sentences := [sentence for _, sentence in self.faults()]:
            more = f" ({len(sentences) - 1} more: hf-memopt doctor FILE)" if len(sentences) > 1 else ""
            raise InputError(f"{self.table.name}: {sentences[0]}{more}")

    @property
    def length(self) -> str:
        """The reason that a job without a length is refused; empty where its tool has a default."""
        return self.fields.get("unbounded", self.table.length)

    def spec(self, seq_len: int | None = None, devices: int | None = None) -> JobSpec:
        """The job that the file describes.

        Args:
            seq_len: in place of the file's.
            devices: in place of the file's.

        Raises:
            InputError: a value that our field does not take.
        """
        groups = self._groups()
        own, training = fit(_OWN, groups["own"]), groups["training"]
        training |= fit(_COUNTS, {name: training[name] for name in _COUNTS.keys() & training.keys()})
        own.pop("unbounded", None)
        batch = max(1, training.get("per_device_train_batch_size", 1))
        if self.table.step_samples:
            steps = -(-self.table.step_samples // (batch * max(1, devices or own.get("world_size") or 1)))
            training.setdefault("gradient_accumulation_steps", steps)
        if prompt := own.pop("prompt_len", None):  # here a sample is both
            own["seq_len"] = prompt + training.get("max_completion_length", _COMPLETION)
        own["seq_len"] = seq_len or own.get("seq_len")
        _set_part_sizes(groups["memory"], own["seq_len"] or 0, batch, own.get("packed", False))
        if (training.get("fsdp_config") or {}).get("activation_checkpointing") and self.table.name != "TRL":
            training.pop("activation_checkpointing", None)  # FSDP checkpoints layers itself; TRL refuses both
        if training.get("deepspeed"):
            training = fit(_COMPARED, {name: self.run[name] for name in _COMPARED if name in self.run}) | training
        adapter = own.get("method", "full") != "full"
        tool = Tool(
            name=self.table.name,
            expandable=own.pop("expandable", self.table.expandable),
            features=self.table.features(),
            autocast_adapter_dtype=own.pop("autocast_adapter_dtype", True),
            launched=self.table.launched,
        )
        return JobSpec(
            **own,
            training=training,
            lora=groups["lora"] if adapter else {},
            quantization=check_quantization(groups["quantization"]),
            sizes=groups["sizes"],
            memory_args=MemoryArguments(**fit(hints_of(MemoryArguments), groups["memory"])),
            named=frozenset(groups["memory"]),
            tool=tool,
        )

    def _groups(self) -> dict[str, dict[str, Any]]:
        """The fields by what they belong to; what is inside a mapping of ours, in that mapping."""
        groups: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
        for name, value in self.fields.items():
            group, *keys = name.split(".") if "." in name else ("own", name)
            place = groups[group]
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = dict(value) if isinstance(value, Mapping) else value
        return groups


def _set_part_sizes(memory: dict[str, Any], length: int, batch: int, packed: bool) -> None:
    """Put the tokens of each part of a micro-batch in place of the number of parts."""
    counts = fit(dict.fromkeys(_PARTS, int), {name: memory.pop(name) for name in _PARTS.keys() & memory.keys()})
    for name, parts in counts.items():
        tokens, largest = _PARTS[name]
        parts = parts or -(-length * (batch if packed else 1) // largest)
        if length and parts != 1:
            memory[tokens] = -(-length * batch // parts)


def translate(table: Table, settings: Mapping[str, Any], folder: Path) -> Translation:
    """A file's settings in our words. None is dropped: it is translated, neutral, approximated, refused or unknown.

    Args:
        folder: of the file, from which the files that it names are looked for.
    """
    result = Translation(table)
    flat = dict(_flat(table, settings))
    given = {key: value for key, value in flat.items() if value is not None or table.reads_null(key)}
    present = {**table.defaults, **given}
    for key in flat.keys() - present.keys():
        if table.rows_of(key):
            result.neutral.append(key)
        else:
            result.unknown.append(Remark(key, None))
    for key, (other, factor) in table.multiples.items():
        if is_off(present.get(key)) and isinstance(present.get(other), int):
            present[key] = factor * present[other]
    for key, choices in table.implied.items():
        if is_off(present.get(key)):
            present[key] = _implied(result, key, choices, present)
    # In the table's order: a later row may change what an earlier one set.
    for key in sorted(present, key=lambda key: table.place(key)):
        _apply(result, key, present, folder, given=key in flat)
    for key in table.required:
        if is_off(present.get(key)):
            result.refused.insert(0, Remark(key, None, "a training job names it"))
    return result


def _flat(table: Table, settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values; those inside a mapping or list under dotted keys where the table has rows for them."""
    for key, value in settings.items():
        name = f"{within}{key}"
        if isinstance(value, list) and table.inside(name):
            value = {str(item): True for item in value}
        if isinstance(value, Mapping) and value and table.inside(name):
            yield from _flat(table, value, f"{name}.")
        else:
            yield name, value


def _implied(result: Translation, key: str, choices: Mapping[str, str], present: Mapping[str, Any]) -> str | None:
    """The first of a key's values with which all others of a file's settings go that go with some of them only."""
    items = {name: value if isinstance(value, list) else [value] for name, value in present.items()}
    said = [*items, *(f"{name}={as_text(item)}" for name, values in items.items() for item in values)]
    left = list(choices)
    for word in said:
        with_it = {
            choice for choice, words in choices.items() if any(fnmatchcase(word, name) for name in words.split())
        }
        left = [choice for choice in left if choice in with_it or not with_it]
    other = (left if len(left) > 1 else [*choices])[1]
    advice = f"name one, as in {result.table.name.lower()} {other} --config FILE"
    if not left:
        result.refused.append(Remark(key, None, f"no {key} has all of the file's settings: {advice}"))
    elif len(left) > 1:
        others = ", ".join(left[1:])
        result.approximated.append(Remark(key, left[0], f"the file goes with {others}, too: {advice}"))
    return left[0] if left else None


def _apply(result: Translation, key: str, present: Mapping[str, Any], folder: Path, given: bool) -> None:
    value, rows = present[key], result.table.rows_of(key)
    row = next((row for row in rows if row.holds(value, present)), None)
    if not rows:
        result.unknown.append(Remark(key, value))
    elif row is None and not is_off(value):
        others = ", ".join({name: 0 for row in rows if row.values is None and row.only is None for name in row.when})
        text = f"what it does beside these values of {others} is not known" if others else "this value is not known"
        result.refused.append(Remark(key, value, text))
    elif row is None or (row.is_switch and is_off(value)):
        result.neutral += [key] if given else []
    elif row.effect == "refused":
        result.refused.append(Remark(key, value, row.why))
    else:
        _set(result, row, key, value, folder, given)


def _set(result: Translation, row: Row, key: str, value: Any, folder: Path, given: bool) -> None:
    try:
        ours = row.values[as_text(value)] if row.values is not None else value
        ours = VIA[row.via](ours, result.table, folder) if row.via else ours
    except InputError as error:
        result.refused.append(Remark(key, value, one_line(error)))
        return
    target = result.run if row.effect == "none" else result.fields
    for name, setting in [*([(row.to.replace("*", key), ours)] if row.to else []), *row.also.items()]:
        # Set a field of ours, or add to one whose name ends with +.
        if not name.endswith("+"):
            target[name] = setting
        elif (present := target.get(name[:-1])) != "all-linear":
            target[name[:-1]] = [*(present or []), *(setting if isinstance(setting, list) else [setting])]
    if row.effect == "approximated":
        result.approximated.append(Remark(key, value, row.why))
    elif given and row.effect == "none":
        result.neutral.append(key)
    elif given:
        result.translated[key] = row.to or ", ".join(row.also)
    changed = row.effect == "none" and as_text(ours) != as_text(value)
    unwritten = row.effect in ("none", "approximated") and (changed or not (row.to or row.also))
    if given and (unwritten or {f"training.{name}" for name in EVALUATION} & {row.to, *row.also}):
        result.unwritten.append(key)
