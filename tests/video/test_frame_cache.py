"""Decoded frames on disk: read again as they were, never those of another file or setting, within a size."""

import os
from pathlib import Path

import numpy
import pytest
import videos

from hf_memopt.errors import InputError
from hf_memopt.video import frame_cache
from hf_memopt.video.clips import read_clip
from hf_memopt.video.frame_cache import FrameCache
from hf_memopt.video.frame_limits import FrameLimits, Sampling
from hf_memopt.video.video_files import BadVideo

LIMITS = FrameLimits(4, 2.0, 2)


@pytest.fixture
def clip(tmp_path):
    return videos.write(tmp_path / "a.mp4", videos.numbered(20))


@pytest.fixture
def decoded(monkeypatch):
    """The files that were decoded."""
    files = []

    def counted(source, limits):
        files.append(source.name)
        return read_clip(source, limits)

    monkeypatch.setattr(frame_cache, "read_clip", counted)
    return files


def same(one, other) -> bool:
    return numpy.array_equal(one.frames, other.frames) and all(
        getattr(one, name) == getattr(other, name) for name in ("indices", "timestamps", "total", "duration")
    )


def test_a_clip_is_decoded_once(clip, decoded, tmp_path):
    cache = FrameCache(tmp_path / "cache", 1)
    first, again = cache.read(clip, LIMITS), FrameCache(tmp_path / "cache", 1).read(clip, LIMITS)
    assert same(first, again) and same(first, read_clip(clip, LIMITS)) and decoded == ["a.mp4"]


def test_another_setting_or_file_is_decoded(clip, decoded, tmp_path):
    cache = FrameCache(tmp_path / "cache", 1)
    cache.read(clip, LIMITS)
    for limits in (FrameLimits(2, 2.0, 2), FrameLimits(4, 2.0, 2, sampling=Sampling(video_start=1.0))):
        assert same(cache.read(clip, limits), read_clip(clip, limits))
    videos.write(clip, reversed([*videos.numbered(20)]))
    os.utime(clip, (1, 1))
    assert same(cache.read(clip, LIMITS), read_clip(clip, LIMITS))
    assert decoded == ["a.mp4"] * 4


def test_a_file_that_breaks_off_is_decoded_again(clip, decoded, tmp_path):
    cache = FrameCache(tmp_path / "cache", 1)
    wanted = cache.read(clip, LIMITS)
    (stored,) = (tmp_path / "cache").iterdir()
    stored.write_bytes(stored.read_bytes()[:500])
    assert same(cache.read(clip, LIMITS), wanted) and same(cache.read(clip, LIMITS), wanted)
    assert decoded == ["a.mp4"] * 2


def test_what_would_run_code_is_decoded_again(clip, decoded, tmp_path):
    cache = FrameCache(tmp_path / "cache", 1)
    wanted = cache.read(clip, LIMITS)
    (stored,) = (tmp_path / "cache").iterdir()
    with numpy.load(stored) as arrays:
        parts = dict(arrays)
    with stored.open("wb") as file:
        numpy.savez(file, **{**parts, "frames": numpy.array([Writes(tmp_path / "ran")], dtype=object)})
    assert same(cache.read(clip, LIMITS), wanted) and decoded == ["a.mp4"] * 2
    assert not (tmp_path / "ran").exists()


class Writes:
    """Pickled, it is a call that writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_least_recently_used_give_way(clip, decoded, tmp_path):
    names = ("a.mp4", "b.mp4", "c.mp4")
    for name in names[1:]:
        (tmp_path / name).write_bytes(clip.read_bytes())
    size = read_clip(clip, LIMITS).frames.nbytes
    cache = FrameCache(tmp_path / "cache", 2.5 * size / 2**30)
    for name in ("a.mp4", "b.mp4", "a.mp4", "c.mp4", "a.mp4", "b.mp4"):
        cache.read(tmp_path / name, LIMITS)
        assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= cache.max_gib * 2**30
    assert decoded == ["a.mp4", "b.mp4", "c.mp4", "b.mp4"]
    small = FrameCache(tmp_path / "none", size / 2**31)
    assert same(small.read(clip, LIMITS), read_clip(clip, LIMITS)) and not [*(tmp_path / "none").iterdir()]


def test_without_disk_space_videos_are_decoded(clip, decoded, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frame_cache, "_write", full)
    assert same(FrameCache(tmp_path / "cache", 1).read(clip, LIMITS), read_clip(clip, LIMITS))
    assert "No space left on device" in caplog.text


def test_bad_files_and_sizes_are_refused(tmp_path):
    (tmp_path / "bad.mp4").write_text("no video")
    with pytest.raises(BadVideo, match=r"bad\.mp4"):
        FrameCache(tmp_path / "cache", 1).read(tmp_path / "bad.mp4", LIMITS)
    with pytest.raises(InputError, match="frame_cache_gib=0 must be above 0"):
        FrameCache(tmp_path, 0)


def test_what_killed_processes_left_is_removed(clip, tmp_path):
    """Hours later: what another process writes at this time stays."""
    cache = FrameCache(tmp_path / "cache", 1)
    cache.folder.mkdir()
    abandoned, under_way = cache.folder / "a.part", cache.folder / "b.part"
    for path in (abandoned, under_way):
        path.write_bytes(bytes(100))
    os.utime(abandoned, (1, 1))
    cache.read(clip, LIMITS)
    assert not abandoned.exists() and under_way.exists()
