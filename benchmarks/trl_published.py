"""Peaks that TRL's own pull requests and notebooks state, beside predictions: python benchmarks/trl_published.py

The rows and what is inferred of their settings: data/published_trl.json. They were measured with older versions, whose
loss held whole logits; predictions are for the installed one, which computes tiles. What a row lies above its
prediction is therefore given per logit, too.
"""

import json
from pathlib import Path

from jobs import four_bits, lora
from record import record

from hf_memopt import estimate

DATA = Path(__file__).parent / "data/published_trl.json"


def predicted(row: dict) -> dict:
    """A published row with the prediction for its settings."""
    settings = dict(row["settings"])
    adapter, quantized = settings.pop("lora", None), settings.pop("quantized", False)
    more = {"peft_config": lora(**adapter) if adapter else None, "dtype": row["dtype"], "task": row["task"]}
    more["quantization_config"] = four_bits(double=True) if quantized else None
    found = estimate(row["model"], settings, row["tokens"], row["hardware"], **more)
    guess = getattr(found, row["metric"])
    logits = row["logit_rows"] * row["vocabulary"]
    return row | {
        "predicted_bytes": guess,
        "phase": found.phase,
        "above_bytes_per_logit": (row["peak_bytes"] - guess) / logits,
    }


def main() -> None:
    rows = []
    for row in json.loads(DATA.read_text())["rows"]:
        rows.append(predicted(row))
        print(row["id"], f"{rows[-1]['predicted_bytes'] / row['peak_bytes'] - 1:+.1%}", flush=True)
    record("trl_published", rows)


if __name__ == "__main__":
    main()
