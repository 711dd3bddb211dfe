"""The longest sequences that fit cards of three sizes, by memory features: python benchmarks/lengths.py

Nothing here is measured: the lengths are predicted, by `hf-memopt plan --seq-len max`.
"""

import shlex

from questions import ask
from record import record

COMMANDS = [
    f"plan llama-3.1-8b --hardware {card} --method {method} --seq-len max"
    for method in ("lora", "qlora")
    for card in ("rtx_4090", "l40s", "a100_80gb")
]


def rows_of(command: str) -> list[dict]:
    """A row for each set of memory features."""
    found, _ = ask(command)
    hardware = shlex.split(command)[3]
    kept = ("device_bytes", "host_bytes", "tokens_per_second")
    return [
        {"hardware": hardware, "method": row["method"], "settings": row["settings"]}
        | {"seq_len": row["seq_len"], "limited_by": row["limited_by"]}
        | {name: row["estimate"].get(name) for name in kept}
        for row in found["lengths"]
    ]


def main() -> None:
    """Ask for each card, and write the file after each."""
    rows = []
    for command in COMMANDS:
        print(f"hf-memopt {command}", flush=True)
        rows += rows_of(command)
        record("lengths", rows)


if __name__ == "__main__":
    main()
