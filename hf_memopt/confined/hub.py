"""The hub for a confined process: it only reads, and through its parent.

The parent sends requests that read, to the hub and to where the hub redirects them. Whole files go to the hub's cache,
by huggingface_hub's own function. Both sides speak JSON: the parent unpickles nothing of a script's.
"""

import contextlib
import importlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock
from urllib.parse import unquote, urljoin, urlsplit

from hf_memopt.errors import one_line

_LARGEST = 2**20  # bytes of a request
_PATHS_INFO = r"/api/(models|datasets|spaces)/[\w./-]+/paths-info/[^/]+"  # reads, though it is a POST
_FILE = r"/(?:(dataset|space)s/)?([\w.-]+(?:/[\w.-]+)?)/resolve/([^/]+)/(.+)"  # type, repository, revision, name


def serve(connection: Connection, folder: str) -> None:
    """Answer the requests of a confined process until it ends.

    Args:
        folder: where it can read and write; answers' bodies are put there.
    """
    redirects: dict[str, str] = {}  # address -> the hub's that led there
    while True:
        try:
            request = json.loads(connection.recv_bytes(_LARGEST))
        except (EOFError, OSError):
            return
        try:
            answer = _answer(folder, redirects, **request)
        except Exception as error:  # of a request, which may be anything, or of the network
            answer = {"error": one_line(error)}
        with contextlib.suppress(OSError):  # it ended meanwhile
            connection.send_bytes(json.dumps(answer).encode())


def _answer(
    folder: str, redirects: dict[str, str], method: str, url: str, headers: list[list[str]], body: str
) -> dict[str, Any]:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    asked, hub = urlsplit(url), urlsplit(constants.ENDPOINT)
    at_hub = asked[:2] == hub[:2]
    if not (
        (method in ("GET", "HEAD") and (at_hub or url in redirects))
        or (method == "POST" and at_hub and re.fullmatch(_PATHS_INFO, asked.path))
    ):
        return {"error": f"a dry run only reads, and only from the hub: {method} {asked.scheme}://{asked.netloc}"}
    first = redirects.get(url, url)
    if method == "GET" and (path := _in_cache(first, dict(headers))):
        return {"status": 200, "headers": [["content-length", str(os.path.getsize(path))]], "file": path}
    with get_session().stream(method, url, headers=headers, content=body.encode(), follow_redirects=False) as response:
        if target := response.headers.get("location"):
            redirects[urljoin(url, target)] = first
        handle, path = tempfile.mkstemp(dir=folder)  # a new file: no link of the script's leads elsewhere
        with os.fdopen(handle, "wb") as file:
            file.writelines(response.iter_raw())
        return {"status": response.status_code, "headers": response.headers.multi_items(), "file": path}


def _in_cache(url: str, headers: dict[str, str]) -> str | None:
    """The path in the hub's cache of a file that is asked for as a whole; downloaded if it is not there."""
    from huggingface_hub import hf_hub_download

    match = re.fullmatch(_FILE, urlsplit(url).path)
    if match is None or "range" in headers:
        return None
    kind, repo_id, revision, name = (part and unquote(part) for part in match.groups())
    if ".." in revision.split("/"):  # a revision is a path in the cache, and no name in git has this
        return None
    token = headers.get("authorization", "").removeprefix("Bearer ") or False
    with contextlib.suppress(Exception):  # then the answer to the request itself says why
        return hf_hub_download(repo_id, name, repo_type=kind, revision=revision, token=token)
    return None


@contextlib.contextmanager
def through_parent(connection: Connection) -> Iterator[None]:
    """Let huggingface_hub ask the parent."""
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    # huggingface_hub 2 asks with httpx2, 1 with httpx, which has the same names.
    httpx = importlib.import_module(type(default_client_factory()).__module__.partition(".")[0])
    lock = threading.Lock()

    class Parent(httpx.BaseTransport):
        def handle_request(self, request):
            fields = {
                "method": request.method,
                "url": str(request.url),
                "headers": [item for item in request.headers.multi_items() if item[0] != "content-length"],
                "body": request.read().decode("utf-8", "replace"),
            }
            with lock:
                connection.send_bytes(json.dumps(fields).encode())
                answer = json.loads(connection.recv_bytes())
            if "error" in answer:
                raise httpx.ConnectError(answer["error"], request=request)
            return httpx.Response(answer["status"], headers=answer["headers"], stream=Body(answer["file"]))

    class Body(httpx.SyncByteStream):
        def __init__(self, path: str) -> None:
            self.file = open(path, "rb")  # noqa: SIM115

        def __iter__(self) -> Iterator[bytes]:
            while chunk := self.file.read(2**20):
                yield chunk

        def close(self) -> None:
            self.file.close()

    def client():
        usual = default_client_factory()
        return httpx.Client(
            transport=Parent(), event_hooks=usual.event_hooks, follow_redirects=True, timeout=usual.timeout
        )

    set_client_factory(client)
    try:
        with mock.patch.object(constants, "HF_HUB_DISABLE_XET", True):  # which connects by itself
            yield
    finally:
        set_client_factory(default_client_factory)
