"""Run with torchvision on the path: transformers' video processors against this project's, bit for bit.

Prints the number of comparisons.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import library

# The wheel's operators may be a CUDA build's; its Python, all that video processors use, wants two declared.
_DECLARED = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _DECLARED.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import transformers  # noqa: E402
import video_models  # noqa: E402
from transformers import AutoConfig, AutoProcessor, AutoVideoProcessor  # noqa: E402

from hf_memopt.estimator.architectures import load_config  # noqa: E402
from hf_memopt.planner.samples.video_tiers import bundled_video_models  # noqa: E402
from hf_memopt.video.encoder import Encoder  # noqa: E402
from hf_memopt.video.inputs import VideoInputs  # noqa: E402
from hf_memopt.video.media import Limits  # noqa: E402
from hf_memopt.video.pixels import FAMILIES, prepare_frames  # noqa: E402
from hf_memopt.video.processor import (  # noqa: E402
    TorchVideoProcessor,
    _load_without_torchvision,
    load_processor,
    published_settings,
)

# Clips of bundled models: frames, height, width. 1080p, and sizes at which the checkpoints' bounds begin to matter.
CLIPS = ((2, 1080, 1920), (16, 224, 224), (64, 36, 64), (6, 20, 300))
SIZES = ((120, 160), (360, 640), (641, 359), (20, 300))


def other_settings(name: str) -> dict:
    """Settings that are not the defaults."""
    if name == "smolvlm":
        return {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 64}}
    if name in ("llava_onevision", "internvl"):
        return {"size": {"height": 56, "width": 84}}
    capped = {} if name == "video_llama_3" else {"cap_pixels_per_frame": True}
    return {"size": {"shortest_edge": 4096, "longest_edge": 50_000}, **capped}


def same(found: dict, wanted: dict) -> bool:
    def equal(one, other) -> bool:
        if isinstance(one, list):
            return len(one) == len(other) and all(map(equal, one, other))
        return torch.equal(one, other) and one.dtype == other.dtype

    return found.keys() == wanted.keys() and all(equal(found[name], wanted[name]) for name in wanted)


def compare_pixels() -> int:
    count = 0
    for name, family in FAMILIES.items():
        for given in ({}, other_settings(name)):
            theirs = getattr(transformers, family.processor)(**given)
            saved = {key: value for key, value in theirs.to_dict().items() if value is not None}
            settings = {**family.defaults, **json.loads(json.dumps(saved, default=int))}
            for height, width in SIZES:
                for frames in (2, 7, 16):
                    clip = torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8)
                    clip[frames // 2] = clip[frames // 2 - 1]  # nothing moved
                    about = {"total_num_frames": frames, "fps": 5.0, "frames_indices": list(range(frames))}
                    wanted = dict(theirs([clip], return_tensors="pt", do_sample_frames=False, video_metadata=[about]))
                    wanted.pop("video_metadata", None)
                    wanted = {key: torch.as_tensor(value) for key, value in wanted.items()}
                    assert same(prepare_frames(family, settings, clip), wanted), (name, given, height, width, frames)
                    count += 1
    return count


def compare_samples(clips: Path) -> int:
    """Tokens, positions, labels and all: what AutoProcessor's processor makes, and what is made without it."""
    row = {
        "messages": [
            {"role": "user", "content": "<video>What is <video>moving?"},
            {"role": "assistant", "content": "first red then blue"},
        ],
        "videos": ["5.mp4", "30.mp4"],
    }
    for name in video_models.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            video_models.make(name, Path(folder), weights=False)
            config = AutoConfig.from_pretrained(folder)
            theirs = load_processor(folder, config)
            assert type(theirs) is type(AutoProcessor.from_pretrained(folder))
            assert type(theirs.video_processor).__name__ == FAMILIES[name].processor
            ours = _load_without_torchvision(folder, config, False)
            found, wanted = (Encoder(one, Limits(max_frames=7), clips)(row) for one in (ours, theirs))
            assert same(found, wanted), name
    return len(video_models.FAMILIES)


def compare_bundled() -> int:
    """Estimates of bundled models: the pixels and shapes that the published checkpoint's video processor makes."""
    names = bundled_video_models()
    for name in names:
        config, settings = load_config(name), published_settings(name)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({"model_type": config.model_type}))
            (Path(folder) / Path(settings["source"]).name).write_text(json.dumps(settings))
            theirs = AutoVideoProcessor.from_pretrained(folder)
        ours = TorchVideoProcessor(config.model_type, settings)
        assert type(theirs).__name__ == ours.family.processor
        for frames, height, width in CLIPS:
            clip = torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8)
            wanted = dict(theirs([clip], return_tensors="pt", do_sample_frames=False))
            wanted = {key: torch.as_tensor(value) for key, value in wanted.items() if key != "video_metadata"}
            assert same(prepare_frames(ours.family, ours.settings, clip), wanted), (name, frames, height, width)
            assert_estimated(VideoInputs(frames, height, width, settings=settings).clip(config), wanted, theirs)
        if hasattr(theirs, "get_num_of_video_patches"):  # too many pixels to process here
            found = VideoInputs(64, 1080, 1920, settings=settings).clip(config)
            assert len(found.tensors["pixel_values_videos"]) == theirs.get_num_of_video_patches(64, 1080, 1920, {})
    return len(names)


def assert_estimated(found, wanted: dict, theirs) -> None:
    for key, tensor in wanted.items():
        assert found.tensors[key].shape == tensor.shape, key
    if "video_grid_thw" in wanted:
        tokens = int(wanted["video_grid_thw"].prod()) // theirs.merge_size**2
        assert found.steps * found.step_tokens == tokens


if __name__ == "__main__":
    torch.manual_seed(0)
    print(compare_pixels(), compare_samples(Path(sys.argv[1])), compare_bundled())
