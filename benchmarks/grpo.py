"""GRPO, phase by phase: python benchmarks/grpo.py

Tiny models really trained on the CPU, each phase's peak from the profiler beside the predicted one: the cases of
tests/estimator/test_grpo_estimates.py.
"""

import sys
import tempfile
from pathlib import Path

from record import record


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "estimator")]
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
    record("grpo", rows)


if __name__ == "__main__":
    main()
