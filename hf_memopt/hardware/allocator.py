"""The CUDA caching allocator's setting, which counts only if it is there before CUDA starts."""

import logging
import os
import re
import sys
from importlib import metadata

logger = logging.getLogger(__name__)

SETTING = "expandable_segments:True"
VARIABLE = "PYTORCH_ALLOC_CONF"
# Spellings that PyTorch 2.13 still reads; a user's own value under any of them stays.
SPELLINGS = (VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_left_alone = False  # asked for, by a build that has no use for it


def configure_allocator() -> str:
    """Set `PYTORCH_ALLOC_CONF=expandable_segments:True` for this process, unless it is not ours to set.

    Fewer, growing segments fragment less (torchtune issue 1185 reports 16.4 -> 10.8 GiB reserved). Left alone on
    macOS and on ROCm builds, and where the user chose a value. Call it before CUDA starts: first thing in a script.
    The variable stays set, since the allocator reads it once for the whole process.

    Returns:
        The value in force, "" where none is.
    """
    if chosen := _chosen():
        return chosen
    if not _build_has_cuda_allocator():
        global _left_alone
        _left_alone = True
        return ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        logger.warning(
            "%s=%s comes too late: CUDA has already started. Set it in the shell, or call "
            "hf_memopt.hardware.configure_allocator() at the top of the script.",
            VARIABLE,
            SETTING,
        )
        return ""
    os.environ[VARIABLE] = SETTING
    return SETTING


def expands_segments() -> bool:
    """True if this process runs with expandable segments on NVIDIA's cards, which PyTorch does not turn on by itself:
    the environment says so, or nothing and configure_allocator() was called, here perhaps on another build."""
    chosen = _chosen()
    return SETTING in chosen.replace(" ", "") if chosen else _left_alone


def _chosen() -> str:
    """The value of the first spelling that is set; "" where none is."""
    return next((os.environ[spelling] for spelling in SPELLINGS if os.environ.get(spelling)), "")


def _build_has_cuda_allocator() -> bool:
    """Judged from the installed build's version, so that torch need not be imported first."""
    if sys.platform == "darwin":
        return False
    try:
        return not re.search(r"\+(rocm|cpu|xpu)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
