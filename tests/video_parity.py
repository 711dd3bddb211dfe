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
from transformers import AutoConfig, AutoProcessor  # noqa: E402

from hf_memopt.video.encoder import Encoder  # noqa: E402
from hf_memopt.video.media import Limits  # noqa: E402
from hf_memopt.video.pixels import FAMILIES, prepare_frames  # noqa: E402
from hf_memopt.video.processor import _load_without_torchvision, load_processor  # noqa: E402

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


if __name__ == "__main__":
    torch.manual_seed(0)
    print(compare_pixels(), compare_samples(Path(sys.argv[1])))
