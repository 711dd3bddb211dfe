"""Numbers of clips, batches and caches at their borders, asked of the functions, without files where that can be."""

import json
import os
from types import SimpleNamespace

import numpy
import pytest
import torch
from transformers import AutoConfig, Qwen2VLConfig

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError
from hf_memopt.units import GIB, MIB
from hf_memopt.video import demo_model, media, video_files
from hf_memopt.video.clips import Clip
from hf_memopt.video.collator import VideoCollator, check_packing, join, pack
from hf_memopt.video.conversations import Medium, conversation
from hf_memopt.video.downloads import _ABANDONED, Downloads, display_url, remove_abandoned
from hf_memopt.video.encoder import Encoder, _replace
from hf_memopt.video.frame_cache import FrameCache
from hf_memopt.video.inputs import VideoInputs, at_least_one, frozen_by_settings, value_tensors, video_inputs
from hf_memopt.video.media import EncodedMedium, Limits, MediaEncoder
from hf_memopt.video.pixels import FAMILIES, prepare_frames
from hf_memopt.video.video_files import BadVideo


def encoder(processor=None, temporal=2, side=28, merge=2, **limits):
    """An encoder's own part, around a processor that is none."""
    video = SimpleNamespace(temporal_patch_size=temporal, merge_size=merge, patch_size=side // merge)
    self = MediaEncoder.__new__(MediaEncoder)
    vars(self).update(limits=Limits(**limits), folder=None, downloads=None, frame_cache=None)
    vars(self).update(processor=processor or SimpleNamespace(video_processor=video))
    return self


# ---- batches


def sample(tokens: int, **media) -> dict:
    return {"input_ids": torch.arange(1, tokens + 1), "labels": torch.arange(1, tokens + 1), **media}


def test_tokens_are_padded_to_a_multiple():
    for lengths, multiple, padded in (((5, 3), 8, 8), ((8, 1), 8, 8), ((9, 9), 8, 16), ((3, 2), 1, 3)):
        samples = [sample(length, mm_token_type_ids=torch.ones(length, dtype=torch.long)) for length in lengths]
        batch = VideoCollator(7, multiple, attention_mask=True, lengths=True)(samples)
        for length, *columns in zip(lengths, *(batch[name].tolist() for name in list(batch)[:4]), strict=True):
            missing, tokens = padded - length, [*range(1, length + 1)]
            assert columns == [
                *(tokens + [7] * missing, tokens + [IGNORED] * missing, [1] * length + [0] * missing),
                [1] * length + [0] * missing,
            ]
        assert batch["lengths"].tolist() == list(lengths) and "media" not in batch
    plain = VideoCollator(0, separate_media=True)([sample(2, pixel_values=torch.ones(1))])
    assert plain.keys() == {"input_ids", "labels", "media"} and plain["media"][0].keys() == {"pixel_values"}


def test_media_of_several_samples_are_joined():
    """(parts, in one sample) -> the shape of the joined tensor, or of each where they stay a list."""

    def parts(*shapes, name="pixel_values", **more):
        return [{name: torch.ones(shape), **more} for shape in shapes]

    mask, sizes = {"pixel_attention_mask": torch.ones(1, 1, 2)}, {"image_sizes": torch.ones(1, 2)}
    for given, together, shape in (
        (parts((4, 6), (2, 6)), False, (6, 6)),
        (parts((1, 5, 3), (1, 4, 3)), False, [(1, 5, 3), (1, 4, 3)]),
        (parts((1, 5, 3, 2), (1, 4, 3, 2), **sizes), False, (2, 5, 3, 2)),
        (parts((1, 5, 3), (1, 4, 3), name="pixel_values_videos", **sizes), False, [(1, 5, 3), (1, 4, 3)]),
        (parts((1, 2, 3), (1, 4, 3), **mask), True, (1, 6, 3)),
        (parts((1, 2, 3), (1, 4, 3), **mask), False, (2, 4, 3)),
        (parts((3, 14, 5), (3, 14, 2), target_sizes=torch.ones(1, 2)), False, (3, 14, 7)),
    ):
        name = next(iter(given[0]))
        joined = join(given, together)[name]
        shapes = [tuple(one.shape) for one in joined] if isinstance(joined, list) else tuple(joined.shape)
        assert shapes == shape
        total = joined if isinstance(joined, torch.Tensor) else torch.cat([one.flatten() for one in joined])
        assert total.sum() == sum(part[name].numel() for part in given), "padding is zeros"
    without = join([*parts((1, 2, 3), **mask), {}])
    assert without["pixel_values"].shape == (2, 2, 3) and without["pixel_values"][1].abs().sum() == 0
    assert join([{"x": [torch.ones(2, 3), torch.ones(1, 3)]}, {"x": torch.ones(4, 3)}])["x"].shape == (7, 3)


def test_a_padded_batch_as_one_row():
    batch = VideoCollator(0, attention_mask=False)([sample(3), sample(2), sample(1)])
    packed = pack(batch | {"other": 5}, torch.tensor([3, 2, 1]), torch.nn.Linear(1, 1))
    assert packed["input_ids"].tolist() == [[1, 2, 3, 1, 2, 1]] and packed["other"] == 5
    assert packed["labels"].tolist() == [[IGNORED, 2, 3, IGNORED, 2, IGNORED]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]

    class Rope(torch.nn.Module):
        def get_rope_index(self, input_ids, video_grid_thw=None, attention_mask=None):
            return (input_ids + 10 * attention_mask).expand(3, -1, -1), None

    text = pack(batch, torch.tensor([3, 2, 1]), Rope())["position_ids"]
    assert text.tolist() == [[[0, 1, 2, 0, 1, 0]]] * 4
    seen = pack(batch | {"video_grid_thw": torch.ones(1, 3)}, torch.tensor([3, 2, 1]), Rope())["position_ids"]
    assert seen.tolist() == [[[0, 1, 2, 0, 1, 0]], *[[[11, 12, 13, 11, 12, 11]]] * 3]
    text = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], model_type="x")
    config = SimpleNamespace(get_text_config=lambda: text, model_type="internvl")
    check_packing(config)
    text.layer_types = ["linear_attention", *text.layer_types]
    with pytest.raises(InputError, match=r"layers of the type linear_attention .x. carry"):
        check_packing(config)
    config.model_type = "llava"
    with pytest.raises(InputError, match="not tested for models of the type llava"):
        check_packing(config)


# ---- what estimates are asked about

QWEN = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "qwen2_vl": lambda: Qwen2VLConfig(text_config=QWEN, vision_config={"depth": 1}),
    **{
        name: lambda name=name: AutoConfig.for_model(name)
        for name in ("qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl", "smolvlm", "video_llama_3")
    },
}


def test_tokens_of_a_clip(subtests):
    """Steps, tokens of one, tokens behind them and beside each: worked out by hand from the families' rules."""
    for name, (steps, tokens, closing, beside), pixels in (
        # 360 × 640 in patches of 14 merged by two: 26 × 46 patches
        ("qwen2_vl", (4, 13 * 23, 0, 0), (4 * 26 * 46, 3 * 2 * 14 * 14)),
        ("qwen2_5_vl", (4, 13 * 23, 0, 0), (4 * 26 * 46, 3 * 2 * 14 * 14)),
        # all 8 frames share 768 × 32 × 32 pixels: each is 224 × 416 at most
        ("qwen3_vl", (4, 7 * 13, 0, 10), (4 * 14 * 26, 3 * 2 * 16 * 16)),
        ("video_llama_3", (7, 12 * 9, 0, 8), None),
        ("llava_onevision", (7, 14 * 14, 1, 0), (1, 7, 3, 384, 384)),
        ("internvl", (7, 256, 0, 7), (7, 3, 384, 384)),
        ("smolvlm", (7, (224 // 32) ** 2 // 4, 0, 12), (1, 7, 3, 364, 364)),
    ):
        with subtests.test(name):
            config = CONFIGS[name]()
            clip = VideoInputs(frames=7).clip(config)
            found = (clip.steps, clip.step_tokens, clip.closing_tokens, clip.beside)
            key = "pixel_values" if name in ("internvl", "smolvlm") else "pixel_values_videos"
            if pixels:
                assert tuple(clip.tensors[key].shape) == pixels
                assert found == (steps, tokens, closing, beside)
            assert clip.tensors[key].device.type == "meta"
            assert name != "video_llama_3" or clip.tensors["video_compression_mask"].all(), "nothing is left out"
            assert ("second_per_grid_ts" in clip.tensors) is (name == "qwen2_5_vl")
            inputs = VideoInputs(frames=7, prompt_tokens=5, answer_tokens=3)
            total = 8 + (clip.beside + clip.step_tokens) * clip.steps + clip.closing_tokens
            batch = inputs.batch(config, 2)
            token, kind = inputs.place(config)
            assert inputs.seq_len(config) == total and inputs.longest(config) == -(-total // 8) * 8
            assert (batch["input_ids"] == token).sum() == 2 * (clip.step_tokens * clip.steps + clip.closing_tokens)
            assert (batch["labels"] != IGNORED).sum() == 6 and (batch["labels"][:, total - 3 : total] == 1).all()
            if name.startswith("qwen"):
                assert (batch["mm_token_type_ids"] == kind * (batch["input_ids"] == token)).all() and kind == 2
            seen = clip.step_tokens * clip.steps + clip.closing_tokens
            assert inputs.summary(config).endswith(
                f"→ {seen:,} tokens"
            ) and "7 frames of 640 × 360 →" in inputs.summary(config)
            assert inputs.temporal_patch_size(config) == (2 if name.startswith("qwen") else 1)
    with pytest.raises(InputError, match="video model type"):
        VideoInputs().clip(SimpleNamespace(model_type="llama"))
    small = VideoInputs(frames=8, max_pixels_per_frame=50_000).clip(CONFIGS["qwen2_vl"]())
    assert small.step_tokens == 5 * 10
    packed = {"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    assert VideoInputs(packed=packed).longest(None) == 3 and VideoInputs(packed=packed).batch(None, 9) is packed
    assert [VideoInputs(frames=frames).halved() for frames in (1, 2, 5)] == [
        *(None, VideoInputs(frames=1), VideoInputs(frames=2)),
    ]
    assert VideoInputs(sample={}).halved() is None and VideoInputs(packed=packed).halved() is None


def test_settings_of_a_clip():
    config = CONFIGS["qwen2_vl"]()
    assert video_inputs("a", config, {"answer_tokens": 3}) is None
    found = video_inputs("a", config, {"max_frames": 6, "max_pixels_per_frame": 9000})
    assert (found.frames, found.width, found.height, found.answer_tokens) == (6, 640, 360, 64)
    assert found.max_pixels_per_frame == 9000
    found = video_inputs("a", config, {"frame_size": "64x48", "answer_tokens": 5})
    assert (found.frames, found.width, found.height, found.answer_tokens) == (100, 64, 48, 5)
    at_least_one({"a": 1, "b": 7})
    for value in (0, -1, 1.0, True, "2", None):
        with pytest.raises(InputError, match=f"b={value} must be an integer of at least 1"):
            at_least_one({"a": 1, "b": value})
    for settings, frozen in (
        ({}, ("vision",)),
        ({"freeze_vision": False}, ()),
        ({"freeze_projector": True}, ("vision", "projector")),
        ({"freeze_vision": False, "freeze_projector": True}, ("projector",)),
    ):
        assert frozen_by_settings(settings) == frozen
    tensors = {
        "ids": torch.zeros(9000, dtype=torch.long),
        "seconds": torch.zeros(4095),
        "pixels": torch.zeros(4096),
        "meta": torch.zeros(2, device="meta"),
    }
    assert value_tensors(tensors).keys() == {"ids", "seconds"}


# ---- samples


def test_how_many_frames_are_tried_next():
    """(tokens, of media, frames of each medium) within 100 tokens, 60 of them of media -> the next max_frames."""
    self = SimpleNamespace(
        limits=SimpleNamespace(max_length=100, max_video_tokens=60), media=SimpleNamespace(temporal_patch_size=2)
    )
    for (tokens, of_media, frames), fewer in {
        **{(100, 60, (8,)): None, (101, 60, (8,)): 6, (110, 60, (12,)): 10, (130, 60, (12,)): 6},
        **{(100, 61, (8,)): 6, (100, 120, (12,)): 6, (130, 60, (12, 4, 0)): 8, (190, 80, (8,)): 2},
        **{(101, 60, (2,)): None, (101, 60, (3,)): 2, (101, 60, (0,)): None, (101, 60, ()): None},
    }.items():
        encoded = [SimpleNamespace(frames=count) for count in frames]
        assert Encoder._fewer_frames(self, tokens, of_media, encoded) == fewer, (tokens, of_media, frames)
    self.media.temporal_patch_size = 1
    assert Encoder._fewer_frames(self, 101, 60, [SimpleNamespace(frames=8)]) == 7
    self.limits = SimpleNamespace(max_length=None, max_video_tokens=None)
    assert Encoder._fewer_frames(self, 10**6, 10**5, [SimpleNamespace(frames=8)]) is None


def test_the_end_of_an_answer_beyond_the_limit_is_cut():
    """Tokens 3 and 4 of ten are a clip's, answers begin with the seventh."""
    ids = torch.arange(10)
    labels = torch.where(ids < 6, IGNORED, ids)
    whole = {"input_ids": ids, "labels": labels, "pixel_values": ids}
    self = SimpleNamespace(_token_types=lambda ids: torch.tensor([int(token in (3, 4)) for token in ids]))
    for length, most, left in ((10, 2, 10), (9, 2, 9), (7, None, 7), (6, 2, None), (None, 2, 10), (10, 1, None)):
        self.limits = SimpleNamespace(max_length=length, max_video_tokens=most)
        if left is None:
            with pytest.raises(InputError, match=r"row 3: its (prompt leaves no tokens|media take 2 tokens)"):
                Encoder._truncate(self, whole, 2, "row 3")
            continue
        cut = Encoder._truncate(self, whole, 2, "row 3")
        assert (len(cut["input_ids"]), len(cut["labels"]), len(cut["pixel_values"])) == (left, left, 10)
    for length, fits in ((5, True), (4, False)):
        self.limits = SimpleNamespace(max_length=length, max_video_tokens=None)
        answered = {"input_ids": ids, "labels": ids}
        if fits:
            assert len(Encoder._truncate(self, answered, 2, "row 3")["input_ids"]) == 5
        else:
            with pytest.raises(InputError, match="the whole row takes 10 tokens, 2 of them"):
                Encoder._truncate(self, answered, 2, "row 3")


def test_texts_in_the_place_of_media():
    text, spans = _replace("ab<v>cd<v>ef", [(0, 2), (2, 5), (5, 7), (10, 12)], [(2, 5, "123456"), (7, 10, "")])
    assert text == "ab123456cdef" and [text[start:end] for start, end in spans] == ["ab", "123456", "cd", "ef"]
    numbering = SimpleNamespace(processor=SimpleNamespace(image_id_start_token="<i>", image_id_end_token="</i>"))
    assert Encoder._numbered(numbering, "<i>0</i>x<i>0</i>", 3) == "<i>3</i>x<i>0</i>"
    plain = SimpleNamespace(processor=SimpleNamespace())
    assert Encoder._numbered(plain, "<i>0</i>", 3) == "<i>0</i>"
    marked = SimpleNamespace(processor=SimpleNamespace(video_duration_token="<d>"))
    clips = [
        EncodedMedium(kind, "", {}, 1, seconds) for kind, seconds in (("video", 1.236), ("image", 9), ("video", 2.0))
    ]
    assert Encoder._write_durations(marked, "a<d>b<d>c", [(1, 4), (8, 9)], clips) == ("a1.24b2.0c", [(1, 5), (9, 10)])
    assert Encoder._write_durations(plain, "a<d>", [(0, 1)], clips) == ("a<d>", [(0, 1)])


def test_frames_of_tensors():
    grid = torch.tensor([[2, 4, 6], [1, 2, 2]])
    for tensors, frames in (
        ({"num_frames_per_video": torch.tensor([3, 4])}, 7),
        ({"video_grids": torch.tensor([[3, 9, 9], [2, 9, 9]])}, 5),
        ({"pixel_values_videos": torch.zeros(52, 3 * 14 * 14 * 2), "video_grid_thw": grid}, 6),
        ({"pixel_values_videos": torch.zeros(52, 3 * 14 * 14), "video_grid_thw": grid}, 3),
        ({"pixel_values_videos": torch.zeros(1, 5, 3, 2, 2)}, 5),
        ({"pixel_values": torch.zeros(4, 3, 2, 2)}, 4),
    ):
        assert encoder().count_frames(tensors) == frames
    slices = EncodedMedium("video", "<s>a<s>b", {"target_sizes_videos": torch.ones(1)}, 2)
    processor = SimpleNamespace(image_start_token="<s>", video_processor=SimpleNamespace())
    assert encoder(processor)._count_frames(slices) == 2


def test_tensors_within_their_limits():
    """Two frames where the model merges two, however few are allowed; a patch merged of four, however few pixels."""

    def checked(frames, given, rows=2, columns=2, kind="video", **limits):
        grid = torch.tensor([[1, rows, columns]])
        tensors = {"pixel_values": torch.zeros(frames, 3, 2, 2), "image_grid_thw": grid}
        encoder(**limits).check([EncodedMedium(kind, "", tensors, given)])

    checked(2, 2, max_frames=1)
    checked(4, 4, max_frames=4)
    checked(9, 9, max_frames=None)
    checked(9, 3, kind="image")
    for frames, given, most in ((3, 3, 2), (5, 5, 4), (3, 4, None)):
        with pytest.raises(InputError, match=f"{frames} frames in its tensors, {given} given, max_frames={most}"):
            checked(frames, given, max_frames=most)
    checked(2, 2, 4, 6, max_pixels_per_frame=24 * 14 * 14)
    checked(2, 2, 9, 9)
    checked(2, 2, max_pixels_per_frame=5)
    with pytest.raises(RuntimeError, match="video of 56 × 84, max_pixels_per_frame=4703"):
        checked(2, 2, 4, 6, max_pixels_per_frame=24 * 14 * 14 - 1)


def test_what_a_processor_is_told_of_a_clip(monkeypatch):
    told = {}

    def process(self, kind, frames, **given):
        told.update(given, kind=kind, frames=frames)
        return EncodedMedium(kind, "", {}, frames)

    monkeypatch.setattr(MediaEncoder, "_process", process)
    frames = numpy.arange(3 * 3 * 4 * 6, dtype=numpy.uint8).reshape(3, 3, 4, 6)
    encoded = encoder()._encode_clip(Clip(frames, (0, 5, 9), (0.0, 1.26, 2.25), 10, 2.5))
    (metadata,), (pixels,) = told["video_metadata"], told["videos"]
    assert metadata == {
        **{"total_num_frames": 10, "fps": 4.0, "duration": 2.5, "frames_indices": [0, 5, 9, 9]},
        **{"height": 4, "width": 6},
    }
    assert (told["frames"], encoded.duration, told["do_sample_frames"], told["return_metadata"]) == (
        4,
        2.5,
        False,
        True,
    )
    assert torch.equal(pixels[2], pixels[3]) and len(pixels) == 4
    encoder(temporal=1)._encode_clip(Clip(frames, (0, 1, 2), (0.0, 1.0, 2.0), 2, 2.0))
    assert told["frames"] == 3 and told["video_metadata"][0]["total_num_frames"] == 3
    assert media._as_tensor([1.5, 2]).dtype is torch.float32 and media._as_tensor([1]).dtype is torch.int64
    bare = SimpleNamespace(video_processor=SimpleNamespace())
    assert (encoder(bare).temporal_patch_size, encoder(bare).side_multiple, encoder(bare)._patch_size) == (1, 2, 2)
    assert (encoder().side_multiple, encoder()._patch_size) == (28, 14)


# ---- files


def test_the_cache_takes_what_fits_and_drops_the_oldest(tmp_path):
    frames = numpy.zeros((2, 3, 20, 20), numpy.uint8)
    clip = Clip(frames, (0, 1), (0.0, 1.0), 2, 2.0)
    size = frames.nbytes + 2 * 16 + 4096
    for bytes_, kept in ((size, 1), (size - 1, 0)):
        folder = tmp_path / str(bytes_)
        FrameCache(folder, bytes_ / GIB)._store(folder / "a.npz", clip)
        assert len(list(folder.glob("*.npz"))) == kept
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.npz").write_bytes(bytes(100))
        os.utime(folder / f"{number}.npz", (10 - number, 10 - number))
    for asked, left in ((100, 4), (101, 3), (200, 3), (201, 2), (500, 0)):
        FrameCache(folder, 500 / GIB)._make_space(asked)
        assert sorted(path.stem for path in folder.glob("*.npz")) == ["0", "1", "2", "3"][:left], asked
    (folder / "new.part").touch()
    (folder / "old.part").touch()
    for name, age in (("new.part", _ABANDONED - 60), ("old.part", _ABANDONED + 60)):
        moment = os.stat(folder / name).st_mtime - age
        os.utime(folder / name, (moment, moment))
    remove_abandoned(folder)
    assert [path.name for path in folder.iterdir()] == ["new.part"]


class Response:
    def __init__(self, sizes, missing=0):
        self.chunks, self.length = [bytes(size) for size in sizes], missing

    def read(self, most):
        return self.chunks.pop(0) if self.chunks else b""


def test_downloads_stay_within_their_size(tmp_path):
    written = []
    file = SimpleNamespace(write=lambda chunk: written.append(len(chunk)))
    downloads, url = Downloads(tmp_path, 1.5), "https://me:key@a.b/c.mp4?token=x"
    downloads._copy(Response([MIB, MIB // 2]), file, url)
    assert written == [MIB, MIB // 2]
    with pytest.raises(BadVideo, match=r"^https://a\.b/c\.mp4: larger than max_download_mib=1\.5$"):
        downloads._copy(Response([MIB, MIB // 2 + 1]), file, url)
    with pytest.raises(BadVideo, match=r"the connection ended after 1,048,576 bytes"):
        downloads._copy(Response([MIB], 1), file, url)
    assert display_url("https://a.b/" + "c" * 300) == "https://a.b/" + "c" * 188


def test_files_whose_packets_say_nothing():
    stream = SimpleNamespace(time_base=0.5)
    for stamps, rate, length in (
        ([0, 2, 4, 6], 3.0, (4, 4.0)),
        ([None, None], 4.0, (2, 0.5)),
        ([5, 5, None], 4.0, (3, 0.75)),
        ([], 4.0, (1, 0.25)),
        ([6, None, 2], 4.0, (3, 3.0)),
    ):
        packets = [SimpleNamespace(pts=stamp, size=1, is_discard=False) for stamp in stamps]
        packets += [
            SimpleNamespace(pts=99, size=0, is_discard=False),
            SimpleNamespace(pts=99, size=1, is_discard=True),
        ]
        container = SimpleNamespace(demux=lambda stream, packets=packets: packets)
        assert video_files.packet_length(container, stream, rate) == length
    assert isinstance(video_files.unreadable("a", MemoryError()), InputError)
    for error, bad in ((MemoryError(), False), (OSError(12, "no memory"), False), (OSError(2, "gone"), True)):
        assert isinstance(video_files.unreadable("a", error), BadVideo) is bad


def test_tags_of_a_kind_that_a_row_has_not():
    """LLaVA-Video's <image> stands for a video where the row has videos alone."""

    def asked(text, **listed):
        row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}], **listed}
        messages, found = conversation(row, "row 1")
        return [part["type"] for part in messages[0]["content"]], [(medium.kind, medium.source) for medium in found]

    assert asked("<image>b", videos=["v"]) == (["video", "text"], [("video", "v")])
    assert asked("b", videos=["v"], image="i") == (["video", "image", "text"], [("video", "v"), ("image", "i")])
    assert asked("<image>b", videos=["v"], images=["i"])[1] == [("video", "v"), ("image", "i")]
    assert asked("b<video>", video="v", images=["i", "j"])[0] == ["image", "image", "text", "video"]
    assert asked("<video>\n\nb<video>", videos=["v", "w"])[1] == [("video", "v"), ("video", "w")]
    for text, listed in (("<image><video>b", {"videos": ["v"]}), ("<image>b", {"videos": ["v"], "images": []})):
        if "<video>" in text:
            with pytest.raises(InputError, match="more <image> tags than images"):
                asked(text, **listed)
        else:
            assert asked(text, **listed)[1] == [("video", "v")]
    assert Medium("image", "i").sampling == Medium("video", "v").sampling


# ---- pixels and the demo


def test_frames_that_hardly_change_are_dropped():
    """VideoLLaMA3 keeps merged patches that differ by more than a tenth of a grey step, and one of each frame."""
    family = FAMILIES["video_llama_3"]
    settings = {**family.defaults, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    settings["size"] = {"shortest_edge": 1, "longest_edge": 10**7}
    frames = torch.full((4, 3, 28, 56), 100, dtype=torch.uint8)
    frames[2, :, :, 28:] = 101
    frames[3] = frames[2]
    found = prepare_frames(family, settings, frames)
    assert found["video_grid_thw"].tolist() == [[4, 2, 4]] and found["video_merge_sizes"].tolist() == [2]
    assert found["video_compression_mask"].tolist() == [True, True, True, False, False, True, True, False]
    for changes, frames_ in (({"use_token_compression": False}, frames), ({}, frames[:1])):
        assert prepare_frames(family, settings | changes, frames_)["video_compression_mask"].all()
    assert prepare_frames(family, settings, frames)["pixel_values_videos"].max() == pytest.approx(101 / 255)


def test_the_demo_s_clips_and_model(tmp_path, monkeypatch):
    written = {}

    def write(path, frames):
        written[path.name] = frames = numpy.stack(list(frames))
        assert frames.shape[1:] == (64, 64, 3) and len(frames) in (8, 13, 24, 40)

    monkeypatch.setattr(demo_model, "write_video", write)
    monkeypatch.setattr(demo_model, "_CLIPS", 30)
    demo_model._make_clips(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["videos"] for row in rows] == [[f"{number:03d}.mp4"] for number in range(30)] == [[n] for n in written]
    for row in rows:
        (asked, answered), frames = row["messages"], written[row["videos"][0]]
        assert asked == {"role": "user", "content": "<video>Which colours does the shape have?"}
        first, second = answered["content"].removeprefix("first ").split(" then ")
        half = len(frames) // 2
        for name, seen in ((first, frames[: half + len(frames) % 2]), (second, frames[-half:])):
            (colour,) = numpy.unique(seen[(seen != 20).any(-1)], axis=0)
            bounds = [numpy.clip(numpy.array(demo_model.COLOURS[name]) * share, 0, 255) for share in (0.8, 1.1)]
            assert (bounds[0] - 1 <= colour).all() and (colour <= bounds[1]).all() and first != second
    for shape, area in (("square", 20 * 20 * 4), ("disc", 20 * 20 * 3.14), ("bar", 20 * 20 * 2)):
        random = SimpleNamespace(uniform=lambda least, most: 1.0 if most > 1 else 0.3125)
        frames = [*demo_model.draw_frames(shape, "right", ("red", "blue"), 5, random)]
        seen = [(frame != 20).any(-1) for frame in frames]
        assert all(abs(one.sum() - area) < 0.1 * area for one in seen[1:-1]), shape
        middles = [numpy.argwhere(one).mean(0) for one in seen]
        assert all(abs(row - 32) < 1 for row, _ in middles) and abs(middles[2][1] - 32) < 1
        assert [round(middles[place + 1][1] - middles[place][1]) for place in (1, 2)] == [11, 11]
    tokenizer = SimpleNamespace(
        __len__=lambda self: 7, eos_token_id=1, pad_token_id=2, convert_tokens_to_ids=lambda token: 3 + len(token)
    )
    config = demo_model._config(
        type("Tokenizer", (), {**vars(tokenizer), "convert_tokens_to_ids": staticmethod(len)})()
    )
    text, vision = config.text_config, config.vision_config
    assert (text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers) == (7, 64, 128, 2)
    assert (text.num_attention_heads, text.num_key_value_heads, text.max_position_embeddings) == (4, 2, 4096)
    assert sum(text.rope_parameters["mrope_section"]) * 2 * text.num_attention_heads == text.hidden_size
    assert text.initializer_range == vision.initializer_range == config.initializer_range == 0.1
    assert (vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads) == (2, 32, 64, 2)
    assert (vision.out_hidden_size, vision.window_size, vision.fullatt_block_indexes) == (64, 56, [1])
