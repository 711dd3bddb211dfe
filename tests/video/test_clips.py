"""Frames of files: how many, which, how large, and what happens to files that are no good."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy
import pytest
import videos
from conftest import slow

from hf_memopt.errors import InputError
from hf_memopt.video.clips import _decode, outline_clip, packet_times, read_clip
from hf_memopt.video.frame_limits import FrameLimits, capped_size
from hf_memopt.video.video_files import BadVideo

CODECS = {
    "a.mkv": {},
    "b.webm": {"codec": "libvpx-vp9"},
    "c.avi": {"codec": "mpeg4"},
    "d.gif": {"codec": "gif", "pixels": "rgb8"},
    "e.ts": {"format": "mpegts"},
    "f.h264": {"format": "h264"},
    "g.mov": {"codec": "prores_ks", "pixels": "yuv422p10le"},
    "h.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "i.mp4": {"codec": "libsvtav1"},
    "j.mp4": {"options": {"bf": "3", "g": "12"}},
    "k.mp4": {"options": {"g": "5"}, "container": {"movflags": "frag_keyframe+empty_moov"}},
    "wrong.txt": {"format": "mp4"},
}


def brightness(clip) -> list[int]:
    return [int(frame.mean()) for frame in clip.frames]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CODECS)
def test_every_container_and_codec(name, tmp_path):
    """The frames are those that decoding all of the file gives, the first and the last among them."""
    path = videos.write(tmp_path / name, videos.numbered(37), **CODECS[name])
    clip = read_clip(path, FrameLimits(10))
    assert clip.total == 37
    assert clip.indices == tuple(numpy.linspace(0, 36, 10).round().astype(int))
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert all(
        (kept == frames[index].transpose(2, 0, 1)).all() for kept, index in zip(clip.frames, clip.indices, strict=True)
    )


def test_a_time_without_its_frame_is_noticed(tmp_path):
    path = videos.write(tmp_path / "a.mp4", videos.numbered(9), options={"g": "3"})
    times = packet_times(path)
    assert _decode(path, times, FrameLimits(4)).indices == (0, 3, 5, 8)
    assert _decode(path, replace(times, stamps=[stamp - 1 for stamp in times.stamps]), FrameLimits(4)) is None
    assert _decode(path, replace(times, stamps=[stamp + 10**6 for stamp in times.stamps]), FrameLimits(4)) is None


@pytest.mark.drawn(10)
@pytest.mark.parametrize("frames", [1, 5, 150, 491])
@pytest.mark.parametrize("max_frames", [1, 2, 7, 16, 50, None])
def test_how_many(frames, max_frames, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"{frames}.mp4"
    if not path.exists():
        videos.write(path, videos.numbered(frames, 16, 16), rate=25)
    for multiple in (1, 2):
        clip = read_clip(path, FrameLimits(max_frames, multiple_of=multiple))
        wanted = min(frames, max_frames or frames)
        wanted -= wanted % multiple if wanted >= multiple else 0
        assert len(clip.frames) == len(clip.indices) == wanted
        assert clip.total == frames and clip.rate == pytest.approx(25, rel=0.05)
        assert list(clip.indices) == sorted(set(clip.indices))
        if wanted > 1:
            assert clip.indices[0] == 0 and clip.indices[-1] == frames - 1


def test_a_variable_rate_is_sampled_in_time(tmp_path):
    """30 frames in the first second, then 10 over five seconds: half of the clip must not be its first second."""
    times = [index * 33 for index in range(30)] + [1000 + index * 500 for index in range(10)]
    clip = read_clip(videos.write(tmp_path / "v.mp4", videos.numbered(40), milliseconds=times), FrameLimits(8))
    assert len(clip.indices) == 8 and clip.indices[0] == 0 and clip.indices[-1] == 39
    assert sum(index < 30 for index in clip.indices) <= 3
    gaps = numpy.diff(clip.timestamps)
    assert gaps.max() < 1.5


def test_rotated_clips_stand_upright(tmp_path):
    frame = numpy.zeros((48, 64, 3), numpy.uint8)
    frame[:, :32] = 255  # bright on the left
    clip = read_clip(videos.write(tmp_path / "r.mp4", [frame] * 4, rotation=90), FrameLimits())
    assert clip.frames.shape == (4, 3, 64, 48)
    top, bottom = clip.frames[:, :, :32].mean(), clip.frames[:, :, 32:].mean()
    assert bottom > top + 100  # counterclockwise: what was left is below


def test_large_frames_are_scaled_to_the_cap(tmp_path):
    path = videos.write(tmp_path / "l.mp4", videos.numbered(4, 360, 640))
    assert read_clip(path, FrameLimits(max_pixels=50176, side_multiple=28)).frames.shape[2:] == (168, 280)
    assert read_clip(path, FrameLimits(max_pixels=10**6)).frames.shape[2:] == (360, 640)
    for height, width in ((224, 224), (239, 250), (1080, 1920), (30, 3000), (5, 7)):
        for multiple in (2, 28, 32):
            high, wide = capped_size(height, width, 60_000, multiple)
            rounded = round(high / multiple) * multiple * round(wide / multiple) * multiple
            assert max(high * wide, rounded) <= 60_000


def test_damaged_files_give_what_decodes(tmp_path):
    whole = videos.write(
        tmp_path / "whole.mp4",
        videos.numbered(60),
        options={"g": "5"},
        container={"movflags": "frag_keyframe+empty_moov"},
    ).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    clip = read_clip(tmp_path / "cut.mp4", FrameLimits(8))
    assert len(clip.frames) == 8 and 20 < clip.total < 60
    shades = brightness(clip)
    assert shades == sorted(shades)
    plain = videos.write(tmp_path / "plain.mp4", videos.numbered(200), options={"g": "10"})
    torn = bytearray(plain.read_bytes())
    middle = len(torn) // 2
    torn[middle : middle + 400] = bytes(range(200)) * 2
    (tmp_path / "torn.mp4").write_bytes(torn)
    assert len(read_clip(tmp_path / "torn.mp4", FrameLimits(8)).frames) == 8


@pytest.mark.parametrize("kind", ["empty.mp4", "text.mp4", "half.mp4", "sound.m4a", "gone.mp4", "folder.mp4"])
def test_what_is_no_video_is_named(kind, tmp_path):
    path = tmp_path / kind
    if kind == "empty.mp4":
        path.touch()
    elif kind == "text.mp4":
        path.write_text("not a video")
    elif kind == "half.mp4":  # its index is at the end, which is cut off
        whole = videos.write(tmp_path / "w.mp4", videos.numbered(60)).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "sound.m4a":
        videos.audio(path)
    elif kind == "folder.mp4":
        path.mkdir()
    for reads in (read_clip, outline_clip):
        with pytest.raises(BadVideo, match=kind) as caught:
            reads(path, FrameLimits())
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_no_more_frames_than_chosen_are_held(tmp_path):
    """A clip of 1.0 GB of pixels, of which 8 frames are asked for: the process grows by a small part of that."""
    path = videos.write(
        tmp_path / "long.mp4", videos.numbered(1500, 360, 640), options={"preset": "ultrafast", "g": "50"}
    )
    script = (
        "import sys, av, numpy\n"
        "from hf_memopt.video.clips import read_clip\n"
        "from hf_memopt.video.frame_limits import FrameLimits\n"
        "def high():\n"
        "    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "before = high()\n"
        "clip = read_clip(sys.argv[1], FrameLimits(8))\n"
        "print(len(clip.frames), (high() - before) // 1024)"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux, which says how much a process held at most")
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    frames, grown = map(int, done.stdout.split())
    assert frames == 8
    assert grown < 120  # MiB; decoders keep a few frames per thread


def test_glance_knows_the_size_without_decoding(tmp_path):
    path = videos.write(tmp_path / "g.mp4", videos.numbered(50, 48, 64))
    assert outline_clip(path, FrameLimits(10)).pixels == 10 * 48 * 64
    assert outline_clip(path, FrameLimits(None, max_pixels=1000)).pixels == 50 * 26 * 36  # as read_clip() scales them
    assert outline_clip(path, FrameLimits(100, fps=2.0)).pixels == 10 * 48 * 64


class Pipe:
    """What cannot be sought in, so that a container's header lacks the duration."""

    def __init__(self, path: Path):
        self.file = path.open("wb")

    def write(self, data) -> int:
        return self.file.write(data)


def unknown_duration(path: Path, codec: str) -> Path:
    pipe = Pipe(path)
    with av.open(pipe, "w", format="webm") as container:
        stream = container.add_stream(codec, rate=10)
        for index, frame in enumerate(videos.numbered(74, 48, 64)):
            if index == 0:
                stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    pipe.file.close()
    return path


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_glance_counts_where_the_header_does_not_say(codec, tmp_path):
    path = unknown_duration(tmp_path / "live.webm", codec)
    with av.open(str(path)) as container:
        assert container.duration is None and not container.streams.video[0].frames
    assert outline_clip(path, FrameLimits(None)).pixels == 74 * 48 * 64
    assert outline_clip(path, FrameLimits(100, fps=2.0)).pixels == pytest.approx(14 * 48 * 64, abs=48 * 64)
    assert read_clip(path, FrameLimits(None)).total == 74


def test_glance_counts_raw_streams(tmp_path):
    path = videos.write(tmp_path / "raw.h264", videos.numbered(50), format="h264")
    assert outline_clip(path, FrameLimits(None)).pixels == 50 * 48 * 64


@pytest.mark.slow
def test_frames_beyond_host_memory_are_refused_before_decoding(tmp_path, monkeypatch):
    """Available memory alone is made small here."""
    import psutil

    path = videos.write(tmp_path / "long.mp4", videos.numbered(300, 360, 640), options={"preset": "ultrafast"})
    available = psutil.virtual_memory()._replace(available=200 * 2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with pytest.raises(
        InputError, match=r"long\.mp4: 300 frames of 640 × 360 .*198 MiB.*--max_frames 1\d\d"
    ) as caught:
        read_clip(path, FrameLimits(None))
    assert not isinstance(caught.value, BadVideo) and len(str(caught.value).splitlines()) == 1
    fitting = int(str(caught.value).split("--max_frames ")[1].split()[0].strip(","))
    assert len(read_clip(path, FrameLimits(fitting)).frames) == fitting
    assert len(read_clip(path, FrameLimits(None, max_pixels=10_000)).frames) == 300


@pytest.mark.parametrize("limit_mib", [slow(700), slow(300)])
def test_running_out_of_memory_is_no_bad_video(limit_mib, tmp_path):
    """A real ENOMEM: the address space of the process ends while frames are decoded."""
    path = videos.write(tmp_path / "long.mp4", videos.numbered(600, 720, 1280), options={"preset": "ultrafast"})
    script = (
        "import resource, sys, av, numpy, psutil\n"
        "from hf_memopt.video.clips import read_clip\n"
        "from hf_memopt.video.frame_limits import FrameLimits\n"
        "from hf_memopt.video.video_files import BadVideo\n"
        "from hf_memopt.errors import InputError\n"
        "import av.video.reformatter\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limit = held + int(sys.argv[2]) * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n"
        "    read_clip(sys.argv[1], FrameLimits(int(sys.argv[3])))\n"
        "except BadVideo as error:\n"
        "    print('bad', error)\n"
        "except InputError as error:\n"
        "    print('refused', error)"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux, which limits address space")
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(limit_mib), "400"], capture_output=True, text=True
    )
    assert done.stdout.startswith("refused") and "memory" in done.stdout, done.stdout + done.stderr
