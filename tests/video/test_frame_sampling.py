"""Frames a second, bounds and segments: the frames that qwen-vl-utils takes, by its rules written down here anew."""

import copy
import math
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import numpy
import pytest
import videos

from hf_memopt.video import video_files
from hf_memopt.video.clips import outline_clip, read_clip
from hf_memopt.video.frame_limits import FrameLimits, Sampling
from hf_memopt.video.processor import lower_shortest_edge
from hf_memopt.video.video_files import BadVideo

FILES = {"five.mp4": (125, 25), "short.mkv": (7, 10), "ntsc.mp4": (240, Fraction(30000, 1001)), "long.mp4": (600, 5)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for name, (frames, rate) in FILES.items():
        videos.write(folder / name, videos.numbered(frames, 16, 16), rate=rate)
    return folder


def qwen_indices(frames: int, rate: float, asked: dict, factor: int = 2) -> list[int]:
    """What `calculate_video_frame_range`, `smart_nframes` and the readers of qwen-vl-utils 0.0.14 do."""
    lasts = frames / rate
    first = math.ceil(max(0, min(asked.get("video_start", 0), lasts)) * rate)
    last = min(math.floor(max(0, min(asked.get("video_end", lasts), lasts)) * rate), frames - 1)
    total = last - first + 1
    if "nframes" in asked:
        count = round(asked["nframes"] / factor) * factor
    else:
        least = math.ceil(asked.get("min_frames", 4) / factor) * factor
        most = math.floor(asked.get("max_frames", min(768, total)) / factor) * factor
        count = min(max(total / rate * asked.get("fps", 2.0), least), most, total)
        count = math.floor(count / factor) * factor
    assert factor <= count <= total
    return [round(first + (last - first) * Fraction(step, count - 1)) for step in range(count)]


@pytest.mark.drawn(12)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"fps": 1.0},
        {"fps": 0.3, "min_frames": 5},
        {"fps": 8, "max_frames": 5},
        {"nframes": 5},
        {"nframes": 6},
        {"video_start": 0.15},
        {"video_end": 0.45},
        {"video_start": 0.1, "video_end": 0.55, "fps": 10.0},
        {"video_end": 1000.0, "max_frames": 16},
    ],
    ids=str,
)
def test_the_frames_are_those_of_qwen_vl_utils(name, asked, files):
    frames, rate = FILES[name]
    clip = read_clip(files / name, FrameLimits(768, 2.0, multiple_of=2, sampling=Sampling(**asked)))
    wanted = qwen_indices(frames, float(rate), asked)
    assert list(clip.indices) == wanted
    assert len(clip.frames) == len(wanted)
    numpy.testing.assert_allclose(clip.timestamps, [index / float(rate) for index in wanted], atol=2e-3)
    segment = asked.keys() & {"video_start", "video_end"}
    assert clip.total == frames if not segment else clip.total <= frames
    assert clip.rate == pytest.approx(float(rate), rel=0.02)  # Matroska rounds to milliseconds


def test_five_seconds_are_ten_frames_and_the_runs_limit_holds(files):
    assert len(read_clip(files / "five.mp4", FrameLimits(100, 2.0, 2)).frames) == 10
    assert len(read_clip(files / "five.mp4", FrameLimits(100, None, 2)).frames) == 100
    for asked in ({"nframes": 50}, {"fps": 25.0}, {"max_frames": 60, "fps": 20}, {"min_frames": 40}):
        limits = FrameLimits(7, 2.0, 2, sampling=Sampling(**asked))
        assert len(read_clip(files / "five.mp4", limits).frames) == 6, asked
    more_than_there_are = FrameLimits(100, 2.0, 2, sampling=Sampling(nframes=50))
    assert len(read_clip(files / "short.mkv", more_than_there_are).frames) == 6, "not an error, as in qwen-vl-utils"


def test_frames_are_dropped_evenly_without_decoding_again(files):
    clip = read_clip(files / "long.mp4", FrameLimits(21, None))
    assert clip.thinned(None, 2) is clip and clip.thinned(21, 2) is clip
    few = clip.thinned(7, 2)
    assert few.indices == tuple(clip.indices[position] for position in (0, 4, 8, 12, 16, 20))
    assert few.timestamps == tuple(clip.timestamps[position] for position in (0, 4, 8, 12, 16, 20))
    assert numpy.array_equal(few.frames, clip.frames[::4]) and few.rate == clip.rate
    assert few.thinned(1, 2).indices == (0,)


def test_a_segment_of_a_variable_rate_is_one_in_time(tmp_path):
    times = [index * 33 for index in range(30)] + [1000 + index * 500 for index in range(10)]
    path = videos.write(tmp_path / "v.mp4", videos.numbered(40), milliseconds=times)
    clip = read_clip(path, FrameLimits(None, sampling=Sampling(video_start=1.4, video_end=3.2)))
    assert clip.indices == (31, 32, 33, 34) and clip.timestamps == pytest.approx((1.5, 2.0, 2.5, 3.0))
    assert clip.duration == pytest.approx(2.0) and clip.rate == pytest.approx(2.0)


def test_a_segment_without_frames_is_a_bad_video(files):
    with pytest.raises(BadVideo, match=r"five.mp4: no frame between video_start=7.*lasts 5.00 s"):
        read_clip(files / "five.mp4", FrameLimits(sampling=Sampling(video_start=7)))


def test_a_segment_of_a_file_known_by_index_alone(tmp_path):
    """A raw stream has no timestamps: its frames are counted while it is decoded."""
    path = videos.write(tmp_path / "f.h264", videos.numbered(50), format="h264", rate=25)
    clip = read_clip(path, FrameLimits(4, sampling=Sampling(video_start=1.0)))
    assert clip.indices == (25, 33, 41, 49)
    shades = [frame.mean() for frame in clip.frames]
    whole = read_clip(path, FrameLimits(None))
    assert shades == [whole.frames[index].mean() for index in clip.indices]


# ---- sizes


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"max_pixels": 50176}, (168, 280)),  # 16:9 within 224 × 224, in multiples of 28
        ({"min_pixels": 602112, "max_pixels": 802816}, (588, 1036)),
        ({"total_pixels": 4 * 50176 / 2}, (168, 280)),  # 4 frames are 2 steps in time
        ({"max_pixels": 10**9}, (360, 640)),
    ],
    ids=str,
)
def test_sizes_are_those_of_qwen_vl_utils(asked, size, tmp_path):
    path = videos.write(tmp_path / "l.mp4", videos.numbered(4, 360, 640))
    limits = FrameLimits(4, multiple_of=2, side_multiple=28, sampling=Sampling(**asked))
    assert read_clip(path, limits).frames.shape[2:] == size
    assert outline_clip(path, limits).pixels == pytest.approx(4 * size[0] * size[1], rel=0.1)
    bounded = FrameLimits(4, multiple_of=2, max_pixels=20_000, side_multiple=28, sampling=Sampling(**asked))
    height, width = read_clip(path, bounded).frames.shape[2:]
    assert height * width <= 20_000, "the run's own limit holds"


@pytest.mark.parametrize(
    ("stamps", "frames", "seconds"),
    [
        ((0, 10, 20), 3, 3.0),
        ((30, 10, 20), 3, 3.0),
        ((None, 0, 10), 3, 1.5),  # a packet without a time has a frame, too
        ((5, 5), 2, 2 / 25),
        ((None,), 1, 1 / 25),
        ((), 1, 1 / 25),
    ],
)
def test_the_length_of_packets(stamps, frames, seconds, monkeypatch):
    """In tenths of a second; of 25 frames a second where no two times differ."""
    packets = [SimpleNamespace(pts=stamp) for stamp in stamps]
    monkeypatch.setattr(video_files, "read_packets", lambda container, stream: packets)
    assert video_files.packet_length(None, SimpleNamespace(time_base=0.1), 25.0) == (frames, pytest.approx(seconds))


@pytest.fixture
def opened(monkeypatch):
    """A file of these packets and decoded frames, in tenths of a second, with 25 frames a second."""

    def make(packets=(), times=()):
        frames = [SimpleNamespace(time=time) for time in times]
        rows = [SimpleNamespace(pts=pts, duration=duration, is_keyframe=key) for pts, duration, key in packets]
        stream = SimpleNamespace(time_base=0.1, average_rate=25)
        monkeypatch.setattr(video_files, "open_video", lambda source: nullcontext())
        monkeypatch.setattr(video_files, "video_stream", lambda container, source: stream)
        monkeypatch.setattr(video_files, "read_packets", lambda container, stream: rows)
        monkeypatch.setattr(video_files, "decode_frames", lambda container, stream: frames)

    return make


@pytest.mark.parametrize(
    ("packets", "seconds", "keys", "last"),
    [
        ([(20, 5, True), (50, 5, False), (40, 5, True)], [0, 2, 3], [20, 40], 1.0),  # in the order of decoding
        ([(7, 5, True)], [0], [7], 0.5),
        ([(7, None, True)], [0], [7], 0.04),
        ([(7, None, True), (None, None, False)], None, None, None),
        ([(7, 5, True), (7, 5, False)], None, None, None),
        ([], None, None, None),
    ],
)
def test_times_of_packets(packets, seconds, keys, last, opened):
    opened(packets)
    times = video_files.packet_times("a.mp4")
    if seconds is None:
        assert times is None
        return
    assert times.seconds == pytest.approx(seconds) and times.last_duration == pytest.approx(last)
    assert (times.stamps, times.keys) == (sorted(pts for pts, *_ in packets), keys)


@pytest.mark.parametrize(
    ("times", "seconds", "last"),
    [
        ([0.5, 1.0, 2.5], [0, 0.5, 2], 1.5),
        ([0.5, None, 2.5], [0, 0.04, 0.08], 0.04),
        ([0.5, 0.5, 2.5], [0, 0.04, 0.08], 0.04),
        ([7.0], [0], 0.04),
    ],
)
def test_times_of_decoded_frames(times, seconds, last, opened):
    opened(times=times)
    found = video_files.decoded_times("a.mp4")
    assert found.seconds == pytest.approx(seconds) and found.last_duration == pytest.approx(last)
    assert (found.stamps, found.keys) == (None, [])


def test_small_frames_are_scaled_up_to_a_quarter_of_the_limit_at_most():
    """Of processors that scale to a number of pixels; others, and no limit, stay."""
    patches = {"patch_size": 14, "size": {"shortest_edge": 4096, "longest_edge": 10**6}}
    for settings, limit, edge in (
        (patches, 8000, 2000),
        (patches, 20_000, 4096),
        (patches, None, 4096),
        (patches | {"patch_size": None}, 8000, 4096),
        ({**patches, "size": {"shortest_edge": 4096}}, 8000, 4096),
        ({**patches, "size": {"shortest_edge": 0, "longest_edge": 1}}, 8000, 0),
        ({**patches, "size": {"height": 8}}, 8000, None),
    ):
        made = [SimpleNamespace(**copy.deepcopy(settings)) for _ in range(2)]
        lower_shortest_edge(SimpleNamespace(video_processor=made[0], image_processor=made[1]), limit)
        assert [part.size.get("shortest_edge") for part in made] == [edge, edge], (settings, limit)
