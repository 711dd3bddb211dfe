"""Settings of a training job, the real run of it on this device, and what the estimator predicts for it."""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_memopt.contrib.calibration.processes import Skip
from hf_memopt.contrib.calibration.readings import accelerator, peaks, synchronize

STEPS = 6  # the first two build states and warm up; the rest is timed
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training job, as JSON values.

    Attributes:
        kind: what the error table groups by.
        fields: of TrainingArguments.
        memory: of MemoryArguments; None trains with the plain Trainer.
        method: full, lora, qlora, or the name of a peft configuration in ADAPTERS.
        padded: half of the samples have padding, so that an attention mask is built.
    """

    kind: str
    model: str = "qwen2.5-0.5b"
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[str, Any] | None = None
    method: str = "full"
    dtype: str = "float32"
    attention: str | None = None
    micro: int = 2
    length: int = 1024
    padded: bool = False
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def rehearsed(self) -> "Setting":
        """The same job, tiny."""
        return dataclasses.replace(self, micro=min(self.micro, 2), length=32, sizes={**TINY, **self.sizes, "tiny": 1})


def adapter(method: str):
    """The peft configuration of a method; None trains all weights."""
    import peft

    linear = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return {
        "full": lambda: None,
        "lora": lambda: peft.LoraConfig(r=16, **linear),
        "qlora": lambda: peft.LoraConfig(r=16, **linear),
        "dora": lambda: peft.LoraConfig(r=16, use_dora=True, **linear),
        "rslora": lambda: peft.LoraConfig(r=64, use_rslora=True, **linear),
        "loha": lambda: peft.LoHaConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
        "vera": lambda: peft.VeraConfig(r=64, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=16, task_type="CAUSAL_LM"),
    }[method]()


def quantization(method: str):
    """The BitsAndBytesConfig of QLoRA; None of everything else."""
    if method != "qlora":
        return None
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def load_model_config(setting: Setting):
    """The model's configuration, in the setting's sizes."""
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.smaller import with_sizes

    config = load_config(setting.model)
    sizes = dict(setting.sizes)
    if not sizes:
        return config
    tiny = sizes.pop("tiny", False)
    text = config.get_text_config()
    fields = {name: value for name, value in sizes.items() if getattr(text, name, None) is not None}
    smaller = with_sizes(config, fields)
    if tiny:  # special tokens lie beyond a tiny vocabulary
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(smaller.get_text_config(), name, None)
    return smaller


def build(setting: Setting, device: str):
    """The model with random weights, made on the device; with adapters where the method has them."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_memopt.levers.adapters import add_adapters

    config, dtype = load_model_config(setting), getattr(torch, setting.dtype)
    attention = {"attn_implementation": setting.attention} if setting.attention else {}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **attention)
    if (quantization_config := quantization(setting.method)) is not None:
        memory_disk = Path("/dev/shm")  # 8B in 16 bits are 16 GB: through memory, not through a disk
        with tempfile.TemporaryDirectory(dir=memory_disk if memory_disk.is_dir() else None) as folder:
            model.save_pretrained(folder)
            model = None
            release()  # the job itself loads a layer at a time, so the whole model in 16 bits is no part of its peak
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                quantization_config=quantization_config,
                device_map={"": device},
                trust_remote_code=False,
                **attention,
            )
    if (peft_config := adapter(setting.method)) is not None:
        model = add_adapters(model, peft_config)
    return model


def release() -> None:
    """Give back everything that nobody holds any more, and begin the card's counters anew."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def check_needs(setting: Setting) -> None:
    """Refuse what this machine cannot run.

    Raises:
        Skip: a card or a package is missing.
    """
    import importlib.util

    import torch

    card_only = {
        "fp16 training": setting.fields.get("fp16"),
        "a paged optimizer": "paged" in setting.fields.get("optim", ""),
        "flash attention": str(setting.attention).startswith("flash"),
        "transformers' own offload": setting.fields.get("activation_checkpointing_kwargs", {}).get("offload"),
    }
    if not torch.cuda.is_available() and (names := [name for name, is_set in card_only.items() if is_set]):
        raise Skip(f"{names[0]} needs a card")
    needed = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(setting.attention)
    quantized = setting.method == "qlora" or "bit" in setting.fields.get("optim", "")
    for package in filter(None, (needed, "bitsandbytes" if quantized else None)):
        if importlib.util.find_spec(package) is None:
            raise Skip(f"{package} is not installed")


def samples(setting: Setting, vocabulary: int, number: int = 16) -> list[dict]:
    """Random tokens, the same ones at every call."""
    import torch

    ids = torch.randint(0, vocabulary, (number, setting.length), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    if setting.padded:
        for index, row in enumerate(rows):
            length = setting.length if index % 2 else setting.length // 2
            row["attention_mask"] = [1] * length + [0] * (setting.length - length)
    return rows


def make_trainer(setting: Setting, folder: str, steps: int = STEPS, kind=None, callbacks=(), **fields):
    """The real Trainer of a setting on this device, or MemoryTrainer where the setting has `memory`."""
    import torch
    from transformers import Trainer, TrainingArguments, default_data_collator

    from hf_memopt import MemoryArguments, MemoryTrainer

    device = accelerator()
    torch.manual_seed(0)
    model = build(setting, device)
    args = TrainingArguments(
        **{
            "output_dir": folder,
            "max_steps": steps,
            "per_device_train_batch_size": setting.micro,
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "save_strategy": "no",
            "use_cpu": device == "cpu",
            **setting.fields,
            **fields,
        }
    )
    rows = samples(setting, model.config.get_text_config().vocab_size)
    arguments = {
        "model": model,
        "args": args,
        "train_dataset": rows,
        "eval_dataset": rows,
        "data_collator": default_data_collator,
        "callbacks": list(callbacks),
    }
    if kind is None:
        kind = Trainer if setting.memory is None else MemoryTrainer
    if issubclass(kind, MemoryTrainer):
        arguments["memory_args"] = MemoryArguments(**(setting.memory or {}))
    return kind(**arguments)


def step_clock():
    """A callback whose `seconds` are those of every optimizer step, the device's work included."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def _now(self) -> float:
            synchronize()
            return time.perf_counter()

        def on_step_begin(self, *_, **__):
            self.began = self._now()

        def on_step_end(self, *_, **__):
            self.seconds.append(self._now() - self.began)

    return StepClock()


def train(setting: Setting) -> dict[str, Any]:
    """Train a setting on this device: its peaks and the seconds of a step.

    Returns:
        outcome_of_training: "trained" or "out of memory". The latter is a result: it should have been predicted.

    Raises:
        Skip: this machine lacks what the setting needs.
    """
    import statistics

    import torch

    from hf_memopt.hardware import configure_allocator

    allocator = configure_allocator()
    check_needs(setting)
    clock, outcome = step_clock(), "trained"
    steps = 2 if accelerator() == "cpu" else STEPS
    with tempfile.TemporaryDirectory() as folder, peaks() as figures:
        try:
            make_trainer(setting, folder, steps, callbacks=[clock]).train()
        except torch.OutOfMemoryError:
            outcome = "out of memory"
    seconds = statistics.median(clock.seconds[2:] or clock.seconds or [0.0])
    tokens = setting.micro * setting.length * setting.fields.get("gradient_accumulation_steps", 1)
    return {
        "outcome_of_training": outcome,
        **figures,
        "allocator": allocator,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def predict(setting: Setting, device) -> dict[str, Any]:
    """Predict a setting on a device with the estimator and the cost model; this needs neither card nor weights.

    Args:
        device: a hardware.Hardware.
    """
    from hf_memopt import MemoryArguments
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.job import describe
    from hf_memopt.estimator.timing.speed import kernel_seconds
    from hf_memopt.hardware.measured import constant
    from hf_memopt.planner.sketch import traced_jobs

    job = describe(
        load_model_config(setting),
        {"per_device_train_batch_size": setting.micro, **setting.fields},
        setting.length,
        device,
        peft_config=adapter(setting.method),
        dtype=setting.dtype,
        attn_implementation=setting.attention,
        padded=setting.padded,
        quantization_config=quantization(setting.method),
        memory_args=None if setting.memory is None else MemoryArguments(**setting.memory),
    )
    estimate, seconds = estimate_job(job), kernel_seconds(traced_jobs([job])[0].kernels, device)
    short, long = sorted((seconds.micro, seconds.launches))
    micro = long + constant("exposed_traffic", device).value * short  # as estimator.timing.step_time has it
    return {
        "allocated_bytes": estimate.peak_allocated_bytes,
        "reserved_bytes": estimate.reserved_bytes,
        "beside_bytes": estimate.device_bytes - estimate.peak_reserved_bytes,
        "phase": estimate.phase,
        "fits": estimate.fits,
        "step_seconds": setting.fields.get("gradient_accumulation_steps", 1) * micro + seconds.optimizer,
    }
