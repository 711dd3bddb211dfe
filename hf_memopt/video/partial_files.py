"""Files that are written beside their place and renamed; those of killed processes stay behind."""

import contextlib
import time
from pathlib import Path

SUFFIX = ".part"
_ABANDONED = 3600  # seconds without a byte: downloads give up much earlier


def remove_abandoned(folder: Path) -> None:
    """Remove the partial files of a folder to which nobody writes any more."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()
