"""docs/levers.md: what each memory feature saves and costs."""

from docs_tables.markdown import listed, measured, results, shown

# What guides say, beside what was measured: lever -> claim.
CLAIMS = {
    "activation_checkpointing (checkpoint_ratio=1)": "60–80 % of activations, 30–40 % more compute",
    "checkpoint_ratio=0.5": "40–50 % of activations, 15–20 % more compute",
    "activation_compression=int8": "50 % of activations",
    "activation_compression=int8, activation_checkpointing": "70–80 % of activations",
    "bf16": "50 % of weights and activations",
    "optim=adamw_8bit": "8 instead of 12 bytes per weight",
    "adam_mini": "6 instead of 12 bytes per weight",
}


def levers() -> str:
    rows = results("levers")["rows"]
    columns = {
        "lever": lambda row: row["lever"] + (" †" if "date" in row else ""),
        "peak": "{peak_ratio:.1%}",
        "step time": shown("step_time_ratio", ".2f", 1),
        "gradient error": shown("gradient_error", ".1e", 1),
        "held-out loss ×": shown("held_out_loss_ratio", ".4f", 1),
        "estimate error": "{predicted_error:+.2%}",
        "guides say": lambda row: CLAIMS.get(row["lever"], ""),
    }
    older = sorted({(row["date"], row["device"]) for row in rows if "date" in row})
    sources = [measured("levers"), *(f"Rows marked †: {date} on {device}." for date, device in older)]
    return f"{listed(rows, columns)}\n\n{' '.join(sources)}"


TABLES = {"levers": levers}
