"""`hf-memopt register`: `hf memopt …` runs this installation."""

import os
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

from hf_memopt.cli.output import print_json
from hf_memopt.errors import InputError

# GitHub's names hold no underscore: `hf extensions update` must find no stranger's repository under this one.
_OWNER = "_installed_with_pip"


def run_register(as_json: bool) -> None:
    """Write the manifest by which huggingface_hub's command line finds extensions.

    Raises:
        InputError: this huggingface_hub has no extensions, or hf-memopt was not installed by pip.
    """
    try:
        # Private, of huggingface_hub 2.4: `hf extensions install` writes the same for repositories on GitHub, and
        # there is no command for a program that is installed already.
        from huggingface_hub.cli.extensions import EXTENSIONS_ROOT, ExtensionManifest
    except ImportError as error:
        raise InputError("this huggingface_hub has no extensions: pip install -U huggingface_hub") from error
    program = Path(sysconfig.get_path("scripts")) / ("hf-memopt.exe" if os.name == "nt" else "hf-memopt")
    if not program.is_file():
        raise InputError(f"there is no program {program}: install hf_memopt with pip")
    folder = EXTENSIONS_ROOT.expanduser() / "hf-memopt"
    ExtensionManifest(
        owner=_OWNER,
        repo="hf-memopt",
        repo_id=f"{_OWNER}/hf-memopt",
        short_name="memopt",
        executable_path=str(program),
        type="python",
        installed_at=datetime.now(UTC),
        description="Predict the memory of training jobs, and find the settings that make them fit.",
    ).save(folder)
    if as_json:
        print_json({"program": str(program), "manifest": str(folder / "manifest.json")})
    else:
        print(f"`hf memopt` runs {program}; `hf extensions remove memopt` undoes this")
