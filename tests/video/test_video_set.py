"""Twenty clips of every oddity in one data set, in the rows of three tools: which frames are taken, and training."""

import json
import math

import numpy
import pytest
import video_models
import videos
from conftest import flags
from PIL import Image
from test_clips import CODECS
from test_frame_sampling import qwen_indices
from transformers import AutoConfig

from hf_memopt.video.clips import read_clip
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.frame_limits import FrameLimits
from hf_memopt.video.media import Limits
from hf_memopt.video.processor import load_processor

pytestmark = pytest.mark.slow
RATE, FPS, MOST = 10, 2.0, 8
SIDE = 56  # pixels
CUT = {"options": {"g": "5"}, "container": {"movflags": "frag_keyframe+empty_moov"}}


def numbered(frames: int, height: int = SIDE, width: int = SIDE):
    return videos.numbered(frames, height, width)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty files, a list of frames and a folder of frames; a tiny model."""
    folder = tmp_path_factory.mktemp("set")
    for name, settings in CODECS.items():
        videos.write(folder / name, numbered(37), rate=RATE, **settings)
    videos.write(folder / "one_frame.mp4", numbered(1))
    videos.write(folder / "few_frames.mkv", numbered(3))
    videos.write(folder / "long.mp4", numbered(300), rate=5)
    videos.write(folder / "odd_sides.mp4", numbered(20, 63, 91), pixels="yuv444p")
    videos.write(folder / "rotated.mp4", numbered(20, SIDE, 2 * SIDE), rotation=90)
    times = [index * 33 for index in range(30)] + [1000 + index * 500 for index in range(10)]
    videos.write(folder / "variable_rate.mp4", numbered(40), milliseconds=times)
    whole = videos.write(folder / "cut_off.mp4", numbered(60), **CUT).read_bytes()
    (folder / "cut_off.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    torn = bytearray(videos.write(folder / "torn.mp4", numbered(100), options={"g": "10"}).read_bytes())
    torn[len(torn) // 2 : len(torn) // 2 + 100] = bytes(range(100))
    (folder / "torn.mp4").write_bytes(torn)
    (folder / "frames").mkdir()
    for number, frame in enumerate(numbered(6)):
        Image.fromarray(frame).save(folder / "frames" / f"{number}.png")
    video_models.make("qwen2_5_vl", folder / "model")
    return folder


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def llama_factory(total: int, seconds: float) -> int:
    """Frames that LLaMA-Factory's `_get_video_sample_indices` takes, with video_fps and video_maxlen."""
    return min(total, MOST, max(1, math.floor(seconds * FPS)))


def llava_video(total: int, rate: float, most: int) -> list[int] | None:
    """Frames of LLaVA-NeXT's `process_video_with_pyav`, with video_fps and frames_upbound.

    None within the bound, where it takes every n-th frame from the first, and leaves out the clip's end.
    """
    if len(range(0, total, round(rate / FPS))) <= most:
        return None
    return numpy.linspace(0, total - 1, most, dtype=int).tolist()


def test_each_file_gives_the_frames_of_each_tool(folder):
    names = files(folder)
    assert len(names) == 20
    for name in names:
        clip = read_clip(folder / name, FrameLimits(MOST, FPS, multiple_of=2))
        total, rate = clip.total, clip.total / clip.duration
        # An odd number loses a frame here, and LLaMA-Factory repeats the last one; fewer than 4 are 4, as in Qwen's.
        wanted = max(min(total, 4), llama_factory(total, clip.duration))
        assert len(clip.indices) == (wanted if wanted < 2 else wanted // 2 * 2), name
        if total < 4 or name == "variable_rate.mp4":  # qwen-vl-utils ends with an error, or counts frames, not time
            continue
        assert list(clip.indices) == qwen_indices(total, rate, {"fps": FPS, "max_frames": MOST}), name
        if theirs := llava_video(total, rate, 4):
            ours = read_clip(folder / name, FrameLimits(4, FPS)).indices
            assert len(ours) == len(theirs) == 4, name
            assert max(abs(one - its) for one, its in zip(ours, theirs, strict=True)) <= 1, (
                name
            )  # theirs are truncated


ANSWER = "first red then blue"


def llama_factory_row(name):
    say = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": ANSWER}]
    return {"messages": say, "videos": [name]}


def llava_video_row(name):
    say = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": ANSWER}]
    return {"conversations": say, "video": name}


def qwen_row(name):
    clip = {"type": "video", "video": name, "fps": 1.0, "max_frames": 6, "max_pixels": SIDE * SIDE}
    parts = [clip, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": ANSWER}]}


STYLES = {"llama_factory": llama_factory_row, "llava_video": llava_video_row, "qwen_vl_utils": qwen_row}


@pytest.mark.parametrize("style", STYLES)
def test_the_recipe_trains_on_the_set(style, folder, recipe, tmp_path):
    rows = [STYLES[style](name) for name in files(folder)]
    if style == "llama_factory":
        frames = [f"frames/{number}.png" for number in range(6)]
        rows += [STYLES[style](frames), STYLES[style]("frames"), STYLES[style](f"file://{folder}/a.mkv")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encode = Encoder(
        load_processor(str(folder / "model"), AutoConfig.from_pretrained(folder / "model")), Limits(MOST, FPS), folder
    )
    for row in rows:
        sample = encode(row)
        (grid,) = sample["video_grid_thw"].tolist()
        assert 1 <= grid[0] <= (3 if style == "qwen_vl_utils" else MOST // 2), row
        assert len(sample["pixel_values_videos"]) == math.prod(grid), row
    arguments = [
        *("--preset", "cpu", "--model_name_or_path", str(folder / "model"), "--dataset_name", str(data)),
        *(*flags(media_folder=folder, output_dir=tmp_path / "out", held_out=0, num_train_epochs=1),),
        *("--per_device_train_batch_size", "2", "--effective_batch_size", "4", "--max_frames", str(MOST)),
        *("--max_pixels_per_frame", "none", "--save_strategy", "no"),
    ]
    trainer = recipe("video_sft")(arguments)
    assert trainer.state.global_step == math.ceil(len(rows) / 4)
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["bad_videos"] == []
    assert abs(report["relative_error"]["peak_allocated_bytes"]) < 0.03, "of the batch that was measured"
