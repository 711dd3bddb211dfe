"""Rows as samples of a video model: tokens, labels on the answers, and the media's tensors, within limits."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_memopt.data.chat import Chat
from hf_memopt.data.tokens import IGNORED
from hf_memopt.data.turns import read_tools
from hf_memopt.errors import InputError
from hf_memopt.video.collator import TOKENS, join
from hf_memopt.video.conversations import Medium, conversation
from hf_memopt.video.downloads import Downloads
from hf_memopt.video.frame_cache import FrameCache
from hf_memopt.video.media import EncodedMedium, Limits, MediaEncoder
from hf_memopt.video.processor import check_media


@dataclass(frozen=True)
class Encoder:
    """Encodes rows with one processor.

    Args:
        processor: of load_processor().
        folder: of relative paths.
        downloads: of media that rows name by http(s) address; None to refuse such rows.
        frame_cache: of video files; None to decode them whenever they are read.
    """

    processor: Any
    limits: Limits
    folder: Path = field(default_factory=Path)
    downloads: Downloads | None = None
    frame_cache: FrameCache | None = None
    chat: Chat = field(init=False)
    media: MediaEncoder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat", Chat(self.processor))
        media = MediaEncoder(self.processor, self.limits, self.folder, self.downloads, self.frame_cache)
        object.__setattr__(self, "media", media)

    def read(self, row: dict, where: str) -> tuple[list[dict], list[Medium]]:
        """conversation() of a row; no file is opened.

        Raises:
            InputError: the row is in no supported form, or has media that the model does not take.
        """
        messages, media = conversation(row, where, urls=self.downloads is not None)
        check_media(self.processor, {medium.kind for medium in media}, where)
        return messages, media

    def check(self, row: dict, where) -> None:
        """Check the form of a row; no file is opened.

        Raises:
            InputError: names the row and what is wrong with it.
        """
        messages, _ = self.read(row, where)
        self.chat.check(messages, read_tools(row, where), where)

    def __call__(self, row: dict, where: str = "row") -> dict[str, torch.Tensor]:
        """A row's sample: `input_ids`, `labels`, position inputs and the media's tensors.

        A sample that is too long loses frames first, evenly, then the end of its last answer.

        Args:
            where: names the row in errors.

        Raises:
            BadVideo: a video cannot be decoded.
            InputError: the prompt alone is too long.
        """
        messages, media = self.read(row, where)
        text, spans = self.chat.text_and_answers(messages, read_tools(row, where), where)
        if not spans:
            raise InputError(f"{where}: cannot locate its answer in the chat template's text")
        max_frames = self.limits.max_frames
        decoded = [self.media.decode(medium) for medium in media]
        while True:
            encoded = [self.media.encode(part, max_frames) for part in decoded]
            sample, media_tokens = self._tokenize(text, spans, encoded, where)
            max_frames = self._fewer_frames(len(sample["input_ids"]), media_tokens, encoded)
            if max_frames is None:
                break
        self.media.check(encoded)
        return self._truncate(sample, media_tokens, where)

    def _fewer_frames(self, tokens: int, media_tokens: int, encoded: list[EncodedMedium]) -> int | None:
        """The `max_frames` to try next; None where the sample fits or no video can lose frames."""
        length, video = self.limits.max_length, self.limits.max_video_tokens
        excess = max(tokens - length if length else 0, media_tokens - video if video else 0)
        frames = [medium.frames for medium in encoded if medium.frames]
        merged = self.media.temporal_patch_size
        if excess <= 0 or not frames or max(frames) <= merged:
            return None
        fewer = max(frames) - max(1, round(excess * sum(frames) / media_tokens / len(frames)))
        return max(merged, min(fewer, max(frames) - merged))

    def _tokenize(self, text: str, spans, media: list[EncodedMedium], where: str) -> tuple[dict, int]:
        """The sample with every medium's text in its place, and the number of its tokens that are media's."""
        text, spans = self._expand(*self._write_durations(text, spans, media), media, where)
        tokens = self.processor.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        token_types = self._token_types(tokens["input_ids"])
        labels = [
            token if any(start < last and first < end for first, last in spans) else IGNORED
            for token, (start, end) in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
        ]
        sample = {"input_ids": torch.tensor(tokens["input_ids"]), "labels": torch.tensor(labels)}
        if self.processor.return_mm_token_type_ids:
            sample["mm_token_type_ids"] = token_types
        if hasattr(self.processor, "create_moe_mm_token_type_ids"):  # Ernie: which experts a token goes to
            expert_types = self.processor.create_moe_mm_token_type_ids([tokens["input_ids"]])[0]
            sample["moe_mm_token_type_ids"] = torch.tensor(expert_types)
        sample |= join([medium.tensors for medium in media], in_one_sample=True)
        return sample, int((token_types > 0).sum())

    def _token_types(self, ids: list[int]) -> torch.Tensor:
        """0 for text, above 0 for media."""
        return torch.tensor(self.processor.create_mm_token_type_ids([ids])[0])

    def _expand(self, text: str, spans, media: list[EncodedMedium], where: str):
        """The text with every medium's own text in its place, and its spans shifted accordingly."""
        places, replacements, numbers = self._places(text), [], Counter()
        for medium in media:
            place = next((place for place in places if place["type"] == medium.kind), None)
            if place is None:
                placeholder = getattr(self.processor, f"{medium.kind}_token")
                raise InputError(
                    f"{where}: the chat template writes no {placeholder} where the row has a {medium.kind}"
                )
            replacements.append((*place["span"], self._numbered(medium.text, numbers[medium.kind])))
            numbers[medium.kind] += 1
        return _replace(text, spans, replacements)

    def _places(self, text: str) -> Iterator[dict]:
        """Find where the processor sees media in a text."""
        copies = {
            f"{kind}s_replacements": [""] * text.count(getattr(self.processor, f"{kind}_token"))
            for kind in ("image", "video")
        }
        return iter(self.processor.get_text_with_replacements([text], **copies)[1][0])

    def _numbered(self, text: str, number: int) -> str:
        """A medium's text with its number in the row; MiniCPM-V's processor counts the media of a text, here one."""
        start, end = (getattr(self.processor, f"image_id_{side}_token", None) for side in ("start", "end"))
        return text.replace(f"{start}0{end}", f"{start}{number}{end}", 1) if start else text

    def _write_durations(self, text: str, spans, media: list[EncodedMedium]):
        """The text with seconds where HyperCLOVA X's chat template has its mark for the length of a video."""
        mark = getattr(self.processor, "video_duration_token", None)
        if mark is None:
            return text, spans
        places = [(match.start(), match.end()) for match in re.finditer(re.escape(mark), text)]
        seconds = [json.dumps(round(medium.duration, 2)) for medium in media if medium.kind == "video"]
        return _replace(text, spans, [(*place, second) for place, second in zip(places, seconds, strict=False)])

    def _truncate(self, sample: dict, media_tokens: int, where: str) -> dict[str, torch.Tensor]:
        """The sample without the end of its answer beyond max_length; a medium is never truncated."""
        max_video_tokens, length = self.limits.max_video_tokens, self.limits.max_length
        if max_video_tokens and media_tokens > max_video_tokens:
            raise InputError(
                f"{where}: its media take {media_tokens} tokens at their fewest frames, above "
                f"max_video_tokens={max_video_tokens}: raise it, or lower max_pixels_per_frame"
            )
        tokens = len(sample["input_ids"])
        if length is None or tokens <= length:
            return sample
        types = self._token_types(sample["input_ids"].tolist())
        media_end = int(types.nonzero().max()) + 1 if media_tokens else 0
        if media_end > length or not (sample["labels"][:length] != IGNORED).any():
            raise InputError(
                f"{where}: its prompt leaves no tokens for an answer within max_length={length} (the whole row takes "
                f"{tokens} tokens, {media_tokens} of them media's at their fewest frames): raise max_length, or lower "
                "max_pixels_per_frame"
            )
        return {name: value[:length] if name in TOKENS else value for name, value in sample.items()}


def _replace(text: str, spans, replacements: list[tuple[int, int, str]]):
    """A text with other text between some of its positions, in order, and spans of it shifted accordingly."""
    parts, position = [], 0
    for start, end, new in replacements:
        parts += [text[position:start], new]
        position = end

    def shift(index: int) -> int:
        return index + sum(len(new) - (end - start) for start, end, new in replacements if end <= index)

    return "".join([*parts, text[position:]]), [(shift(start), shift(end)) for start, end in spans]
