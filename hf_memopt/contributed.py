"""Commands, export targets and public names that packages above the core add to it.

The core imports none of them. They declare entry points (setup.cfg has those of hf_memopt.contrib), which are imported
when a command, a target or a name is asked for that the core does not have.
"""

from typing import Any


def load_contributed(group: str) -> dict[str, Any]:
    """Name -> object of the entry points hf_memopt.<group>.

    Raises:
        InputError: there are none, though hf_memopt.contrib has some: the installation is older than this file.
    """
    from importlib.metadata import entry_points  # 20 ms, which no command of the core's waits for

    from hf_memopt.errors import InputError

    loaded = {entry.name: entry.load() for entry in entry_points(group=f"hf_memopt.{group}")}
    if not loaded:
        raise InputError(f"no entry points hf_memopt.{group} are installed: install hf_memopt again with pip")
    return loaded
