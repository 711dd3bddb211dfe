"""The hub: addresses of its pages as the names that its libraries take, and whether it answers."""

import contextlib
import os
import re
import socket
import threading
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

_PAGE = re.compile(
    r"(?:hf:/|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co))/(?:(?:datasets|models)/)?"
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:/(?:tree|blob|resolve|raw|discussions|settings|viewer)(?:/.*)?)?/?(?:[?#].*)?",
    re.ASCII,
)


HUB = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
_PATIENCE = 3.0  # seconds
_YES = {"1", "on", "yes", "true"}  # huggingface_hub/constants.py


def why_no_hub() -> str | None:
    """The reason why the hub cannot be asked; None where a connection to it, or to the proxy before it, opens."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").lower() in _YES:
            return f"{name} keeps from asking the hub"
    return None if _answers() else f"{HUB} does not answer"


@cache
def _answers() -> bool:
    """True if a connection opens within three seconds; tried once.

    huggingface_hub tries five times, each with a line in the log, and takes half a minute without a network.
    """
    address = urlsplit(getproxies().get("https") or os.environ.get("HF_ENDPOINT") or f"https://{HUB}")
    port = address.port or (80 if address.scheme == "http" else 443)
    opened = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((address.hostname, port), _PATIENCE).close()
            opened.set()

    thread = threading.Thread(target=connect, daemon=True)  # looking a name up has no time limit
    thread.start()
    thread.join(_PATIENCE)
    return opened.is_set()


def is_cached(model: str) -> bool:
    """True if the configuration of a hub id is in this machine's cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def hub_name(text: str) -> str:
    """The model or data set of a page's address, "https://huggingface.co/Qwen/Qwen3-8B/tree/main"; other texts as they
    are."""
    page = _PAGE.fullmatch(text.strip())
    return page["name"] if page else text
