"""The table of presets, from the presets."""

from levers_docs import ROOT, table

from hf_memopt import get_preset, list_presets
from hf_memopt.presets.preset import Preset


def presets() -> str:
    """One row per preset: hardware, file, batch of full fine-tuning, command."""
    lines = []
    for name in list_presets():
        preset = get_preset(name)
        config = _config(preset)
        batches = preset.batches(preset.processes)
        micro, accumulation = preset.micro_batch_size, preset.gradient_accumulation_steps
        launch = f"accelerate launch --config_file accelerate_configs/{config} recipes/sft.py --preset {name}"
        if preset.machines > 1:
            launch = f"sbatch accelerate_configs/slurm/{name}.sbatch"
        many = f"{preset.processes} × " if preset.processes > 1 else ""
        lines.append(
            [
                f"{many}{preset.hardware.label}",
                f"`{name}`",
                f"`{config}`",
                f"{micro} × {accumulation} × {batches} = {micro * accumulation * batches}",
                str(preset.seq_len),
                f"`{launch}`",
            ]
        )
    return table(["hardware", "preset", "config", "batch (full)", "tokens", "command"], lines)


def _config(preset: Preset) -> str:
    """The shipped YAML of a preset: its own, or that of its engine."""
    folder = ROOT / "accelerate_configs"
    names = [f"{preset.name}.yaml", f"{preset.name}_{preset.strategy}.yaml", f"{preset.name.rpartition('_')[0]}.yaml"]
    return next(name for name in names if (folder / name).is_file())


TABLES = {"presets": presets}
