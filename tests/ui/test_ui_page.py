"""The page's server: bad values of every field are answered in one sentence, and nothing can be uploaded."""

import http.client
import json
from urllib.parse import urlparse

import pytest

pytest.importorskip("gradio")

from hf_memopt.errors import InputError
from hf_memopt.ui.limits import Limits
from hf_memopt.ui.page import _FEATURES, _question, build_page, launch_page

UNTOUCHED = {
    **{"model": "llama-3.1-8b", "card": "rtx_4090", "method": "lora", "length": None, "tokens": "", "price": None},
    **{"features": [], "others": None, "config": None},
}
ODD = (
    *(True, 5, -1, 1.5, float("nan"), float("inf"), [], {}, "x", "\x1b", "9" * 400, ["x"], [[]]),
    {"path": "/etc/passwd"},
)


@pytest.mark.parametrize("field", UNTOUCHED)
def test_any_value_is_a_question_or_a_sentence(field):
    for odd in ODD:
        fields = {**UNTOUCHED, field: odd}
        try:
            question = _question(*fields.values())
            assert question.seq_len is None or question.seq_len > 0
        except InputError as error:
            assert len(str(error)) < 400 and "\n" not in str(error)
    for bad in (None, "", 0, float("nan"), {}):
        if field in ("model", "card", "method"):
            with pytest.raises(InputError):
                _question(*{**UNTOUCHED, field: bad}.values())


@pytest.mark.parametrize("typed", [None, "", "  "])
def test_an_empty_length_is_the_presets(typed):
    assert _question(*{**UNTOUCHED, "length": typed}.values()).seq_len is None


def test_a_length_that_is_none(subtests):
    for typed in (0, "0", "-1", "1.5", "nan", float("nan"), "x", "9" * 400, [], {}, True):
        with (
            subtests.test(typed=str(typed)[:9]),
            pytest.raises(InputError, match=r"tokens per sample=.* must be a whole number above 0"),
        ):
            _question(*{**UNTOUCHED, "length": typed}.values())


def test_a_yaml_needs_no_model():
    assert _question(*{**UNTOUCHED, "model": "", "config": "a: 1\n"}.values()).config == "a: 1"
    with pytest.raises(InputError, match="card: choose one"):
        _question(*{**UNTOUCHED, "card": "", "config": "a: 1"}.values())


def test_features_are_of_the_page():
    name = next(iter(_FEATURES))
    assert _question(*{**UNTOUCHED, "features": [name]}.values()).settings == (_FEATURES[name],)
    with pytest.raises(InputError, match="unknown memory feature 'x'"):
        _question(*{**UNTOUCHED, "features": ["x"]}.values())


@pytest.fixture(scope="module", params=[True, False], ids=["public", "private"])
def address(request):
    page = build_page(Limits(public=request.param))
    yield urlparse(launch_page(page, "127.0.0.1", None, wait=False)).netloc
    page.close()


def _post(address, path, body, headers):
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/gradio_api/upload", "/upload", "/gradio_api/component_server", "/gradio_api/queue/join"]
)
def test_nothing_can_be_uploaded(address, path):
    part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"x" * 100 + b"\r\n--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert _post(address, path, part, headers) == (413, "this page takes no files")
    assert _post(address, path, b"x" * 70_000, {"Content-Type": "application/json"})[0] == 413
    assert _post(address, path, b"1\r\nx\r\n0\r\n\r\n", {"Transfer-Encoding": "chunked"})[0] == 413


@pytest.mark.slow
@pytest.mark.parametrize("field", UNTOUCHED)
def test_a_request_with_any_value_is_answered(address, field):
    for odd in (float("nan"), "x" if field == "length" else {}, ["x"] if field == "features" else [[]]):
        data = [*{**UNTOUCHED, field: odd}.values()]
        ask = {"data": data, "fn_index": 0, "session_hash": "s"}
        status, said = _post(address, "/gradio_api/queue/join", json.dumps(ask), {"Content-Type": "application/json"})
        assert status == 200, said
        connection = http.client.HTTPConnection(address, timeout=20)
        connection.request("GET", "/gradio_api/queue/data?session_hash=s")
        answer = connection.getresponse()
        for line in answer:
            event = json.loads(line.decode().removeprefix("data: ") or "{}") if line.startswith(b"data: ") else {}
            if event.get("msg") == "process_completed":
                break
        assert event["success"], event
        assert "<p" in json.dumps(event["output"]) and "error" not in event["output"], event
