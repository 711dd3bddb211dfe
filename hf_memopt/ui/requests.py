"""Requests that a page's server takes: questions alone. gradio would store uploads of any size from anybody."""

from starlette.responses import PlainTextResponse

_MOST_BYTES = 64 * 1024  # of a request's body; a question has a few hundred
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class SmallRequests:
    """ASGI middleware that refuses uploads and large requests before anything of them is read.

    A server takes no more of a body than its content-length says, so that it need not be counted.
    """

    def __init__(self, app) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["method"] not in _WITHOUT_BODY and (refusal := _refusal(scope)):
            await PlainTextResponse(refusal, status_code=413, headers={"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(scope) -> str | None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    if scope["path"].endswith("/upload") or headers.get(b"content-type", b"").startswith(b"multipart/"):
        return "this page takes no files"
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or int(length) > _MOST_BYTES:
        return f"this page takes questions of at most {_MOST_BYTES} bytes, and their content-length"
    return None
