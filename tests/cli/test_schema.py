"""The published schemas against what the commands print."""

import json

import pytest
from conftest import ROOT, slow, sweep

TYPES = {"integer": int, "number": int | float, "string": str, "boolean": bool, "null": type(None)}
TYPES |= {"object": dict, "array": list}
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 23.64 GiB in all, of which 1.00 GiB is free."


def faults(value, schema, where="$") -> list[str]:
    """What a value does not keep of a schema; of JSON Schema, the keywords that the schemas use."""
    unknown = schema.keys() - {"$schema", "title", "description", "type", "enum", "anyOf", "oneOf"}
    assert unknown <= {"properties", "required", "additionalProperties", "items"}, unknown
    for word in ("anyOf", "oneOf"):
        if word in schema:
            tried = [faults(value, one, where) for one in schema[word]]
            return [] if [] in tried else [f"{where}: none of {word}", *min(tried, key=len)]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r}"]
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(isinstance(value, TYPES[kind]) and isinstance(value, bool) <= (kind == "boolean") for kind in kinds):
        return [f"{where}: {value!r:.60} is no {kinds}"]
    if isinstance(value, list):
        return [one for item in value for one in faults(item, schema.get("items", {}), f"{where}[]")]
    return _object_faults(value, schema, where) if isinstance(value, dict) else []


def _object_faults(value, schema, where) -> list[str]:
    own, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    found = [f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, item in value.items():
        if name not in own and other is False:
            found.append(f"{where}.{name} is not in the schema")
        else:
            found += faults(item, own.get(name, other), f"{where}.{name}")
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("presets",),
        ("show", "rtx_4090", "--method", "qlora"),
        ("show", "cpu_x2", "--strategy", "zero3"),
        ("advise", OOM),
        ("advise", "all is well"),
        ("export", "t4", "run"),
        ("doctor", str(ROOT / "accelerate_configs" / "cpu.yaml")),
        slow(("doctor",)),
        slow(("estimate", "gpt2", "--hardware", "rtx_4090", "--seq-len", "64", "--tokens", "1M", "--price", "1")),
        sweep(("estimate", "llama-3.1-8b", "--hardware", "rtx_3070", "--seq-len", "512")),
        slow(("plan", "llama-3.2-1b", "--hardware", "rtx_4090", "--seq-len", "512", "--tokens", "1M")),
        sweep(("plan", "llama-3.1-8b", "--hardware", "rtx_3070", "--method", "full", "--seq-len", "512")),
        slow(("plan", "qwen3-0.6b", "--hardware", "any", "--method", "lora")),
        sweep(("plan", "qwen2.5-vl-3b", "--hardware", "rtx_4090", "--method", "qlora", "--frames", "max")),
    ],
    ids=lambda words: " ".join(words).replace(f"{ROOT}/", "")[:40],
)
def test_output_keeps_its_schema(words, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = command(*words, "--json")
    assert code in (0, 1), errors
    code, schema, _ = command("schema", words[0])
    assert code == 0
    assert not faults(json.loads(output), json.loads(schema))


def test_a_schema_says_what_fields_mean_and_takes_nothing_else(command):
    schema = json.loads(command("schema", "estimate")[1])
    peak = schema["properties"]["peak_allocated_bytes"]
    assert peak["type"] == "integer" and "max_memory_allocated" in peak["description"]
    assert schema["properties"]["breakdown"]["additionalProperties"] == {"type": "integer"}
    assert faults({"what": 1}, schema)


def test_unknown_command(command):
    code, output, errors = command("schema", "estimat")
    assert code == 2 and not output and "Did you mean 'estimate'?" in errors
