"""What can be compiled on this machine: DeepSpeed builds its operators at first use."""

import os
import shutil
import subprocess
import tempfile

_USES_LIBAIO = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"


def compiler() -> str | None:
    """Path of the C++ compiler that builds torch's and DeepSpeed's extensions; None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))  # as torch.utils.cpp_extension.get_cxx_compiler


def has_libaio() -> bool:
    """Whether DeepSpeed's disk access can be built: the compiler finds libaio's header and library.

    DeepSpeed's own check (OpBuilder.has_function) answers no wherever stderr is not a file, as in a notebook.
    """
    found = compiler()
    if found is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [found, "-x", "c++", "-", "-o", os.path.join(folder, "program"), "-laio"]
        return subprocess.run(command, input=_USES_LIBAIO, text=True, capture_output=True).returncode == 0
