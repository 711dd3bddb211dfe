"""A plan: its profiles from safe to maximum, and what was left out."""

from dataclasses import dataclass, field
from typing import Any

from hf_memopt.estimator.overheads import measured_memory
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.timing.throughput import speed_note, unknown_rates
from hf_memopt.hardware.measured import measured_on
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.packages import how_to_install, is_installed
from hf_memopt.planner.alternatives import Alternative, Rejected
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.proposals import Proposal
from hf_memopt.planner.samples.data_use import Use
from hf_memopt.planner.search import summarize
from hf_memopt.planner.trl_choices import trl_space
from hf_memopt.presets import Preset

# benchmarks/results/quick_plans.json
QUICK_NOTE = (
    "a sketch: of 22 settings of quick plans memory was off by -3% to +7% of the estimate, speed by -0% to +9%; "
    "leave quick out for the estimate"
)


@dataclass(frozen=True)
class Profile:
    """One profile of a plan, and its settings.

    Attributes:
        name: safe, balanced, aggressive or maximum.
        share: of the device's memory that it may fill.
        choice: the settings that the search varies.
        preset: all settings, as a Preset.
        memory_args: the memory features, and the monitor's thresholds.
        estimate: of exactly these settings.
        seconds: of an optimizer step, by the sketch that choices are ranked by.
        relative_speed: predicted, 1.0 for the fastest profile.
    """

    name: str
    share: float
    choice: Choice
    preset: Preset
    memory_args: MemoryArguments
    estimate: Estimate
    seconds: float
    relative_speed: float

    @property
    def tokens_per_second(self) -> float | None:
        """The estimate's, of all devices together; None where the device's speed is unknown."""
        return self.estimate.tokens_per_second

    @property
    def summary(self) -> str:
        """The settings in one line."""
        return summarize(self.choice)


@dataclass(frozen=True)
class Plan:
    """The profiles that fit, and what was left out.

    Attributes:
        spec: settled, with the method that was chosen.
        profiles: the profiles, from safe to maximum; empty where nothing fits.
        rejected: methods and kinds of settings that do not fit or gain nothing, with reasons.
        missing_bytes: where nothing fits, what the smallest settings lack, of the device or else of the host.
        proposals: where nothing fits, changes with which something does.
        plain: what the balanced profile (or the safest) would be with every layer checkpointed, without host memory
            and rounding; None where it is so.
        methods: with method "any", the settings of each method that fits, the planned one among them.
        link: that the link to host memory bounds the speed of the usual profile; None where it does not.
        precision: that weights have less precision than the preset's, without which nothing fits; None where not.
        data: the rows that it trains on; None where they are not read before the job runs.
    """

    spec: JobSpec
    profiles: list[Profile]
    rejected: list[Rejected]
    missing_bytes: int | None = None
    proposals: list[Proposal] = field(default_factory=list)
    plain: Alternative | None = None
    methods: list[Alternative] = field(default_factory=list)
    link: str | None = None
    precision: str | None = None
    data: Use | None = None

    def __iter__(self):
        return iter(self.profiles)

    def __str__(self) -> str:
        spec = self.spec
        preset = spec.preset
        head = f"{spec.model_name} on {preset.processes} × {preset.hardware.label}"
        if not self.profiles:
            return f"{head}: nothing fits\n" + "\n".join(f"would fit: {change}" for change in self.nearest)
        profiles = (
            f"{profile.name}: {profile.summary}: {profile.estimate}".splitlines()[0] for profile in self.profiles
        )
        return f"{head}, {preset.method}, {spec.effective_batch_size} samples a step\n" + "\n".join(profiles)

    @property
    def nearest(self) -> list[str]:
        """The proposals, each with what the job then needs."""
        return [proposal.text for proposal in self.proposals]

    @property
    def fitting(self) -> list[Proposal]:
        """The usual profile as a proposal, or where nothing fits the proposals."""
        if not self.profiles:
            return self.proposals
        return [Proposal((), self.usual.estimate.device_bytes, spec=self.spec, choice=self.usual.choice)]

    @property
    def usual(self) -> Profile:
        """The balanced profile, or the safest that fits."""
        return next((profile for profile in self.profiles if profile.name == "balanced"), self.profiles[0])

    @property
    def notes(self) -> list[str]:
        """Notes on what was not tried, on what was measured on the device, and of GRPO and RLOO on what a step
        generates."""
        preset = self.spec.preset
        device = preset.hardware
        memory = measured_memory(device, expandable=True) if measured_on(device) else ()
        quick = QUICK_NOTE if self.spec.quick else None
        notes = [*memory, *filter(None, [quick, self.precision, self.link, self._speed_note()])]
        if preset.processes > 1 and preset.strategy == "none" and not is_installed("deepspeed"):
            notes.append(f"ZeRO was not tried: deepspeed is not installed: {how_to_install('deepspeed')}")
        if (space := trl_space(self.spec)) is not None and self.profiles:
            notes += space.notes(self.usual.choice, device)
            notes += [note for note in self.usual.estimate.notes if note.startswith("generation: ")]
        return [*notes, *(self.data.notes(self.spec.seq_len) if self.data else ())]

    def _speed_note(self) -> str | None:
        """The basis of the speeds, or why there are none; None of a plan without profiles."""
        if not self.profiles:
            return None
        device, estimate = self.spec.preset.hardware, self.usual.estimate
        if estimate.step_seconds is not None or unknown_rates(device):
            return speed_note(device, estimate)
        return next((note for note in estimate.notes if note.startswith("speed:")), None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        from hf_memopt.planner.launch import as_dict

        host = self.spec.host_memory
        return {
            "model": self.spec.model_name,
            "method": self.spec.preset.method,
            "hardware": self.spec.preset.hardware.name,
            "devices": self.spec.preset.processes,
            "usable_bytes": self.spec.memory,
            "usable_host_bytes": host and host.bytes,
            "host_memory_source": host and host.source,
            "effective_batch_size": self.spec.effective_batch_size,
            "seq_len": self.spec.seq_len,
            "profiles": [as_dict(self.spec, profile) for profile in self.profiles],
            "rejected": [rejected.to_dict() for rejected in self.rejected],
            "plain": self.plain and self.plain.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
            "missing_bytes": self.missing_bytes,
            "nearest": self.nearest,
            "notes": self.notes,
            "data": self.data and self.data.to_dict(self.spec.seq_len),
            **({"quick": True} if self.spec.quick else {}),
        }
