"""The files accelerate_configs/*.yaml, made from the presets; `make configs` writes them."""

from hf_memopt.engines.mesh import mesh_words
from hf_memopt.files import shipped, write_whole
from hf_memopt.presets.accelerate_config import yaml_text
from hf_memopt.presets.launch_script import sbatch_script
from hf_memopt.presets.named_presets import list_presets, preset_by_name
from hf_memopt.presets.preset import Preset

# The presets whose file depends on the engine, with the engines shipped; export writes the other combinations.
_ENGINES = {
    "a100_80gb_x8": ("zero2", "zero3", "fsdp2"),
    "h100_80gb_x8": ("zero2", "zero3", "fsdp2", "tp8"),
    "h100_80gb_x16_nodes": ("zero3", "zero3_offload_cpu", "fsdp2", "hsdp8", "tp8"),
    "cpu_x2": ("ddp", "zero2", "zero3"),
}
# Variants of a preset launch like the first one.
_SAME_AS_BASE = ("l40s_x4_medium", "l40s_x4_aggressive", "l40s_x4_maximum")

_EMBEDDED = """
# deepspeed_config_file is {file} itself, in base64: this file works wherever it is copied.
# To change a setting, put the path of your own JSON there: it is resolved against the folder you launch from."""


def shipped_configs() -> dict[str, str]:
    """File name -> YAML text."""
    names = [name for name in list_presets() if name not in _SAME_AS_BASE]
    presets = [preset_by_name(name, strategy=engine) for name in names for engine in _ENGINES.get(name, (None,))]
    return {config_name(preset): yaml_text(preset.accelerate_config(), _comment(preset)) for preset in presets}


def shipped_sbatch() -> dict[str, str]:
    """File name -> text of a SLURM script, run from the repository's root."""
    scripts = {}
    for name in list_presets():
        preset = preset_by_name(name)
        if preset.processes > 1 and name not in _SAME_AS_BASE and preset.hardware.backend != "cpu":
            words = ["recipes/sft.py", "--preset", name, "--effective_batch_size", str(preset.effective_batch_size)]
            scripts[f"{name}.sbatch"] = sbatch_script(preset, f"accelerate_configs/{config_name(preset)}", words)
    return scripts


def config_name(preset: Preset) -> str:
    """The shipped file that launches a preset, e.g. rtx_4090.yaml or a100_80gb_x8_zero3.yaml."""
    base = "l40s_x4" if preset.name in _SAME_AS_BASE else preset.name
    return f"{base}.yaml" if preset.engine.plain else f"{base}_{preset.strategy}.yaml"


def _comment(preset: Preset) -> str:
    devices = f"{preset.processes} × " if preset.processes > 1 else ""
    machines = f" in {preset.machines} machines" if preset.machines > 1 else ""
    engine = {"none": "", "ddp": ", DDP", "fsdp2": ", FSDP2"}.get(preset.strategy, f", DeepSpeed {preset.strategy}")
    note = _EMBEDDED.format(file=f"deepspeed/{preset.strategy}.json") if preset.deepspeed_config() else ""
    if preset.mesh:
        engine, note = f", {preset.strategy}", f"; with the recipe's argument {' '.join(mesh_words(preset.strategy))}"
    return f"{devices}{preset.hardware.label}{machines}{engine}{note}"


if __name__ == "__main__":
    for file, text in shipped_configs().items():
        write_whole(shipped("accelerate_configs") / file, text)
    for file, text in shipped_sbatch().items():
        write_whole(shipped("accelerate_configs") / "slurm" / file, text)
