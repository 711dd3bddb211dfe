"""What rows hold is trained on, refused with the row's and the key's name, or announced: never dropped in silence."""

import json
import logging

import pytest
import video_models
import videos
from bad_inputs import good_answers
from conftest import flags
from transformers import AutoConfig, AutoTokenizer

from hf_memopt.data.chat import find_answer_kind, to_trl
from hf_memopt.data.columns import CLIP_SAMPLING
from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError
from hf_memopt.video.conversations import Medium, conversation
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.frame_limits import Sampling
from hf_memopt.video.media import Limits
from hf_memopt.video.processor import load_processor

ASK = {"role": "user", "content": "Two plus two?"}
SAY = {"role": "assistant", "content": "Four."}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
FORMS = {
    "messages": {"messages": [ASK, SAY]},
    "conversations": {
        "conversations": [{"from": "human", "value": "Two plus two?"}, {"from": "gpt", "value": "Four."}]
    },
    "prompts of messages": {"prompt": [ASK], "completion": [SAY]},
    "prompts of text": {"prompt": "Two plus two?", "completion": "Four."},
    "alpaca": {"instruction": "Two plus two?", "output": "Four."},
}
# As Qwen's: tools in the system turn, roles by name, reasoning and calls of the assistant alone.
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role in ('system', 'user', 'tool') %}"
    "<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% elif message.role == 'assistant' %}<|assistant|>\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def tokenizer(builtin_model):
    return AutoTokenizer.from_pretrained(builtin_model)


@pytest.fixture
def read(jsonl, tokenizer):
    """Rows of a file as recipes/sft.py gives them to TRL's trainer."""

    def convert(*rows, template=None, streaming=False, split=False, skip=False, **load):
        if template:
            tokenizer.chat_template = template
        source = jsonl(list(rows))
        train, form = good_answers(source, tokenizer, skip, streaming=streaming, **load)
        return list(to_trl(train, form, find_answer_kind(train, form), split))

    return convert


# ---- text


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("messages", {"messages": [ASK, SAY]}),
        ("conversations", {"messages": [ASK, SAY]}),
        ("prompts of messages", {"prompt": [ASK], "completion": [SAY]}),
        ("prompts of text", {"prompt": "Two plus two?", "completion": "Four."}),
        ("alpaca", {"messages": [ASK, SAY]}),
    ],
)
def test_every_form_becomes_one_of_trls(form, expected, read):
    (row,) = read({**FORMS[form], "id": 7})
    assert row.pop("tools", None) is None and row == expected


@pytest.mark.drawn(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_column_becomes_the_system_message(form, column, read):
    (row,) = read({**FORMS[form], column: "Be brief."})
    messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    assert messages == [{"role": "system", "content": "Be brief."}, ASK, SAY]


def test_a_system_column_beside_a_system_message(read):
    opened = {"messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]}
    assert read({**opened, "system": "Be brief. "})[0]["messages"] == opened["messages"]
    with pytest.raises(InputError, match=r"rows\.jsonl: line 1, row 0: .*system.*differs"):
        read({**opened, "system": "Be verbose."})
    assert read({**opened, "system": None})[0]["messages"] == opened["messages"]


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL])])
@pytest.mark.parametrize("form", ["messages", "conversations", "prompts of messages", "alpaca"])
def test_tools_reach_the_chat_template(form, given, read):
    (row,) = read({**FORMS[form], "tools": given}, template=TOOL_TEMPLATE)
    assert json.loads(row["tools"]) == [TOOL], "as text: Arrow would fill in keys"


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        ({**FORMS["messages"], "tools": [TOOL]}, None, "chat template does not use tools"),
        ({**FORMS["messages"], "tools": "add"}, TOOL_TEMPLATE, "tools is not JSON"),
        ({**FORMS["messages"], "tools": [{"name": "add"}]}, TOOL_TEMPLATE, 'tools.*"function"'),
        ({**FORMS["prompts of text"], "tools": [TOOL]}, TOOL_TEMPLATE, "tools"),
        ({"text": "Two plus two is four.", "tools": [TOOL]}, TOOL_TEMPLATE, "tools"),
        ({"text": "Two plus two is four.", "system": "Be brief."}, None, "system"),
    ],
)
def test_tools_and_system_that_cannot_be_used(row, template, said, read):
    with pytest.raises(InputError, match=rf"rows\.jsonl: line 1, row 0: .*{said}"):
        read(row, template=template)


@pytest.mark.drawn(12)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("images", ["a.png"]),
        ("image", "a.png"),
        ("videos", ["a.mp4"]),
        ("video", "a.mp4"),
        ("audios", ["a.wav"]),
        ("audio", "a.wav"),
        ("chosen", "Four."),
        ("rejected", "Five."),
        ("label", False),
        ("weight", 0.5),
        ("mask", [0, 1]),
        ("input", "2 + 2"),
        ("history", [["Hi", "Hello"]]),
        ("rejected_response", "Five."),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("input_ids", [1, 2]),
        ("video_url", "http://a/b.mp4"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_mean_something_are_refused(column, value, streaming, read):
    place = r"row \d in the order that the stream is read" if streaming else "row 1"
    with pytest.raises(InputError, match=rf"rows\.jsonl: line 2, {place}: .*{column}") as caught:
        read({**FORMS["messages"], column: None}, {**FORMS["messages"], column: value}, streaming=streaming)
    assert "--ignore_columns" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_ignored_columns_are_left_out(read):
    row = {**FORMS["messages"], "rejected": "Five."}
    assert read(row, ignore=["rejected"])[0].keys() == {"messages", "tools"}
    with pytest.raises(InputError, match=r"ignore_columns.*'rejectd'.*Did you mean 'rejected'"):
        read(row, ignore=["rejectd"])


def test_other_columns_are_announced_once(read, caplog):
    more = {"id": 7, "source": "web", "prompt": "Two plus two?", "category": "sums", "score": 0.5}
    with caplog.at_level(logging.WARNING):
        assert len(read(*[{**FORMS["messages"], **more}] * 3)) == 3
    (said,) = [line for line in caplog.messages if "not used" in line]
    assert said.endswith("columns not used: category, id, prompt, score, source")


def test_a_text_with_a_label_is_text(read, caplog):
    assert read({"text": "A good film.", "label": 1}) == [{"text": "A good film."}]
    assert "columns not used: label" in caplog.text


def test_parts_of_text_are_joined(read):
    parts = [{"type": "text", "text": "Two plus "}, "two?"]
    assert read({"messages": [{"role": "user", "content": parts}, SAY]})[0]["messages"] == [ASK, SAY]


def test_each_answer_can_be_a_sample(read):
    """For templates that do not mark answers."""
    again = [{"role": "user", "content": "And three?"}, {"role": "assistant", "content": "Five."}]
    first, second = read({"messages": [ASK, SAY, *again]}, split=True)
    assert (first["prompt"], first["completion"]) == ([ASK], [SAY])
    assert (second["prompt"], second["completion"]) == ([ASK, SAY, again[0]], [again[1]])


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("message", "template", "said"),
    [
        ({**SAY, "tool_calls": CALL}, None, "'tool_calls'.*chat template"),
        ({**SAY, "name": "Ann"}, TOOL_TEMPLATE, "'name'.*chat template"),
        ({**SAY, "reasoning_content": "2 + 2"}, None, "'reasoning_content'.*chat template"),
        ({**SAY, "thinking": "2 + 2"}, None, "'thinking'.*chat template"),
        ({**SAY, "weight": 0}, None, "'weight'.*chat template"),
        ({**SAY, "train": False}, None, "'train'.*chat template"),
        ({**SAY, "confidence": 0.5}, None, "'confidence'"),
        ({"role": "asistant", "content": "Four."}, None, "role 'asistant'"),
        ({"role": "function", "content": "4"}, None, "role 'function'"),
        ({"role": "developer", "content": "4"}, TOOL_TEMPLATE, "role 'developer'"),
        ({"content": "4"}, None, "role"),
        ({**ASK, "content": [{"type": "image", "image": "a.png"}]}, None, "'image'.*video_sft"),
        ({**ASK, "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, None, "'image_url'"),
        ({**ASK, "content": {"text": "a"}}, None, "content"),
        ("Hello", None, "message"),
    ],
)
def test_messages_that_cannot_be_used(message, template, said, read):
    with pytest.raises(InputError, match=rf"rows\.jsonl: line 1, row 0: .*{said}") as caught:
        read({"messages": [ASK, SAY, ASK, message]}, template=template)
    assert len(str(caught.value).splitlines()) == 1


def test_keys_that_the_template_writes_are_kept(read, tokenizer):
    """As the file has them: no row gets keys of another."""
    called = {"role": "assistant", "content": "", "tool_calls": CALL, "reasoning_content": "2 + 2"}
    messages = [ASK, called, {"role": "tool", "content": "4"}, SAY]
    plain, with_tools = read(FORMS["messages"], {"messages": messages, "tools": [TOOL]}, template=TOOL_TEMPLATE)
    assert plain["messages"] == [ASK, SAY] and with_tools["messages"] == messages


def test_keys_that_say_nothing_are_announced_where_the_template_leaves_them_out(read, caplog):
    messages = [ASK, {**SAY, "id": 3}]
    writing = "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.id }}\n{% endfor %}"
    for template, said in ((None, 1), (writing, 0)):
        caplog.clear()
        assert read({"messages": messages}, {"messages": messages}, template=template)[1]["messages"] == messages
        assert caplog.text.count("messages have the key 'id', which the chat template does not use") == said


def test_a_template_that_drops_the_system_message(read):
    dropping = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"row 0: .*role 'system'"):
        read({**FORMS["messages"], "system": "Be brief."}, template=dropping)
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + dropping
    with pytest.raises(InputError, match=r"row 0: .*no system role"):
        read({**FORMS["messages"], "system": "Be brief."}, template=raising)


def test_the_row_is_that_of_the_file(jsonl, tokenizer):
    """Although rows are shuffled when some are held out."""
    rows = [FORMS["messages"]] * 40
    rows[29] = {**FORMS["messages"], "rejected": "Five."}
    source = jsonl(rows)
    with pytest.raises(InputError, match=r"row 29: .* 1 of 40 rows cannot be trained on"):
        good_answers(source, tokenizer, held_out=1)


# ---- videos

CLIP = {"messages": [{"role": "user", "content": "<video>What?"}, SAY], "videos": ["a.mp4"]}


def asked(*parts):
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, SAY]}


def test_video_rows_that_cannot_be_used(subtests):
    for row, said in [
        (asked({"type": "video_url", "video_url": {"url": "a.mp4"}}), "'video_url'.*\"video\""),
        (asked({"type": "image_url", "image_url": {"url": "a.png"}}), "'image_url'"),
        (asked({"type": "audio", "audio": "a.wav"}), "'audio'"),
        (asked({"type": "input_audio"}), "'input_audio'"),
        (asked({"type": "video", "video": "a.mp4", "start": 1.0}), "'start'.*`video_start` and `video_end`"),
        (asked({"type": "video", "video": "a.mp4", "fps": 0}), "fps=0 must be a number above 0"),
        (asked({"type": "video", "video": "a.mp4", "fps": "two"}), "fps='two' must be a number"),
        (asked({"type": "video", "video": "a.mp4", "nframes": 2.5}), "nframes=2.5 must be an integer"),
        (asked({"type": "video", "video": "a.mp4", "nframes": 4, "fps": 2}), "leave one of them out"),
        (asked({"type": "video", "video": "a.mp4", "video_start": 3, "video_end": 2}), "video_end=2 must be above"),
        (asked({"type": "image", "image": "a.png", "resized_height": 28}), "'resized_height'.*max_pixels"),
        (asked({"type": "image", "image": "a.png", "fps": 2}), "'fps'"),
        ({**CLIP, "clip_start": 1.0}, "clip_start"),
        ({**CLIP, "num_frames": 4}, "num_frames.*`nframes`"),
        ({**CLIP, "max_pixels": True}, "max_pixels=True"),
        ({**CLIP, "audios": ["a.wav"]}, "audios"),
        ({**CLIP, "objects": {"bbox": [[1, 2, 3, 4]]}}, "objects"),
        ({**CLIP, "rejected": "Five."}, "rejected"),
        ({"messages": [{"role": "user", "content": "<video><audio>What?"}, SAY], "videos": ["a.mp4"]}, "<audio>"),
        ({**CLIP, "videos": ["https://a.b/c.mp4"]}, "https://a.b/c.mp4.*download"),
        ({**CLIP, "videos": [["1.png", 2]]}, "a frame of a video is 2"),
        ({**CLIP, "videos": [[]]}, "names no file"),
        ({**CLIP, "videos": [["https://a.b/1.png"]]}, "https://a.b/1.png.*download"),
        ({**CLIP, "videos": [None]}, "names no file"),
        ({**CLIP, "videos": [3]}, "3"),
        ({**CLIP, "videos": [{"path": "a.mp4", "speed": 2.0}]}, "'speed'"),
        (asked({"type": "image", "image": ["1.png", "2.png"]}), "list of 2 files"),
        (asked({"type": "image", "image": "data:image;base64,AAAA"}), "data:.*"),
        ({**CLIP, "video_path": "b.mp4"}, "video_path"),
        (
            {"messages": [ASK, {"role": "assistant", "content": "<video>"}], "videos": ["a.mp4"]},
            "an answer has a video",
        ),
        ({"video": "a.mp4", "caption": "<video>"}, "an answer has a video"),
    ]:
        with subtests.test(row=str(row), said=said):
            with pytest.raises(InputError, match=f"row 7: .*{said}") as caught:
                conversation(row, "row 7")
            assert type(caught.value) is InputError, "not a bad video, which max_bad_videos would skip"


def test_tags_in_parts_of_text_are_tags():
    row = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "<video>\nWhat?"}]}, SAY],
        "videos": ["file:///clips/a.mp4"],
    }
    messages, media = conversation(row, "row 0")
    assert messages[0]["content"] == [{"type": "video"}, {"type": "text", "text": "What?"}]
    assert media == [Medium("video", "/clips/a.mp4")]


def test_a_clip_says_how_it_is_sampled():
    """In its part, in its mapping, or for all of a row's clips in columns; what is nearer to the clip wins."""
    part = {"type": "video", "video": "a.mp4", "fps": 1.0, "video_end": 4}
    row = {**asked(part, {"type": "video"}), "videos": [{"path": "b.mp4", "max_frames": 6}]}
    row |= {"nframes": 8, "max_frames": 12.0, "video_start": None, "fps": None}
    _, media = conversation(row, "row 0")
    assert media == [
        Medium("video", "a.mp4", Sampling(fps=1.0, max_frames=12, video_end=4)),
        Medium("video", "b.mp4", Sampling(nframes=8, max_frames=6)),
    ]
    _, (image,) = conversation(asked({"type": "image", "image": "a.png", "max_pixels": 5000}) | {"fps": 2.0}, "row 0")
    assert image.sampling == Sampling(max_pixels=5000)
    assert tuple(vars(Sampling())) == CLIP_SAMPLING


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    videos.write(folder / "a.mp4", videos.numbered(4, 56, 56))
    model = video_models.make("qwen2_5_vl", folder / "qwen2_5_vl")
    return Encoder(load_processor(str(model), AutoConfig.from_pretrained(model)), Limits(max_frames=4), folder)


@pytest.mark.parametrize("form", FORMS)
def test_the_system_column_of_video_rows(form, encoder):
    sample = encoder({**FORMS[form], "videos": ["a.mp4"], "system": "Be brief."})
    text = encoder.processor.tokenizer.decode(sample["input_ids"])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|video_pad|>")
    said = encoder.processor.tokenizer.decode(sample["labels"][sample["labels"] != IGNORED])
    assert said.startswith("Four.")


def test_tools_and_keys_of_video_rows(encoder):
    with pytest.raises(InputError, match=r"row: .*does not use tools"):
        encoder({**CLIP, "tools": [TOOL]})
    with pytest.raises(InputError, match=r"row: .*role 'asker'"):
        encoder({**CLIP, "messages": [{**CLIP["messages"][0], "role": "asker"}, SAY]})
    with pytest.raises(InputError, match=r"row: .*'tool_calls'.*chat template"):
        encoder({**CLIP, "messages": [CLIP["messages"][0], {**SAY, "tool_calls": CALL}]})


def test_no_row_of_another_form_is_a_bad_video(recipe, tmp_path, encoder):
    """Found before training, wherever the row lies, and however many bad videos may be skipped."""
    folder = encoder.folder
    rows = [{**CLIP, "videos": [str(folder / "a.mp4")]}] * 12
    rows[10] = {**CLIP, "videos": ["https://a.b/c.mp4"]}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"rows\.jsonl: line 11, row 10: .*https://a\.b/c\.mp4.*download"):
        recipe("video_sft")(
            [
                *flags(preset="cpu", model_name_or_path=folder / "qwen2_5_vl", dataset_name=data, held_out=4),
                *flags(max_bad_videos=9, max_pixels_per_frame="none", output_dir=tmp_path / "out"),
            ]
        )
    assert not (tmp_path / "out").exists()


def test_a_marker_of_the_encoding_counts_in_the_first_line_alone(tmp_path):
    from hf_memopt.data.row_files import _lines

    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\nth\0ree\n")
    assert list(_lines(path)) == [(1, "one\n"), (2, "\ufefftwo\n"), (3, "th\0ree\n")]
    path.write_bytes("one\n".encode("utf-16"))
    with pytest.raises(InputError, match="line 1 is not UTF-8 but looks like UTF-16"):
        list(_lines(path))
    path.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(InputError, match=r"line 2 is not UTF-8 .byte 0xff at column 3"):
        list(_lines(path))
