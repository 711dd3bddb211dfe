"""GRPO, phase by phase: python benchmarks/grpo.py [cpu] [published]

cpu: tiny models really trained, each phase's peak from the profiler beside the predicted one (the cases of
tests/test_grpo_estimates.py). published: peaks that others measured with TRL 1.12 or older
(data/published_grpo.json, settings partly inferred) beside predictions for the installed TRL, which computes
log-probabilities in tiles where the older ones made whole logits: what the rows lie above the prediction is given per
logit, too.
"""

import json
import sys
import tempfile
from pathlib import Path

from jobs import four_bits, lora
from record import record

ROOT = Path(__file__).parents[1]
MICRO, PROMPT, VOCABULARY = 8, 12, 151_936
PUBLISHED = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": 4, "bf16": True, "beta": 0.0}
PUBLISHED["activation_checkpointing"] = True


def on_cpu() -> list[dict]:
    sys.path.insert(0, str(ROOT / "tests"))
    import test_grpo_estimates as cases

    from hf_memopt import estimate_trainer

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases.llama().save_pretrained(folder)
        for name, case in cases.CASES.items():
            settings = {key: folder if value == "saved" else value for key, value in case.items()}
            if "peft_config" in settings:
                settings["peft_config"] = settings["peft_config"]()
            made = lambda settings=settings: cases.make(folder, **settings)  # noqa: E731
            predicted, measured = estimate_trainer(made(), "cpu"), cases.measured(made)
            peaks = {"peak": (predicted.peak_allocated_bytes, measured.pop(""))}
            peaks |= {phase: (predicted.phases[phase], size) for phase, size in measured.items()}
            rows += [
                {
                    "case": name,
                    "phase": phase,
                    "predicted_bytes": guess,
                    "measured_bytes": size,
                    "error": guess / size - 1,
                }
                for phase, (guess, size) in peaks.items()
            ]
            print(name, {row["phase"]: f"{row['error']:+.2%}" for row in rows if row["case"] == name}, flush=True)
    return rows


def published() -> list[dict]:
    from hf_memopt import estimate

    rows = []
    for row in json.loads((ROOT / "benchmarks/data/published_grpo.json").read_text())["rows"]:
        length, groups = row["max_completion_length"], row["num_generations"]
        predicted = estimate(
            row["model"],
            {**PUBLISHED, "max_completion_length": length, "num_generations": groups},
            PROMPT + length,
            "rtx_4090",
            peft_config=lora(lora_alpha=16, lora_dropout=0.05, task_type=None),
            quantization_config=four_bits(double=True),
            dtype="bfloat16",
            task="grpo",
        )
        above = row["peak_allocated_bytes"] - predicted.peak_allocated_bytes
        made = {"predicted_bytes": predicted.peak_allocated_bytes, "phases": predicted.phases}
        rows.append(row | made | {"above_bytes_per_logit": above / (MICRO * length * VOCABULARY)})
        print(row["id"], rows[-1]["predicted_bytes"], f"{rows[-1]['above_bytes_per_logit']:.1f}", flush=True)
    return rows


if __name__ == "__main__":
    parts = sys.argv[1:] or ["cpu", "published"]
    rows = [{"part": part} | row for part in parts for row in {"cpu": on_cpu, "published": published}[part]()]
    record("grpo", rows, " ".join(["python benchmarks/grpo.py", *sys.argv[1:]]))
