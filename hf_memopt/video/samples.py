"""Samples for video models: decoded within limits, tokenised, with answers as labels."""

import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from hf_memopt.data.chat import Chat
from hf_memopt.data.columns import row_number
from hf_memopt.data.row_places import Place
from hf_memopt.data.tokens import IGNORED
from hf_memopt.data.turns import read_tools
from hf_memopt.errors import InputError, one_line
from hf_memopt.video.bad_videos import BadVideos
from hf_memopt.video.clips import BadVideo, Clip, capped_size, glance, name_of, out_of_host_memory, read_clip
from hf_memopt.video.collator import TOKENS, join
from hf_memopt.video.conversations import Medium, conversation


@dataclass(frozen=True)
class Limits:
    """What a sample may take.

    Attributes:
        max_frames: of a video; None for no limit.
        fps: frames a second that are taken, at most; None for all.
        max_pixels_per_frame: height × width that a frame or an image keeps; None for the model's own.
        max_video_tokens: tokens of all media of a sample.
        max_length: tokens of a sample.
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


@dataclass
class _Encoded:
    """A medium as tensors, and the text that stands for it.

    Attributes:
        frames: of a video that are in the tensors; 0 for an image.
    """

    kind: str
    text: str
    tensors: dict[str, torch.Tensor]
    frames: int = 0


@dataclass(frozen=True)
class Encoder:
    """From rows to samples, for one processor.

    Args:
        processor: of data.video_processor.
        folder: that relative paths start from.
    """

    processor: Any
    limits: Limits
    folder: Path = field(default_factory=Path)
    chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat", Chat(self.processor))
        cap_pixels(self.processor, self.limits.max_pixels_per_frame)

    def __call__(self, row: dict, where: str = "row") -> dict[str, torch.Tensor]:
        """A row's sample: `input_ids`, `labels`, position inputs and the media's tensors.

        Too long a sample loses frames first, evenly, then the end of its last answer.

        Raises:
            BadVideo: a video cannot be decoded.
            InputError: the prompt alone is too long.
        """
        messages, media = conversation(row, where)
        text, spans = self.chat.text_and_answers(messages, read_tools(row, where), where)
        if not spans:
            raise InputError(f"{where}: its answer has no certain place in the chat template's text")
        allowed = self.limits.max_frames
        while True:
            encoded = [self._encode(medium, allowed) for medium in media]
            sample, media_tokens = self._sample(text, spans, encoded, where)
            over = self._over(len(sample["input_ids"]), media_tokens)
            most = max((medium.frames for medium in encoded), default=0)
            if over <= 0 or most <= self.merged:
                break
            per_frame = media_tokens / sum(medium.frames for medium in encoded)
            fewer = most - max(1, round(over / per_frame / max(1, sum(medium.frames > 0 for medium in encoded))))
            allowed = max(self.merged, min(fewer, most - self.merged))
        self._check(encoded)
        return self._cut(sample, media_tokens, where)

    @property
    def merged(self) -> int:
        """Frames that the model merges in time."""
        return getattr(self.processor.video_processor, "temporal_patch_size", None) or 1

    @property
    def side_multiple(self) -> int:
        """What the sides of frames are multiples of."""
        settings = _settings(self.processor.video_processor)
        return (settings.get("patch_size") or 1) * (settings.get("merge_size") or 2)

    def _over(self, tokens: int, media_tokens: int) -> int:
        """Tokens above the limits."""
        length, video = self.limits.max_length, self.limits.max_video_tokens
        return max(tokens - length if length else 0, media_tokens - video if video else 0)

    def _encode(self, medium: Medium, max_frames: int | None) -> _Encoded:
        kind, source = medium
        return self._video(source, max_frames) if kind == "video" else self._image(source)

    def _video(self, source, max_frames: int | None) -> _Encoded:
        limits = self.limits
        clip = read_clip(
            self.file_of(source), max_frames, limits.fps, self.merged, limits.max_pixels_per_frame, self.side_multiple
        )
        return self.encode_clip(clip)

    def encode_clip(self, clip: Clip) -> _Encoded:
        """A clip's tensors. Where the model merges more frames than there are, the last one is repeated."""
        frames = clip.frames
        rate = clip.rate
        shown = [round(second * rate) for second in clip.timestamps]  # which transformers divides by the rate again
        if missing := -len(frames) % self.merged:
            frames = numpy.concatenate([frames, numpy.repeat(frames[-1:], missing, axis=0)])
            shown += shown[-1:] * missing
        about = {
            "total_num_frames": max(clip.total, len(frames)),
            "fps": rate,
            "duration": clip.duration,
            "frames_indices": shown,
            "height": frames.shape[2],
            "width": frames.shape[3],
        }
        return self._processed(
            "video", len(frames), videos=[torch.from_numpy(frames)], video_metadata=[about], do_sample_frames=False
        )

    def _image(self, source) -> _Encoded:
        from PIL import Image, ImageOps, UnidentifiedImageError

        found = self.file_of(source)
        try:
            image = ImageOps.exif_transpose(Image.open(found)).convert("RGB")
        except MemoryError as error:
            raise out_of_host_memory(found, error) from error
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise BadVideo(f"{name_of(found)}: not an image that can be read ({one_line(error)})") from error
        height, width = capped_size(image.height, image.width, self.limits.max_pixels_per_frame, self.side_multiple)
        return self._processed("image", 0, images=[image.resize((width, height))])

    def _processed(self, kind: str, frames: int, **media) -> _Encoded:
        """What the processor makes of one medium alone."""
        place = getattr(self.processor, f"{kind}_token")
        found = self.processor(text=[place], return_tensors="pt", return_text_replacement_offsets=True, **media)
        text = found["text_replacement_offsets"][0][0]["replacement"]
        names = found.keys() - {
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "mm_token_type_ids",
            "text_replacement_offsets",
            "video_metadata",
        }
        return _Encoded(kind, text, {name: _tensor(found[name]) for name in sorted(names)}, frames)

    def file_of(self, source):
        """A path, or a file of the bytes that a data set carries.

        Raises:
            BadVideo: there is no such file.
        """
        if isinstance(source, dict):
            source = io.BytesIO(source["bytes"]) if source.get("bytes") else source.get("path")
        if isinstance(source, bytes):
            source = io.BytesIO(source)
        if isinstance(source, io.BytesIO):
            return source
        path = Path(source).expanduser()
        path = path if path.is_absolute() else self.folder / path
        if not path.is_file():
            raise BadVideo(f"{path}: no such file")
        return path

    def _sample(self, text: str, spans, media: list[_Encoded], where: str) -> tuple[dict, int]:
        """Tokens and labels with every medium's text in its place, and how many of the tokens are media's."""
        text, spans = self._expanded(text, spans, media, where)
        tokens = self.processor.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        ids = tokens["input_ids"]
        labels = [
            token if any(first < end and start < last for start, end in spans) else IGNORED
            for token, (first, last) in zip(ids, tokens["offset_mapping"], strict=True)
        ]
        sample = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
        types = torch.tensor(self.processor.create_mm_token_type_ids([ids])[0])
        if self.processor.return_mm_token_type_ids:
            sample["mm_token_type_ids"] = types
        return sample | join([medium.tensors for medium in media], in_a_row=True), int((types > 0).sum())

    def _expanded(self, text: str, spans, media: list[_Encoded], where: str):
        """The text with every placeholder replaced, and its spans moved along."""
        pieces, moves, at = [], [], 0
        for medium in media:
            place = getattr(self.processor, f"{medium.kind}_token")
            start = text.find(place, at)
            if start < 0:
                raise InputError(f"{where}: the chat template does not put {place} where a {medium.kind} belongs")
            pieces += [text[at:start], medium.text]
            at = start + len(place)
            moves.append((at, len(medium.text) - len(place)))
        pieces.append(text[at:])

        def moved(place: int) -> int:
            return place + sum(by for end, by in moves if end <= place)

        return "".join(pieces), [(moved(start), moved(end)) for start, end in spans]

    def _check(self, media: list[_Encoded]) -> None:
        """The limits, asserted on the tensors themselves.

        Raises:
            RuntimeError: a processor took other frames than it was given, or larger ones than the cap.
        """
        most, cap = self.limits.max_frames, self.limits.max_pixels_per_frame
        for medium in media:
            found = frames_in(medium.tensors, self.merged)
            if medium.kind == "video" and (found != medium.frames or (most and found > max(most, self.merged))):
                raise RuntimeError(f"{found} frames in the tensors, {medium.frames} given, max_frames={most}")
            for name in ("video_grid_thw", "image_grid_thw") if cap else ():
                patch = self.side_multiple // (getattr(self.processor.video_processor, "merge_size", None) or 1)
                for _, rows, columns in medium.tensors.get(name, torch.empty(0, 3)).tolist():
                    if rows * columns * patch**2 > max(cap, self.side_multiple**2):
                        raise RuntimeError(f"{medium.kind} of {rows * patch} × {columns * patch}, cap {cap} pixels")

    def _cut(self, sample: dict, media_tokens: int, where: str) -> dict[str, torch.Tensor]:
        """A sample without the end of its answer that is too long; no medium is ever cut."""
        video, length = self.limits.max_video_tokens, self.limits.max_length
        if video and media_tokens > video:
            raise InputError(
                f"{where}: its media take {media_tokens} tokens at their fewest frames, above "
                f"max_video_tokens={video}: raise it, or lower max_pixels_per_frame"
            )
        tokens = len(sample["input_ids"])
        if length is None or tokens <= length:
            return sample
        types = torch.tensor(self.processor.create_mm_token_type_ids([sample["input_ids"].tolist()])[0])
        last = int(types.nonzero().max()) + 1 if media_tokens else 0
        answered = (sample["labels"][:length] != IGNORED).any()
        if last > length or not answered:
            raise InputError(
                f"{where}: its prompt leaves no room for an answer within max_length={length} (all of it takes "
                f"{tokens} tokens, {media_tokens} of them media's at their fewest frames): raise max_length, or lower "
                "max_pixels_per_frame"
            )
        return {name: value[:length] if name in TOKENS else value for name, value in sample.items()}


def cap_pixels(processor, cap: int | None) -> None:
    """Lower the size that a processor scales small frames and images up to, which may lie above the cap."""
    parts = (processor.video_processor, getattr(processor, "image_processor", None))
    for part in filter(None, parts) if cap else ():
        settings = _settings(part)
        size = dict(settings.get("size") or {})
        if settings.get("patch_size") and size.get("shortest_edge") and size.get("longest_edge"):
            size["shortest_edge"] = min(size["shortest_edge"], cap // 4)  # sides are rounded up from there
            settings["size"] = size


def _settings(part) -> dict:
    """What a part of a processor goes by: transformers' keep it as attributes."""
    return getattr(part, "settings", None) or vars(part)


def frames_in(tensors: dict[str, torch.Tensor], merged: int) -> int:
    """Frames that the tensors of one video hold."""
    if "video_grid_thw" in tensors:
        return int(tensors["video_grid_thw"][:, 0].sum()) * merged
    pixels = tensors.get("pixel_values_videos", tensors.get("pixel_values"))
    return pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]


def _tensor(value) -> torch.Tensor:
    value = value if isinstance(value, torch.Tensor) else torch.as_tensor(numpy.asarray(value))
    return value.float() if value.dtype is torch.float64 else value


class VideoSamples(torch.utils.data.Dataset):
    """Rows as samples, decoded when they are asked for. A row that is skipped gives way to the next one.

    Args:
        rows: a sequence of rows, as conversation() takes them.
        encode: an Encoder.
        bad: where broken files are counted; by default none may be.
    """

    def __init__(self, rows, encode: Encoder, bad: BadVideos | None = None, name: str = "row") -> None:
        self.rows, self.encode, self.name = rows, encode, name
        self.bad = bad or BadVideos("bad_videos.txt")

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, number: int) -> Place | str:
        """What a row is called in messages."""
        source, _, kind = self.name.rpartition(": ")
        number = row_number(getattr(self.rows, "_indices", None), number)
        return Place(source, number, kind=kind) if source else f"{kind} {number}"

    def check(self, looked_at: float = math.inf) -> None:
        """Raise where a row's form is not one that is trained on; no file is opened.

        Raises:
            InputError: names the row and what is wrong with it.
        """
        for number, row in enumerate(self.rows):
            if number >= looked_at:
                return
            messages, _ = conversation(row, self.where(number))
            self.encode.chat.check(messages, read_tools(row, self.where(number)), self.where(number))

    def sizes(self, looked_at: float = math.inf) -> list[float]:
        """Pixels of each row's videos, roughly, by the files' headers; what cannot be opened is as good as none.

        Raises:
            BadVideo: more of them than may be.
        """
        return [self._pixels(number) if number < looked_at else 0.0 for number in range(len(self))]

    def _pixels(self, number: int) -> float:
        limits = self.encode.limits
        try:
            _, media = conversation(self.rows[number], self.where(number))
            files = [self.encode.file_of(source) for kind, source in media if kind == "video"]
            return sum(glance(file, limits.max_frames, limits.fps, limits.max_pixels_per_frame) for file in files)
        except BadVideo as error:
            self.bad.skip(error)
            return 0.0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} {index} of {len(self)}")
        for step in range(len(self)):
            number = (index + step) % len(self)
            try:
                return self.encode(self.rows[number], self.where(number))
            except BadVideo as error:
                self.bad.skip(error)
        raise BadVideo(f"none of the {len(self)} rows has a video that can be decoded")
