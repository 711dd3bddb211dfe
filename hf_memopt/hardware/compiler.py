"""Compilers of this machine, and what they can build: DeepSpeed builds its operators at first use."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_USES_LIBAIO = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
_LONGEST_BUILD = 1800  # seconds: DeepSpeed's operators take minutes


def compiler() -> str | None:
    """Path of the C++ compiler that builds torch's and DeepSpeed's extensions; None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))  # as torch.utils.cpp_extension.get_cxx_compiler


def has_libaio() -> bool:
    """True if DeepSpeed's disk access can be built: the compiler finds libaio's header and library.

    DeepSpeed's own check (OpBuilder.has_function) answers no wherever stderr is not a file, as in a notebook.
    """
    path = compiler()
    if path is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [path, "-x", "c++", "-", "-o", os.path.join(folder, "program"), "-laio"]
        return subprocess.run(command, input=_USES_LIBAIO, text=True, capture_output=True).returncode == 0


def abandoned_locks() -> list[Path]:
    """Locks of extensions whose compilation was killed: torch (FileBaton.wait) waits for their end without a limit.

    A process of another machine may hold a lock in a shared home folder, so only old ones count.
    """
    from torch.utils.cpp_extension import get_default_build_root

    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    # torch's folders of this Python's extensions begin so (cpp_extension._get_build_directory).
    prefix = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}_"
    root, pattern = (folder, "*/lock") if folder else (get_default_build_root(), f"{prefix}*/*/lock")
    return [lock for lock in sorted(Path(root).glob(pattern)) if time.time() - lock.stat().st_mtime > _LONGEST_BUILD]
