"""Videos and images as a model's tensors."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.video.clips import Clip, ClipOutline, outline_clip, read_clip
from hf_memopt.video.conversations import Medium
from hf_memopt.video.downloads import Downloads, is_url
from hf_memopt.video.frame_cache import FrameCache
from hf_memopt.video.frame_limits import FrameLimits
from hf_memopt.video.images import frames_in, open_image, open_medium, outline_frames, read_frames
from hf_memopt.video.processor import lower_shortest_edge, settings_dict

# What a processor returns beside a medium's own tensors.
_TEXT_OUTPUTS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
    "text_replacement_offsets",
    "video_metadata",
}
_CHANNELS = 3  # red, green, blue


@dataclass(frozen=True)
class Limits:
    """Limits of a sample.

    Attributes:
        max_frames: of a video; None for no limit.
        fps: frames per second to take at most; None for all.
        max_pixels_per_frame: height × width of a frame or an image; None for the model's own.
        max_video_tokens: tokens of all media of a sample.
        max_length: tokens of a sample.

    Raises:
        InputError: a limit that is not positive.
    """

    max_frames: int | None = 100
    fps: float | None = None
    max_pixels_per_frame: int | None = None
    max_video_tokens: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise InputError(f"{name}={value} must be above 0, or left out for no limit")


@dataclass(frozen=True)
class EncodedMedium:
    """A medium's tensors, and the text that takes its placeholder's place.

    Attributes:
        kind: "video" or "image".
        frames: in the tensors; 0 for an image.
        duration: seconds of the clip; 0 for an image.
    """

    kind: str
    text: str
    tensors: dict[str, torch.Tensor]
    frames: int = 0
    duration: float = 0.0


@dataclass(frozen=True)
class MediaEncoder:
    """Encodes media with a processor.

    Args:
        processor: of load_processor(); its smallest size is lowered where max_pixels_per_frame asks for that.
        folder: of relative paths.
        downloads: of media that are http(s) addresses.
        frame_cache: of video files; None to decode them whenever they are read.
    """

    processor: Any
    limits: Limits
    folder: Path
    downloads: Downloads | None = None
    frame_cache: FrameCache | None = None

    def __post_init__(self) -> None:
        lower_shortest_edge(self.processor, self.limits.max_pixels_per_frame)

    @property
    def _name(self) -> str:
        return type(self.processor).__name__

    @property
    def temporal_patch_size(self) -> int:
        """Frames that the model merges into one step in time."""
        return getattr(self.processor.video_processor, "temporal_patch_size", None) or 1

    @property
    def side_multiple(self) -> int:
        """The sides of frames are multiples of this."""
        settings = settings_dict(self.processor.video_processor)
        return (settings.get("patch_size") or 1) * (settings.get("merge_size") or 2)

    def decode(self, medium: Medium) -> Clip | EncodedMedium:
        """A video's frames; of an image, what encode() returns.

        Raises:
            BadVideo: the file is missing or cannot be decoded.
        """
        limits = self._frame_limits(medium)
        if medium.kind == "image":
            image = open_image(self.open_source(medium.source))
            height, width = limits.frame_size(image.height, image.width, 1)
            return self._process("image", 0, images=[image.resize((width, height))])
        source = self._open_clip(medium)
        if isinstance(source, list):
            return read_frames(source, limits)
        if self.frame_cache is not None and isinstance(source, Path):
            return self.frame_cache.read(source, limits)
        return read_clip(source, limits)

    def encode(self, decoded: Clip | EncodedMedium, max_frames: int | None) -> EncodedMedium:
        """The tensors and text of what decode() returned, of a clip with at most so many of its frames."""
        if isinstance(decoded, EncodedMedium):
            return decoded
        return self._encode_clip(decoded.thinned(max_frames, self.temporal_patch_size))

    def outline(self, medium: Medium) -> ClipOutline:
        """A video's frames, from its header.

        Raises:
            BadVideo: the file is missing or no video.
        """
        source, limits = self._open_clip(medium), self._frame_limits(medium)
        return outline_frames(source, limits) if isinstance(source, list) else outline_clip(source, limits)

    def _open_clip(self, medium: Medium) -> Path | io.BytesIO | list[Path]:
        """A video file, or the files of its frames."""
        if isinstance(medium.source, list):
            return [self.open_source(file) for file in medium.source]
        folder = self._path(medium.source) if isinstance(medium.source, str) else None
        if folder is not None and folder.is_dir():
            return frames_in(folder)
        if medium.sampling.sample_fps is not None:
            raise InputError(f"{medium.source}: sample_fps is of lists of frames; leave it out, or write fps")
        return self.open_source(medium.source)

    def _path(self, source: str) -> Path:
        if self.downloads is not None and is_url(source):
            return self.downloads.fetch(source)
        path = Path(source).expanduser()
        return path if path.is_absolute() else self.folder / path

    def _frame_limits(self, medium: Medium) -> FrameLimits:
        limits = self.limits
        return FrameLimits(
            limits.max_frames,
            limits.fps,
            self.temporal_patch_size,
            limits.max_pixels_per_frame,
            self.side_multiple,
            medium.sampling,
        )

    def _encode_clip(self, clip: Clip) -> EncodedMedium:
        """A clip's tensors. Clips shorter than the temporal patch size repeat their last frame."""
        frames, rate = clip.frames, clip.rate
        # transformers' processors divide indices by the rate to write timestamps into the prompt: give them indices
        # that come out as the real times, also where the file's rate varies.
        indices = [round(second * rate) for second in clip.timestamps]
        if missing := -len(frames) % self.temporal_patch_size:
            frames = numpy.concatenate([frames, numpy.repeat(frames[-1:], missing, axis=0)])
            indices += indices[-1:] * missing
        metadata = {
            "total_num_frames": max(clip.total, len(frames)),
            "fps": rate,
            "duration": clip.duration,
            "frames_indices": indices,
            "height": frames.shape[2],
            "width": frames.shape[3],
        }
        encoded = self._process(
            "video",
            len(frames),
            videos=[torch.from_numpy(frames)],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_metadata=True,  # some processors write timestamps from it that others drop unless it is asked for
        )
        return replace(encoded, duration=clip.duration)

    def _process(self, kind: str, frames: int, **media) -> EncodedMedium:
        """The processor's output for one medium alone: a prompt of its placeholder alone."""
        placeholder = getattr(self.processor, f"{kind}_token")
        with as_input_error(f"{self._name} cannot encode a {kind}", Exception):
            output = self.processor(
                text=[placeholder], return_tensors="pt", return_text_replacement_offsets=True, **media
            )
        text = output["text_replacement_offsets"][0][0]["replacement"]
        names = sorted(output.keys() - _TEXT_OUTPUTS)
        return EncodedMedium(kind, text, {name: _as_tensor(output[name]) for name in names}, frames)

    def open_source(self, source) -> Path | io.BytesIO:
        """The path of a file, or a buffer with the bytes that a dataset embeds.

        Raises:
            BadVideo: there is no such file.
        """
        return open_medium(source, self._path)

    def check(self, media: list[EncodedMedium]) -> None:
        """Assert the limits on the tensors themselves: processors have frame limits of their own.

        Raises:
            InputError: a processor took other frames than it was given, or lays them out as no known one does.
            RuntimeError: frames or images are larger than the cap.
        """
        max_frames, max_pixels = self.limits.max_frames, self.limits.max_pixels_per_frame
        patch = self._patch_size
        for medium in media:
            if medium.kind == "video":
                frames = self._count_frames(medium)
                above = max_frames is not None and frames > max(max_frames, self.temporal_patch_size)
                if frames != medium.frames or above:
                    raise InputError(
                        f"{self._name} is not supported: {frames} frames in its tensors, {medium.frames} given, "
                        f"max_frames={max_frames}"
                    )
            for name in ("video_grid_thw", "image_grid_thw") if max_pixels else ():
                for _, rows, columns in medium.tensors.get(name, torch.empty(0, 3)).tolist():
                    if rows * columns * patch**2 > max(max_pixels, self.side_multiple**2):
                        size = f"{rows * patch} × {columns * patch}"
                        raise RuntimeError(f"{medium.kind} of {size}, max_pixels_per_frame={max_pixels}")

    @property
    def _patch_size(self) -> int:
        """Pixels of a patch's side."""
        return self.side_multiple // (getattr(self.processor.video_processor, "merge_size", None) or 1)

    def _count_frames(self, medium: EncodedMedium) -> int:
        if "target_sizes_videos" in medium.tensors:  # MiniCPM-V: of frames and of their slices
            return medium.text.count(self.processor.image_start_token)
        return self.count_frames(medium.tensors)

    def count_frames(self, tensors: dict[str, torch.Tensor]) -> int:
        """Frames in the tensors of videos."""
        if "num_frames_per_video" in tensors:  # Gemma 4
            return int(tensors["num_frames_per_video"].sum())
        if "video_grids" in tensors:  # Molmo 2
            return int(tensors["video_grids"][:, 0].sum())
        pixels = tensors.get("pixel_values_videos", tensors.get("pixel_values"))
        if "video_grid_thw" in tensors:
            # Steps in time are frames (Ernie) or pairs of frames (Qwen): the number of pixels says which.
            steps, rows, columns = tensors["video_grid_thw"].unbind(1)
            pixels_per_step = _CHANNELS * self._patch_size**2 * (steps * rows * columns).sum()
            return int(steps.sum() * pixels.numel() // pixels_per_step)
        return pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]


def _as_tensor(value) -> torch.Tensor:
    value = value if isinstance(value, torch.Tensor) else torch.as_tensor(numpy.asarray(value))
    return value.float() if value.dtype is torch.float64 else value
