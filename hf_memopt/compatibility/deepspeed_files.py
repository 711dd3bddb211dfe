"""What there is to say of a DeepSpeed JSON: what is refused, what nobody reads, what acts otherwise than it looks."""

from collections.abc import Iterator, Mapping
from typing import Any

from hf_memopt.engines.deepspeed import missing_batch_size
from hf_memopt.engines.deepspeed_values import FILLED, deprecated_fields, homes, keys_read, refusals
from hf_memopt.errors import misspelling, one_line
from hf_memopt.findings import Effect, Finding, places, value_at
from hf_memopt.packages import how_to_install, is_installed

ZERO, CHECKPOINTING = ("zero_optimization",), "activation_checkpointing"
# Looked for elsewhere than in DeepSpeed's configuration: deepspeed.initialize(), accelerate's plugin, transformers.
_READ_LATER = {"data_parallel_size", "sequence_parallel_size", "msamp", "inference"}
# Beside the keys that begin with stage3_ these are read at stage 3 alone (deepspeed.runtime.engine).
_STAGE_3 = {
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *("zero_hpz_partition_size", "offload_param", "super_offload"),
}
_OFFLOADS = tuple((*ZERO, name) for name in ("offload_optimizer", "offload_param"))


def examine_deepspeed(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What is found in the JSON's content."""
    if reason := missing_batch_size(config):
        yield Finding((), reason)
    refused = list(refusals(config))
    yield from refused
    seen = {finding.keys for finding in refused}
    yield from _nvme_without_path(config)
    try:
        known = keys_read()
    except ImportError as error:
        why, fix = f"cannot be used here ({one_line(error)})", ""
        if not is_installed("deepspeed"):
            why, fix = "is not installed here", f": {how_to_install('deepspeed')}"
        yield Finding((), f"DeepSpeed {why}, so its own check was left out{fix}", Effect.NOTED)
        return
    yield from (finding for finding in _unread(config, known) if finding.keys not in seen)
    if not refused:
        zero = value_at(config, ZERO)
        if zero is None:
            text = (
                "accelerate, and so the Trainer, refuses a DeepSpeed configuration without zero_optimization: add it"
            )
            yield Finding((), text, Effect.NOTED)
        for keys, text in (*_of_stage(zero or {}), *_automatic(config), *_renamed(zero or {}), *_of_trainers(config)):
            yield Finding(keys, text, Effect.NOTED)


def _nvme_without_path(config: Mapping[str, Any]) -> Iterator[Finding]:
    for keys in _OFFLOADS:
        block = value_at(config, keys, {})
        if isinstance(block, Mapping) and block.get("device") == "nvme" and not block.get("nvme_path"):
            text = f"{'.'.join(keys)}.device='nvme' needs nvme_path, a folder on the drive: DeepSpeed fails without it"
            yield Finding((*keys, "device"), text, Effect.ACCEPTED)


def _unread(config: Mapping[str, Any], known: frozenset) -> Iterator[Finding]:
    """Keys that DeepSpeed never looks for: at the top, and in blocks that have no class of their own."""
    blocks = {keys[:1] for keys in known if len(keys) == 2} - {ZERO}
    for start in [(), *sorted(blocks)]:
        names = {keys[-1] for keys in known if keys[:-1] == start}
        block = value_at(config, start, {})
        for key in block if isinstance(block, Mapping) else ():
            if key in names or (not start and (key in _READ_LATER or key.lower().startswith(("_", "comment")))):
                continue
            yield _unread_key((*start, key), block[key], names)


def _unread_key(keys: tuple[str, ...], value: Any, known: set[str]) -> Finding:
    key, where = keys[-1], f"{keys[0]} has an unknown key" if keys[1:] else "unknown key"
    text = f"{where} {key!r}, which DeepSpeed would ignore"
    if close := misspelling(key, known):
        return Finding(keys, f"{text}: did you mean {close!r}?", Effect.ACCEPTED)
    if home := homes().get(key):
        return Finding(keys, f"{text}: it belongs in {'.'.join(home)}", Effect.ACCEPTED)
    inner = sorted(known.intersection(value)) if isinstance(value, Mapping) and not keys[1:] else ()
    if inner:
        return Finding(keys, f"{text}: write {' and '.join(inner)} at the top, without it", Effect.ACCEPTED)
    return Finding(keys, f"{'.'.join(keys)}: DeepSpeed reads no such key", Effect.NOTED)


def _of_stage(zero: Mapping[str, Any]) -> Iterator[tuple]:
    stage = zero.get("stage", 0)
    if stage in (3, "auto"):
        return
    for keys, value in places(zero):
        acts = value.get("device") in ("cpu", "nvme") if isinstance(value, Mapping) else value is True or value != 1
        if value and acts and (keys[-1] in _STAGE_3 or keys[-1].startswith("stage3_")):
            yield (*ZERO, *keys), f"zero_optimization.{'.'.join(keys)} acts at stage 3 alone, and stage is {stage}"


def _automatic(config: Mapping[str, Any]) -> Iterator[tuple]:
    """An "auto" that nobody fills in."""
    for keys, value in places(config):
        if value != "auto" or keys in FILLED or keys[0] not in (*ZERO, "fp16", "bf16", "aio", CHECKPOINTING):
            continue
        place, alias = ".".join(keys), (*keys[:-1], f"stage3_{keys[-1]}")
        if alias in FILLED:
            yield keys, f'{place}="auto" is filled in by transformers only as {alias[-1]}: DeepSpeed takes its default'
        elif keys[0] in ("aio", CHECKPOINTING):
            yield keys, f'{place}="auto" is filled in by nobody, and DeepSpeed takes the word itself: write a value'
        else:
            yield keys, f'{place}="auto" is filled in by nobody: DeepSpeed takes its default'
    keys = (*ZERO, "stage3_gather_16bit_weights_on_model_save")
    if value_at(config, keys) == "auto" and value_at(config, (*ZERO, "stage")) == 3:
        text = "becomes false: save_model() writes no weights that load without DeepSpeed"
        yield keys, f'{".".join(keys)}="auto" {text}'


def _renamed(zero: Mapping[str, Any]) -> Iterator[tuple]:
    for name, instead in deprecated_fields().items():
        if zero.get(name):
            yield (*ZERO, name), f"zero_optimization.{name} is deprecated: accelerate looks only for {instead}"


def _of_trainers(config: Mapping[str, Any]) -> Iterator[tuple]:
    """What only models of DeepSpeed's own use."""
    block = config.get(CHECKPOINTING)
    if isinstance(block, Mapping) and any(value not in (False, None, 0) for value in block.values()):
        text = f"{CHECKPOINTING} acts on models that call deepspeed.checkpointing, and transformers' do not"
        yield (CHECKPOINTING,), f"{text}: set gradient_checkpointing in TrainingArguments"
