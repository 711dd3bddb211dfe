"""Videos and images that rows name by http(s) address: each downloaded once, and no larger than allowed."""

import contextlib
import hashlib
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

from hf_memopt.errors import InputError, one_line
from hf_memopt.units import MIB
from hf_memopt.video.video_files import BadVideo

SCHEMES = ("http", "https")
_SECONDS = 60  # without a byte
_CHUNK = 2**20


def is_url(source) -> bool:
    """True if a source is an http(s) address."""
    return isinstance(source, str) and source.lower().startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


@dataclass(frozen=True)
class Downloads:
    """Files of addresses, kept in a folder that the processes and data loader workers of a run share.

    Attributes:
        folder: of the files; made with the first.
        max_mib: size of one file in MiB, at most.

    Raises:
        InputError: a size that is not positive.
    """

    folder: Path
    max_mib: float

    def __post_init__(self) -> None:
        if not self.max_mib > 0:
            raise InputError(f"max_download_mib={self.max_mib} must be above 0, or none for no downloads")

    def fetch(self, url: str) -> Path:
        """The file of an address.

        Raises:
            BadVideo: it cannot be downloaded, or is larger than `max_mib`.
        """
        # The suffix tells FFmpeg the format of raw streams; the name says nothing else about the address.
        suffix = PurePosixPath(urlsplit(url).path).suffix[:8]
        path = self.folder / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}{suffix}"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder)
            try:
                with written_beside(path) as file, _OPENER.open(url, timeout=_SECONDS) as response:
                    self._copy(response, file, url)
            except InputError:
                raise
            except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
                raise BadVideo(f"{display_url(url)}: cannot be downloaded ({one_line(error)})") from error
        return path

    def _copy(self, response, file, url: str) -> None:
        """Copy within the size, whatever the server says about it."""
        size = 0
        while chunk := response.read(_CHUNK):
            size += len(chunk)
            if size > self.max_mib * MIB:
                raise BadVideo(f"{display_url(url)}: larger than max_download_mib={self.max_mib:g}")
            file.write(chunk)
        if response.length:  # bytes that the server promised, and did not send
            raise BadVideo(f"{display_url(url)}: cannot be downloaded (the connection ended after {size:,} bytes)")


def display_url(url: str) -> str:
    """An address for messages: without name, password and query, which may hold keys."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects to addresses of the web alone; Python's own handler also follows those to ftp."""

    def redirect_request(self, request, response, code, message, headers, url):
        if not is_url(url):
            raise urllib.error.URLError(f"redirected to {display_url(url)}, which is no http(s) address")
        return super().redirect_request(request, response, code, message, headers, url)


# Not build_opener(): its handlers would also open file:, ftp: and data: addresses.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    _WebRedirects,
):
    _OPENER.add_handler(_handler())


_PARTIAL = ".part"
_ABANDONED = 3600  # seconds without a byte: downloads give up much earlier


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[IO[bytes]]:
    """A file that is renamed to `path` at the end: another process may write the same one, or this one may end
    halfway, and readers never see half a file."""
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the partial files of a folder to which nobody writes any more."""
    for path in folder.glob(f"*{_PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()
