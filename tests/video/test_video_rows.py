"""Rows as other trainers' data sets write them: what their tags mean, and media that are http(s) addresses."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from hf_memopt.data.sources import load_rows
from hf_memopt.errors import InputError
from hf_memopt.video.collator import _pad_and_concatenate
from hf_memopt.video.conversations import Medium, conversation
from hf_memopt.video.downloads import Downloads
from hf_memopt.video.video_files import BadVideo

CONTENT = bytes(range(256)) * 8192  # 2 MiB


def roles(messages) -> list[tuple[str, list[str]]]:
    return [(message["role"], [part.get("text", part["type"]) for part in message["content"]]) for message in messages]


# ---- forms


def test_llava_video_writes_image_for_a_video():
    """As in LLaVA-Video-178K."""
    turns = [
        {"from": "human", "value": "<image>\nWhat moves?"},
        {"from": "gpt", "value": "A door."},
        {"from": "human", "value": "Where to?"},
        {"from": "gpt", "value": "It opens."},
    ]
    row = {"id": "1-0", "conversations": turns, "data_source": "0_30_s_youtube", "video": "youtube/a.mp4"}
    messages, media = conversation(row, "row 0")
    assert media == [Medium("video", "youtube/a.mp4")]
    assert roles(messages) == [
        ("user", ["video", "What moves?"]),
        ("assistant", ["A door."]),
        ("user", ["Where to?"]),
        ("assistant", ["It opens."]),
    ]
    with pytest.raises(InputError, match=r"row 3: has more <video> tags than videos"):
        conversation({**row, "conversations": [{"from": "human", "value": "<image><image>"}, turns[1]]}, "row 3")


def test_a_caption_is_the_answer_to_its_clip():
    messages, media = conversation({"video": "a.mp4", "caption": "A door opens."}, "row 0")
    assert roles(messages) == [("user", ["video"]), ("assistant", ["A door opens."])]
    assert media == [Medium("video", "a.mp4")]
    with pytest.raises(
        InputError, match="row 1: its caption describes a `video` or an `image`, and the row has neither"
    ):
        conversation({"caption": "A door opens."}, "row 1")


def test_a_folder_of_clips_has_its_captions_beside_them(tmp_path):
    for name in ("b.mp4", "a.mp4", "c.png"):
        (tmp_path / name).write_bytes(b"clip")
        (tmp_path / name).with_suffix(".txt").write_text(f"What {name} shows.\n", encoding="utf-8")
    rows, _, form = load_rows(str(tmp_path), held_out=0, with_media=True)
    assert form == "caption" and rows["caption"] == [f"What {name} shows." for name in ("a.mp4", "b.mp4", "c.png")]
    _, (medium,) = conversation(rows[2], "row 2")
    assert medium == Medium("image", str((tmp_path / "c.png").resolve()))
    assert load_rows(str(tmp_path), held_out=0)[2] == "text"  # of a recipe of texts: as `datasets` reads the folder
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(InputError, match=r"a\.txt is empty: write the caption of a\.mp4 into it"):
        load_rows(str(tmp_path), with_media=True)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"a.mp4 of 3 files without a caption: .* \(a.txt\)"):
        load_rows(str(tmp_path), with_media=True)


def test_an_image_stays_one_beside_a_video():
    ask = {"role": "user", "content": "<image>Is this in <video>?"}
    say = {"role": "assistant", "content": "Yes."}
    _, media = conversation({"messages": [ask, say], "images": ["a.png"], "videos": ["a.mp4"]}, "row 0")
    assert [(medium.kind, medium.source) for medium in media] == [("image", "a.png"), ("video", "a.mp4")]
    with pytest.raises(InputError, match="more <image> tags than images"):
        conversation({"messages": [ask, say], "videos": ["a.mp4"]}, "row 0")


def test_llama_factorys_rows_with_several_media_turns_and_a_system_prompt():
    row = {
        "conversations": [
            {"from": "human", "value": "<video>Then <image> and <video>: what changed?"},
            {"from": "gpt", "value": "The door."},
            {"from": "human", "value": "And here: <image>"},
            {"from": "gpt", "value": "Nothing."},
        ],
        "system": "Be brief.",
        "videos": ["1.mp4", "2.mp4"],
        "images": ["1.png", "2.png"],
    }
    messages, media = conversation(row, "row 0")
    assert [medium.source for medium in media] == ["1.mp4", "1.png", "2.mp4", "2.png"]
    assert roles(messages) == [
        ("system", ["Be brief."]),
        ("user", ["video", "Then ", "image", " and ", "video", ": what changed?"]),
        ("assistant", ["The door."]),
        ("user", ["And here: ", "image"]),
        ("assistant", ["Nothing."]),
    ]


def test_audio_is_refused_in_one_sentence():
    say = {"role": "assistant", "content": "Yes."}
    part = {"type": "audio", "audio": "a.wav"}
    with pytest.raises(InputError, match="row 1: a part is 'audio', and no recipe trains on audio"):
        conversation({"messages": [{"role": "user", "content": [part]}, say]}, "row 1")
    with pytest.raises(InputError, match=r"row 1: the column 'audios'.*no recipe trains on audio"):
        ask = {"role": "user", "content": "<video>Who speaks?"}
        conversation({"messages": [ask, say], "videos": ["a.mp4"], "audios": ["a.wav"]}, "row 1")


# ---- addresses


class Server(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        self.path = self.path.partition("?")[0]
        type(self).asked.append(self.path)
        places = {"/to_file.mp4": "file:///etc/passwd", "/moved.mp4": "/a.mp4", "/circle.mp4": "/circle.mp4"}
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
            return
        if not self.path.startswith(("/a.mp4", "/half.mp4", "/unsized.mp4")):
            self.send_error(404)
            return
        self.send_response(200)
        if "unsized" not in self.path:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if "half" in self.path else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    Server.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["a.mp4", "moved.mp4", "unsized.mp4"])
def test_a_file_is_downloaded_once(name, site, tmp_path):
    downloads = Downloads(tmp_path / "downloads", 2)
    path = downloads.fetch(f"{site}/{name}?key=1")
    assert path.read_bytes() == CONTENT and path.suffix == ".mp4"
    asked = len(Server.asked)
    assert downloads.fetch(f"{site}/{name}?key=1") == path
    assert len(Server.asked) == asked and [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unsized.mp4", "larger than max_download_mib=1.5"),
        ("a.mp4", "larger than max_download_mib=1.5"),
        ("half.mp4", r"cannot be downloaded .the connection ended after 1,048,576 bytes"),
        ("gone.mp4", "cannot be downloaded .*404"),
        ("to_file.mp4", "cannot be downloaded"),
        ("circle.mp4", "cannot be downloaded"),
    ],
)
def test_what_cannot_be_downloaded_is_a_bad_video_without_its_key(name, said, site, tmp_path):
    with pytest.raises(BadVideo, match=f"^http://127.0.0.1:[0-9]+/{name}: {said}") as caught:
        Downloads(tmp_path, 1.5).fetch(f"{site}/{name}?key=hidden")
    assert "hidden" not in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_addresses_are_refused_unless_downloads_are_allowed():
    say = {"role": "assistant", "content": "Yes."}
    row = {"messages": [{"role": "user", "content": "<video>"}, say], "videos": ["HTTPS://a.b/c.mp4?key=hidden"]}
    with pytest.raises(InputError, match=r"row 0: https://a.b/c.mp4 is an address.*--max_download_mib") as caught:
        conversation(row, "row 0")
    assert "hidden" not in str(caught.value)
    assert conversation(row, "row 0", urls=True)[1] == [Medium("video", "HTTPS://a.b/c.mp4?key=hidden")]
    with pytest.raises(InputError, match=r"s3://a/b.mp4 is not a file"):
        conversation({**row, "videos": ["s3://a/b.mp4"]}, "row 0", urls=True)
    with pytest.raises(InputError, match="max_download_mib=0 must be above 0"):
        Downloads(None, 0)


def test_rows_of_different_lengths_are_padded_at_their_end():
    for shape in ((1, 2), (1, 2, 3), (1, 2, 3, 2)):
        short, long = torch.ones(shape), torch.ones(2, 4, *shape[2:])
        joined = _pad_and_concatenate([short, long])
        assert joined.shape == (3, 4, *shape[2:]) and torch.equal(joined[1:], long)
        assert torch.equal(joined[:1, :2], short) and not joined[:1, 2:].any()
