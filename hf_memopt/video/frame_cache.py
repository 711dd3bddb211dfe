"""Decoded frames on disk, so that later epochs read them instead of decoding again."""

import contextlib
import hashlib
import logging
import os
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy

from hf_memopt.errors import InputError, one_line
from hf_memopt.units import GIB
from hf_memopt.video.clips import Clip, read_clip
from hf_memopt.video.downloads import remove_abandoned, written_beside
from hf_memopt.video.frame_limits import FrameLimits

logger = logging.getLogger(__name__)

_HEADERS = 4096  # bytes: of a zip file with five arrays
_VERSION = 1  # of which frames are chosen and how they are stored: another one finds none of the older files
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class FrameCache:
    """Clips by file, its size and modification time, and what was asked of it. The least recently used give way.

    The processes and data loader workers of a run share the folder.

    Attributes:
        folder: of the clips alone; made with the first.
        max_gib: size of all clips in GiB, at most.

    Raises:
        InputError: a size that is not positive.
    """

    folder: Path
    max_gib: float

    def __post_init__(self) -> None:
        if not self.max_gib > 0:
            raise InputError(f"frame_cache_gib={self.max_gib} must be above 0, or none for no cache")

    def read(self, source: Path, limits: FrameLimits) -> Clip:
        """read_clip(), from the cache where it holds the clip.

        Raises:
            BadVideo, InputError: as read_clip().
        """
        status = source.stat()
        about = (_VERSION, str(source.resolve()), status.st_size, status.st_mtime_ns, limits)
        path = self.folder / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.npz"
        clip = _load(path)
        if clip is None:
            clip = read_clip(source, limits)
            self._store(path, clip)
        return clip

    def _store(self, path: Path, clip: Clip) -> None:
        """Keep a clip, unless the disk is full: training continues without."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Beside the frames an index and a time of each, and the headers of a zip file with five arrays.
            size = clip.frames.nbytes + 16 * len(clip.frames) + _HEADERS
            if size <= self.max_gib * GIB:
                self._make_space(size)
                _write(path, clip)
        except OSError as error:
            logger.warning("frames are not kept in %s: %s", self.folder, one_line(error))

    def _make_space(self, size: int) -> None:
        """Remove the least recently used clips until `size` more bytes are within the bound."""
        remove_abandoned(self.folder)
        files = []
        for path in self.folder.glob("*.npz"):
            with contextlib.suppress(FileNotFoundError):  # another process removes files, too
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(bytes_ for _, bytes_, _ in files) + size - self.max_gib * GIB
        for _, bytes_, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= bytes_


def _load(path: Path) -> Clip | None:
    """A clip; None where there is none, or a file that breaks off."""
    try:
        with numpy.load(path, allow_pickle=False) as stored:
            clip = Clip(
                stored["frames"],
                tuple(stored["indices"].tolist()),
                tuple(stored["timestamps"].tolist()),
                int(stored["total"]),
                float(stored["duration"]),
            )
        _mark_used(path)
    except _UNREADABLE:
        return None
    return clip


def _mark_used(path: Path) -> None:
    """Mark a file as used by the clock: the time that the system itself would write is some milliseconds old."""
    moment = time.time_ns()
    os.utime(path, ns=(moment, moment))


def _write(path: Path, clip: Clip) -> None:
    with written_beside(path) as file:
        numpy.savez(file, **vars(clip))
    _mark_used(path)
