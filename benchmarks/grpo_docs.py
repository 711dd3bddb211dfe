"""The tables of docs/grpo.md."""

from levers_docs import results, table

GIB = 2**30


def phases() -> str:
    """Every case trained on a CPU: the error of each phase's peak."""
    found = [row for row in results("grpo")["rows"] if row["part"] == "cpu"]
    names = ["peak", "generation", "log_probs", "rewards", "forward", "backward", "optimizer"]
    errors = {(row["case"], row["phase"]): f"{row['error']:+.2%}" for row in found}
    rows = [
        [case, *(errors.get((case, name), "") for name in names)] for case in dict.fromkeys(r["case"] for r in found)
    ]
    return table(["case", *(name.replace("_", " ") for name in names)], rows)


def published() -> str:
    """Published peaks of other versions of TRL beside predictions for the installed one."""
    rows = [
        [
            row["model"],
            row["card"].removeprefix("NVIDIA ").removeprefix("GeForce "),
            f"{row['num_generations']} × {row['max_completion_length']}",
            f"{row['peak_allocated_bytes'] / GIB:.2f}",
            f"{row['predicted_bytes'] / GIB:.2f}",
            f"{row['phases']['generation'] / GIB:.2f}",
            f"{row['above_bytes_per_logit']:.1f}",
        ]
        for row in results("grpo")["rows"]
        if row["part"] == "published"
    ]
    heads = ["model", "card", "group × completion", "published (GiB)", "predicted (GiB)", "of it, generation (GiB)"]
    return table([*heads, "published above predicted (bytes a logit)"], rows)


TABLES = {"phases of GRPO": phases, "published GRPO": published}
