"""Frames become the same pixels as in transformers' video processors, which need torchvision."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import videos
from conftest import ROOT, run

from hf_memopt.estimator import architectures
from hf_memopt.video import processor
from hf_memopt.video.inputs import VideoInputs
from hf_memopt.video.pixels import FAMILIES
from hf_memopt.video.processor import read_video_settings

TORCHVISION = Path(sys.prefix) / "torchvision"  # apart: a build that does not fit torch breaks transformers


@pytest.mark.slow
def test_pixels_and_samples_equal_transformers_own(tmp_path):
    if not TORCHVISION.is_dir():
        pytest.skip("`make test` installs torchvision there")
    for frames in (5, 30):
        videos.write(tmp_path / f"{frames}.mp4", videos.numbered(frames, 60, 80))
    path = f"{TORCHVISION}:{ROOT}:{ROOT / 'tests'}"
    done = run(sys.executable, ROOT / "tests" / "video_parity.py", tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["192", "6", str(len(list(processor._FOLDER.iterdir())))]


def test_nothing_here_has_torchvision():
    """The other tests run where it cannot be imported."""
    import importlib.util

    assert importlib.util.find_spec("torchvision") is None


# ---- bundled models


def test_every_bundled_video_model_has_its_checkpoints_settings():
    configs = {path.stem: json.loads(path.read_text()) for path in architectures._FOLDER.glob("*.json")}
    names = {name for name, config in configs.items() if config["model_type"] in FAMILIES}
    assert {path.stem for path in processor._FOLDER.iterdir()} == names
    for name in sorted(names):
        settings = read_video_settings(name)
        repository, _, file = settings["source"].rpartition("/blob/main/")
        assert configs[name]["source"] == f"{repository}/blob/main/config.json"
        assert file in ("preprocessor_config.json", "video_preprocessor_config.json")
        assert read_video_settings(architectures.hub_id(name)) == settings, "the hub cannot be reached here"


def test_a_1080p_frame_is_not_shrunk_below_what_the_checkpoint_takes():
    """Qwen2.5-VL takes 1932 × 1092; transformers' class defaults shrink it to 720 tokens per two frames."""
    config, settings = architectures.load_config("qwen2.5-vl-7b"), read_video_settings("qwen2.5-vl-7b")
    clip = VideoInputs(64, 1080, 1920, settings=settings).clip(config)
    assert (clip.steps, clip.step_tokens) == (32, (1932 // 28) * (1092 // 28)) == (32, 2691)
    small = VideoInputs(64, 224, 224, settings=settings).clip(config)
    assert small.step_tokens == (224 // 28) ** 2, "nor a small one enlarged"


@pytest.mark.parametrize(
    ("kind", "video_id", "place", "step", "tokens"),
    [
        ("qwen2_vl", 8, 8, 132, 267),
        ("llava_onevision", None, 7, 4, 16),
        ("internvl", None, 7, 3, 33),
        ("smolvlm", 8, 7, 4, 51),  # frames are images
    ],
)
def test_the_tokens_of_a_clip(kind, video_id, place, step, tokens):
    vision = SimpleNamespace(image_size=112, patch_size=28)
    config = SimpleNamespace(model_type=kind, image_token_id=7, video_token_id=video_id, vision_config=vision)
    config.image_seq_length, config.scale_factor = 3, 2
    video = VideoInputs(frames=3, height=56, width=60, prompt_tokens=2, answer_tokens=1)
    clip, ids = video.clip(config), video.batch(config, 1)["input_ids"][0]
    assert (clip.step_tokens, video.seq_len(config), video.place(config)) == (step, tokens, (place, 2))
    assert (ids == place).sum() == clip.steps * step + clip.closing_tokens


def test_half_the_frames_of_a_clip_that_is_made_up():
    assert [VideoInputs(frames=count).halved() for count in (1, 2, 3)] == [None, *[VideoInputs(frames=1)] * 2]
    assert VideoInputs(sample={}).halved() is VideoInputs(packed={}).halved() is None
