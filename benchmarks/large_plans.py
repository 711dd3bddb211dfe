"""Plans of long samples and large models on several cards: python benchmarks/large_plans.py

Full fine-tuning, each as its command asks for it; nothing was measured.
"""

from record import kept, record_each

from hf_memopt.planner.plan import plan

# A model, its devices, tokens a sample (None: the preset's), samples a step (None: 32).
JOBS = (
    ("llama-3.1-8b", "h100_80gb_x8", 131_072, None),
    ("qwen3-8b", "h100_80gb_x8", 2**20, 1),
    ("llama-3.1-70b", "h100_80gbx16", 32_768, None),
    ("qwen3-30b-a3b", "h200x8", None, None),
    ("gpt-oss-120b", "h200x8", None, None),
)


def planned(model: str, hardware: str, seq_len: int | None, samples: int | None) -> dict:
    """The usual settings of a plan."""
    found = plan(model, hardware, effective_batch_size=samples, seq_len=seq_len, method="full")
    estimate = found.usual.estimate
    return {
        "settings": found.usual.summary,
        "tokens": found.spec.seq_len,
        "samples": found.spec.effective_batch_size,
        **kept(estimate, "device_bytes", "host_bytes", "step_seconds", "tokens_per_second"),
    }


def compared(model: str, hardware: str, seq_len: int | None, samples: int | None) -> dict:
    """A row: a job and its plan."""
    asked = {"model": model, "hardware": hardware, "seq_len": seq_len, "asked_samples": samples}
    return {**asked, **planned(model, hardware, seq_len, samples)}


def again(row: dict) -> dict:
    """What is planned now."""
    return planned(row["model"], row["hardware"], row["seq_len"], row["asked_samples"])


if __name__ == "__main__":
    record_each("large_plans", compared, JOBS)
