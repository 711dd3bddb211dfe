"""launch.sh: the exported files, started."""

import shlex
from pathlib import Path

from hf_memopt.presets.preset import Preset


def launch_script(preset: Preset, folder: Path, recipe_words: list[str], launcher: str) -> str:
    """A shell script that starts a recipe with the folder's accelerate.yaml.

    Args:
        recipe_words: the recipe's file and its arguments, quoted where they must be.
        launcher: more of `accelerate launch`'s arguments.
    """
    config = shlex.quote(str(folder / "accelerate.yaml"))
    name = Path(recipe_words[0].strip("'")).name
    lines = [
        "#!/bin/sh",
        f"# {preset.name}, method {preset.method}. More arguments of {name} may follow this script's name.",
        *(f'export {key}="${{{key}:-{value}}}"' for key, value in preset.environment.items()),
        " ".join(filter(None, ["exec accelerate launch --config_file", config, launcher, "\\"])),
        f"    {' '.join(recipe_words)} \\",
        f"    --output_dir {shlex.quote(str(folder / 'out'))} \\",
        '    "$@"',
    ]
    return "\n".join(lines) + "\n"
