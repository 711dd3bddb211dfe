"""MemoryMonitor: how full the device is, what that means, and what to do."""

from itertools import repeat
from typing import Any

from hf_memopt.levers.arguments import THRESHOLDS, MemoryArguments
from hf_memopt.monitor.optimizations import CHECKPOINTING, OPTIMIZATIONS, Settings, predict_savings, read_settings
from hf_memopt.monitor.readers import Reader, Reading

STATUSES = ("normal", "warning", "critical", "emergency")
_GB = 10**9


def status_at(utilization: float, warning: float, critical: float, emergency: float) -> str:
    """normal, warning, critical or emergency, for a share of capacity and three thresholds."""
    return STATUSES[sum(utilization >= threshold for threshold in (warning, critical, emergency))]


class MemoryMonitor:
    """Watches one device against four shares of its capacity.

    Args:
        target_utilization, warning_threshold, critical_threshold, emergency_threshold: shares between 0 and 1, rising;
            by default those of the profile.
        profile: aggressive, balanced or conservative.
        silent_mode: dashboard() gives a line only where the status changed.
        device: a torch.device or its name; by default what training here would use.
        limit: bytes that this process may use.

    Raises:
        InputError: thresholds that do not rise, or an unknown profile.
    """

    def __init__(
        self,
        target_utilization: float | None = None,
        warning_threshold: float | None = None,
        critical_threshold: float | None = None,
        emergency_threshold: float | None = None,
        profile: str = "balanced",
        silent_mode: bool = True,
        device=None,
        limit: int | None = None,
    ) -> None:
        checked = MemoryArguments(
            memory_profile=profile,
            target_memory_utilization=target_utilization,
            warning_threshold=warning_threshold,
            critical_threshold=critical_threshold,
            emergency_threshold=emergency_threshold,
        )
        self.target_utilization = checked.target_memory_utilization
        self.warning_threshold = checked.warning_threshold
        self.critical_threshold = checked.critical_threshold
        self.emergency_threshold = checked.emergency_threshold
        self.silent_mode = silent_mode
        self.reader = Reader(device, limit)
        self._status = "normal"

    @classmethod
    def of(cls, arguments: MemoryArguments, device) -> "MemoryMonitor":
        """The monitor that MemoryArguments describe."""
        shares = [getattr(arguments, name) for name in THRESHOLDS]
        return cls(*shares, silent_mode=arguments.silent_mode, device=device, limit=arguments.max_memory_bytes)

    def status(self, utilization: float) -> str:
        """normal, warning, critical or emergency."""
        return status_at(utilization, self.warning_threshold, self.critical_threshold, self.emergency_threshold)

    def check_memory_health(self, batch_size: int | None = None) -> dict[str, Any]:
        """Status, utilisation and recommendations.

        Args:
            batch_size: samples of the micro-batch, to recommend a smaller one.

        Returns:
            `status`, `utilization` (of capacity, by this process's tensors), `gpu_utilization` (the same under the
            name that older code uses), `target_utilization`, `recommendations` (sentences), and `reading` (bytes).
        """
        reading = self.reader.read()
        status = self.status(reading.utilization)
        return {
            "status": status,
            "utilization": reading.utilization,
            "gpu_utilization": reading.utilization,
            "target_utilization": self.target_utilization,
            "recommendations": self._recommendations(status, reading, batch_size),
            "reading": reading.to_dict(),
        }

    def _recommendations(self, status: str, reading: Reading, batch_size: int | None) -> list[str]:
        recommendations = []
        if status in ("critical", "emergency"):
            if batch_size and batch_size > 1:
                recommendations.append(
                    f"per_device_train_batch_size={batch_size // 2} with twice the gradient_accumulation_steps: the "
                    "same training in less memory"
                )
            recommendations.append("activation_checkpointing=True, where it is not on")
        if reading.reserved > 1.3 * reading.peak_allocated and status != "normal" and self.reader.kind != "cpu":
            recommendations.append(
                "PYTORCH_ALLOC_CONF=expandable_segments:True: the allocator reserves much that no tensor uses"
            )
        used_elsewhere = reading.used - reading.reserved
        if used_elsewhere > 0.1 * reading.capacity and self.reader.kind != "cpu":
            recommendations.append(f"another process holds {used_elsewhere / 2**30:.1f} GiB of this device")
        if status == "warning":
            recommendations.append("memory is near its limit: longer samples than so far may not fit")
        return recommendations

    def get_detailed_memory_breakdown(self) -> dict[str, dict[str, float]]:
        """`total` (allocated, reserved, peaks and capacity), `fragmentation` (`ratio`: the share of reserved memory
        that no tensor was in) and `host`; in bytes and, as `…_gb`, in 10⁹ bytes."""
        reading = self.reader.read()
        names = ("allocated", "reserved", "peak_allocated", "peak_reserved", "used", "capacity")
        host = {"resident": reading.host_resident, "available": reading.host_available}
        return {
            "total": _both({name: getattr(reading, name) for name in names}),
            "fragmentation": {"ratio": reading.fragmentation, "allocator_retries": reading.retries},
            "host": _both(host),
        }

    def estimate_activation_memory(
        self,
        batch_size: int,
        sequence_length: int,
        hidden_size: int,
        num_layers: int,
        num_attention_heads: int,
        use_gradient_checkpointing: bool = False,
        use_flash_attention: bool = True,
        vocab_size: int = 32_000,
        bf16: bool = True,
    ) -> dict[str, float]:
        """Activations of a Llama of these sizes at its predicted peak: `breakdown["activations"]` of estimate(), which
        counts logits apart, for training with AdamW.

        Returns:
            `effective_memory_bytes` with the settings, `without_checkpointing_bytes`, `savings_bytes`, and each as
            `…_gb` (10⁹ bytes).
        """
        from transformers import LlamaConfig

        from hf_memopt.estimator import estimate

        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_attention_heads,
            vocab_size=vocab_size,
            max_position_embeddings=max(2048, sequence_length),
        )
        attention = "sdpa" if use_flash_attention else "eager"

        def activations(**fields: Any) -> int:
            fields |= {"per_device_train_batch_size": batch_size, "bf16": bf16}
            result = estimate(config, fields, sequence_length, "a100_80gb", attn_implementation=attention)
            return result.breakdown["activations"]

        plain = activations()
        effective = activations(**CHECKPOINTING) if use_gradient_checkpointing else plain
        return _both({"effective_memory": effective, "without_checkpointing": plain, "savings": plain - effective})

    def track_memory_optimizations(
        self, config, model=None, seq_len: int = 512, hardware: str = "auto", world_size: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """List the memory optimizations that a configuration switches on, and what each saves or would save.

        Args:
            config: TrainingArguments, a dict of its fields, a DeepSpeed configuration, or the nested sections of an
                older YAML (`training: {deepspeed: {zero_stage: 1}, mixed_precision: fp16}`, …).
            model, seq_len, hardware, world_size: as for estimate(); without a model savings are not predicted.

        Returns:
            name (monitor.optimizations.OPTIMIZATIONS) -> `enabled` and `memory_savings` (bytes of a device's predicted
            peak that it saves or would save; None where not predicted, with the reason as `not_predicted`).

        Raises:
            InputError: a precision or ZeRO stage that does not exist, or a job that cannot be predicted.
        """
        from hf_memopt.estimator import estimate

        def peak(settings: Settings) -> int:
            fields, attention = dict(settings.fields), settings.attention
            result = estimate(model, fields, seq_len, hardware, attn_implementation=attention, world_size=world_size)
            return result.peak_allocated_bytes

        settings = read_settings(config)
        unknown = {"memory_savings": None, "not_predicted": "needs a model: pass model=…"}
        saved = repeat(unknown) if model is None else predict_savings(settings, peak)
        return {
            name: {"enabled": optimization.is_on(settings), **saving}
            for (name, optimization), saving in zip(OPTIMIZATIONS.items(), saved, strict=False)
        }

    def dashboard(self, step: int, reading: Reading | None = None, note: str = "") -> str | None:
        """One line of what memory is like; None in silent mode while the status stays."""
        reading = reading or self.reader.read()
        status = self.status(reading.utilization)
        changed, self._status = status != self._status, status
        if self.silent_mode and not (changed or note):
            return None
        note = f" - {note}" if note else ""
        return (
            f"[Step {step}] Memory: {reading.allocated / 2**30:.1f}/{reading.capacity / 2**30:.1f} GiB "
            f"({reading.utilization:.0%}), Status: {status}{note}"
        )


def _both(sizes: dict[str, int]) -> dict[str, float]:
    """Each size in bytes and in 10⁹ bytes."""
    return {f"{name}_bytes": size for name, size in sizes.items()} | {
        f"{name}_gb": size / _GB for name, size in sizes.items()
    }
