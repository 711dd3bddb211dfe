"""Every number that README.md and docs/ give in running text, by name, each from a result or recomputed here.

Pages hold `<!-- =name -->the number<!-- = -->`, which fill_docs.py (make docs) writes, and a test compares.
"""

from collections.abc import Callable
from statistics import median

from advised_logs import COUNTS, count
from docs_tables.markdown import RESULTS, results
from docs_tables.memory import card_errors

from hf_memopt.estimator.timing import step_time
from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.constants import assumed
from hf_memopt.levers.arguments import PLAN_PROFILES

GIB, GB, MB = 2**30, 1e9, 1e6
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
WEIGHTS_7B = 6_738_415_616  # Llama-2-7B's, counted from its configuration by tests/test_docs.py
WEIGHTS_70B = 70_553_706_496  # Llama-3.1-70B's, likewise


def _rows(name: str) -> list[dict]:
    return results(name)["rows"]


def _main_job() -> dict:
    return next(row for row in _rows("main_job") if row["recipe"] == "pretrain")


def _losses(job: dict) -> list[float]:
    return list(job["held_out_loss"].values())


def _lever(name: str) -> dict:
    return next(row for row in _rows("levers") if row["lever"] == name)


def _share(name: str) -> str:
    return _percent(_lever(name)["peak_ratio"])


def _published(method: str) -> list[float]:
    rows = _rows("estimator_published")
    return [row["error"] for row in rows if row["tier"] == "A" and row["method"] == method]


def _script_errors() -> list[float]:
    return [row["error"] for row in _rows("estimator_scripts")]


def _on_cards() -> list[float]:
    return [error for folder in sorted((RESULTS / "gpu").iterdir()) for error in card_errors(folder, "allocated")]


def _percent(value: float, digits: int = 1, sign: bool = False) -> str:
    value = round(100 * value, digits) + 0.0  # no minus before a zero
    return f"{value:{'+' if sign and value else ''}.{digits}f} %".replace("-", "−")


def _middle(errors: list[float], digits: int) -> str:
    return _percent(median(map(abs, errors)), digits)


def _range(errors: list[float], digits: int = 0) -> str:
    return f"{_percent(min(errors), digits, True)}, {_percent(max(errors), digits, True)}"


def _others(name: str) -> str:
    return _middle([row[name] for row in _rows("estimator_cpu") if row.get(name) is not None], 0)


def _overhead() -> dict:
    return _rows("trainer_overhead")[0]


def _video_shares() -> list[float]:
    return [family["measures"]["both"]["of_plain"] for family in _rows("video").values()]


def _video_demo() -> dict:
    return _rows("video_demo")[0]


def _tokens_of_1080p(model: str, frames: int) -> str:
    """Tokens of a clip of 1920 × 1080 pixels for a bundled model."""
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.video.inputs import VideoInputs
    from hf_memopt.video.processor import published_settings

    clip = VideoInputs(frames, 1080, 1920, settings=published_settings(model)).clip(load_config(model))
    return f"{clip.steps * clip.step_tokens:,}"


def _video_loss_error() -> float:
    """The largest relative difference of a family's losses from the plain Trainer's."""
    families = _rows("video").values()
    pairs = ((family["measures"]["plain Trainer"], row) for family in families for row in family["measures"].values())
    return max(abs(a - b) / a for plain, row in pairs for a, b in zip(plain["losses"], row["losses"], strict=True))


def _video_error() -> float:
    """The largest error of the estimate, over frames and families."""
    return max(abs(row["error"]) for family in _rows("video").values() for row in family["by_frames"].values())


def _small_with_many_logits(chunk: int | None) -> int:
    """Bytes: the peak of Llama-3.2-1B with LoRA and recomputation at 4 × 4096 tokens, for a chunk of the loss."""
    from hf_memopt import MemoryArguments, estimate, get_preset

    preset = get_preset("a100_80gb", method="lora")
    fields = {"per_device_train_batch_size": 4, "bf16": True, **CHECKPOINTED}
    memory_args = MemoryArguments(loss_chunk_size=chunk)
    job = "llama-3.2-1b", fields, 4096, "a100_80gb", preset.peft_config(), "bfloat16"
    return estimate(*job, memory_args=memory_args).peak_allocated_bytes


def _lever_weights() -> str:
    """Of the model that benchmarks/levers.py trains."""
    import torch
    from levers import config
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} million"


def _least_cosine() -> str:
    """Of gradients from compressed activations with the exact ones, rounded down."""
    found = min(
        row["gradient_cosine"] for row in _rows("levers") if "int8" in row["lever"] and "bf16" not in row["lever"]
    )
    return f"{int(found * 1e5) / 1e5:.5f}"


def _block_of_128(bytes_each: int) -> str:
    """128 integers and an fp32 scale, of the bytes that they stand for."""
    return f"{(128 + 4) / (128 * bytes_each):.2f}"


def _worst_lever_error() -> str:
    """What the levers that the README names are off by, rounded up to half a percent."""
    named = ["activation_checkpointing (checkpoint_ratio=1)", "activation_compression=int8", "loss_chunk_size=128"]
    worst = max(abs(_lever(name)["predicted_error"]) for name in named)
    return _percent(-(-worst * 200 // 1) / 200)


def _plan_seconds() -> list[float]:
    return [row["seconds"] for row in _rows("plans") if row["table"] == "plan"]


def _gb(size: float, digits: int = 1) -> str:
    return f"{size / GB:.{digits}f} GB"


def _activations_of_the_guide() -> int:
    """Samples × tokens × width × layers × 4 × bytes, as the guide multiplies them."""
    return 12 * 256 * 512 * 14 * 4 * 2


def _traced(checkpointing: bool) -> int:
    """Bytes of activations at the peak of a Llama of the guide's sizes, in bf16, from the estimator."""
    from transformers import LlamaConfig

    from hf_memopt import estimate

    config = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=8, vocab_size=32000
    )
    fields = {"per_device_train_batch_size": 12, "bf16": True} | (CHECKPOINTED if checkpointing else {})
    return estimate(config, fields, 256, "a100_80gb", dtype="float32").breakdown["activations"]


def _seven_billion(bytes_each: float) -> str:
    return _gb(WEIGHTS_7B * bytes_each)


def _nf4() -> float:
    """Bytes a weight in 4 bits: blocks of 64 with a scale of 8 bits each, scales in blocks of 256 with one of 32."""
    return 0.5 + 1 / 64 + 4 / (64 * 256)


# Errors of the estimate by what it is compared with: how to get them, digits of their median and of their range.
ERRORS: dict[str, tuple[Callable[[], list[float]], int, int]] = {
    "cpu": (lambda: [row["error"] for row in _rows("estimator_cpu")], 2, 2),
    "full": (lambda: _published("full"), 1, 0),
    "lora": (lambda: _published("lora"), 1, 0),
    "qlora": (lambda: _published("qlora"), 1, 0),
    "peft": (lambda: [row["error"] for row in _rows("estimator_peft") if not row["fitted"]], 1, 1),
}
FIGURES: dict[str, Callable[[], str]] = {
    "main_job.first_loss": lambda: f"{_losses(_main_job())[0]:.2f}",
    "main_job.last_loss": lambda: f"{_losses(_main_job())[-1]:.2f}",
    "main_job.seconds": lambda: f"{_main_job()['seconds_with_start_and_sampling']:.0f} s",
    "main_job.predicted": lambda: f"{_main_job()['predicted_allocated_bytes']:,}",
    "main_job.measured": lambda: f"{_main_job()['measured']['peak_allocated_bytes']:,}",
    "main_job.steps": lambda: f"{_main_job()['steps']}",
    "estimator.families": lambda: f"{len({row['family'] for row in _rows('estimator_cpu')})}",
    "estimator.settings": lambda: f"{len({row['setting'] for row in _rows('estimator_cpu')})}",
    "gpu.jobs": lambda: f"{len(_on_cards())}",
    "gpu.worst": lambda: _percent(max(map(abs, _on_cards())), 2),
    "scripts.count": lambda: f"{len(_script_errors())}",
    "scripts.median": lambda: _middle(_script_errors(), 2),
    "scripts.largest": lambda: _percent(max(map(abs, _script_errors())), 1),
    "estimator.accelerate": lambda: _others("accelerate_error"),
    "estimator.deepspeed": lambda: _others("deepspeed_error"),
    "plans.fills": lambda: f"{PLAN_PROFILES['maximum'][1]:.0%}".replace("%", " %"),
    "plans.seconds": lambda: f"{min(_plan_seconds()):.0f} to {max(_plan_seconds()):.0f} seconds",
    "video.of_plain": lambda: f"{_percent(min(_video_shares()), 0)} to {_percent(max(_video_shares()), 0)}",
    "video.losses": lambda: f"{_video_loss_error():.0e}".replace("e-0", "e-").replace("0e+00", "0"),
    "video.error": lambda: _percent(-(-_video_error() * 1000 // 1) / 1000),
    "video.demo_first_loss": lambda: f"{_losses(_video_demo())[0]:.2f}",
    "video.demo_last_loss": lambda: f"{_losses(_video_demo())[-1]:.4f}",
    "training.all_logits": lambda: f"{_small_with_many_logits(None) / GIB:.1f} GiB",
    "training.chunks": lambda: f"{_small_with_many_logits(512) / GIB:.1f} GiB",
    "video.qwen2_5_1080p": lambda: _tokens_of_1080p("qwen2.5-vl-7b", 64),
    "video.qwen3_1080p": lambda: _tokens_of_1080p("qwen3-vl-8b", 64),
    "video.demo_seconds": lambda: f"{_video_demo()['seconds']:.0f} s",
    **{f"advised.{name}": lambda name=name: str(count()[name]) for name in COUNTS},
    "levers.checkpointing": lambda: _share("activation_checkpointing (checkpoint_ratio=1)"),
    "levers.compression": lambda: _share("activation_compression=int8"),
    "levers.chunks": lambda: _share("loss_chunk_size=128"),
    "levers.all": lambda: _share(
        "loss_chunk_size=128, activation_checkpointing, activation_compression=int8, adamw_8bit"
    ),
    "levers.weights": _lever_weights,
    "levers.cosine": _least_cosine,
    "levers.int8_of_bf16": lambda: _block_of_128(2),
    "levers.int8_of_fp32": lambda: _block_of_128(4),
    "levers.error": _worst_lever_error,
    "overhead.time": lambda: f"{_overhead()['step_time_ratio_median']:.3f}",
    "overhead.memory": lambda: f"{_overhead()['peak_ratio']:.3f}",
    "overhead.steps": lambda: f"{_overhead()['steps_each']}",
    "overhead.spread": lambda: _percent(max(abs(one - 1) for one in _overhead()["step_time_ratio_quartiles"]), 0),
    "offloading.share": lambda: _percent(assumed("link_efficiency", get_hardware("cpu")).value, 0),
    "offloading.read": lambda: f"{step_time.DISK_READ / GB:g} GB/s",
    "offloading.write": lambda: f"{step_time.DISK_WRITE / GB:g} GB/s",
    # What formulas give, for docs/memory.md and docs/claims.md.
    "memory.weights_7b": lambda: f"{WEIGHTS_7B:,}",
    "memory.fp32_7b": lambda: _seven_billion(4),
    "memory.bf16_7b": lambda: _seven_billion(2),
    "memory.nf4": lambda: f"{_nf4():.3f}",
    "memory.nf4_7b": lambda: _seven_billion(_nf4()),
    "memory.adam_fp32_7b": lambda: _seven_billion(8),
    "memory.adam_8bit": lambda: f"{2 + 2 * 4 / 256:.3f}",
    "memory.adam_8bit_7b": lambda: _seven_billion(2 + 2 * 4 / 256),
    "memory.whole_fp32_7b": lambda: _seven_billion(16),
    "memory.whole_bf16_7b": lambda: _seven_billion(8),
    "memory.guide_activations": lambda: f"{_activations_of_the_guide() / MB:.0f} MB",
    "memory.guide_activations_layer": lambda: f"{_activations_of_the_guide() / 14 / MB:.1f} MB",
    "memory.traced_activations": lambda: f"{_traced(False) / MB:.0f} MB",
    "memory.traced_checkpointed": lambda: f"{_traced(True) / MB:.0f} MB",
    "memory.attention_scores": lambda: f"{12 * 8 * 256**2 * 2 / MB:.1f} MB",
    "memory.attention_flash": lambda: f"{12 * 256 * 512 * 2 / MB:.1f} MB",
    "memory.attention_scores_long": lambda: f"{1 * 32 * 32768**2 * 2 / GIB:.0f} GiB",
    "memory.logits_once": lambda: f"{8 * 1024 * 128_256 * 2 / GIB:.2f} GiB",
    "memory.logits": lambda: f"{8 * 1024 * 128_256 * (2 + 4 + 4 + 4) / GIB:.1f} GiB",
    "memory.pipeline": lambda: f"{8 * 2 * 12 * 256 * 2:,} bytes",
    "memory.pipeline_long": lambda: f"{8 * 2 * 12 * 2048 * 2:,} bytes",
    "memory.zero3_70b": lambda: f"{WEIGHTS_70B * 16 / 8 / GB:.0f} GB",
    "memory.zero1_7b": lambda: _gb(WEIGHTS_7B * (2 + 2 + 12 / 8)),
    "memory.zero2_7b": lambda: _gb(WEIGHTS_7B * (2 + (2 + 12) / 8)),
    "memory.zero3_7b": lambda: _gb(WEIGHTS_7B * 16 / 8),
    "memory.zero0_7b": lambda: _gb(WEIGHTS_7B * 16),
}
for _name, (_errors, _median_digits, _range_digits) in ERRORS.items():
    FIGURES |= {
        f"estimator.{_name}_rows": lambda errors=_errors: f"{len(errors())}",
        f"estimator.{_name}_median": lambda errors=_errors, digits=_median_digits: _middle(errors(), digits),
        f"estimator.{_name}_range": lambda errors=_errors, digits=_range_digits: _range(errors(), digits),
    }
