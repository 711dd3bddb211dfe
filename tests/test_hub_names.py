"""Addresses of the hub, and what is asked of a hub that does not answer."""

import itertools
import socket

import pytest

from hf_memopt import hub_names
from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import load_config
from hf_memopt.hub_names import hub_name, why_no_hub

PAGES = ("", "/", "/tree/main", "/blob/main/config.json", "/resolve/main/x", "?library=transformers")
HOSTS = ("https://huggingface.co/", "http://hf.co/", "huggingface.co/", "https://huggingface.co/models/")


def test_a_pages_address_is_its_hub_id():
    for host, page in itertools.product(HOSTS, PAGES):
        assert hub_name(f"{host}Qwen/Qwen3-8B{page}") == "Qwen/Qwen3-8B", (host, page)


@pytest.mark.parametrize(
    "text", ["Qwen/Qwen3-8B", "qwen3-8b", "./huggingface.co", "https://example.com/a/b", "a/huggingface.co/b"]
)
def test_other_texts_stay(text):
    assert hub_name(text) == text
    assert hub_name("https://huggingface.co/datasets/trl-lib/Capybara") == "trl-lib/Capybara"


@pytest.fixture
def asked(monkeypatch):
    """The connections that are tried, by a machine without a network."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    tried = []

    def connect(address, timeout):
        tried.append((*address, timeout))
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", connect)
    hub_names._answers.cache_clear()
    yield tried
    hub_names._answers.cache_clear()


def test_a_hub_that_does_not_answer_is_tried_once(asked):
    for _ in range(2):
        with pytest.raises(InputError, match=r"model 'a/b-1': not in this machine's cache, and .* does not answer;"):
            load_config("a/b-1")
    assert asked == [(hub_names.HUB, 443, 3.0)]


def test_a_proxy_is_tried_in_the_hubs_place(asked, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert "does not answer" in why_no_hub() and asked == [("proxy.example", 3128, 3.0)]


def test_a_mirror_is_tried_in_the_hubs_place(asked, monkeypatch):
    for endpoint, port in (("http://mirror", 80), ("https://mirror", 443), ("http://mirror:81", 81)):
        asked.clear()
        hub_names._answers.cache_clear()
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert "does not answer" in why_no_hub() and asked == [("mirror", port, 3.0)]


def test_a_hub_that_answers_is_asked(asked, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: socket.socket())
    assert why_no_hub() is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert why_no_hub() == "HF_HUB_OFFLINE keeps from asking the hub"
