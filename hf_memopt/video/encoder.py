"""Rows as samples of a video model: tokens, labels on the answers, and the media's tensors, within limits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_memopt.data.chat import Chat
from hf_memopt.data.tokens import IGNORED, label_spans
from hf_memopt.data.turns import read_tools
from hf_memopt.errors import InputError
from hf_memopt.video.collator import TOKENS, join
from hf_memopt.video.conversations import Medium, conversation
from hf_memopt.video.downloads import Downloads
from hf_memopt.video.frame_cache import FrameCache
from hf_memopt.video.media import EncodedMedium, Limits, MediaEncoder


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
            InputError: the row is in no supported form.
        """
        return conversation(row, where, urls=self.downloads is not None)

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
        text, spans = self._expand(text, spans, media, where)
        tokens = self.processor.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        token_types = self._token_types(tokens["input_ids"])
        labels = label_spans(tokens["input_ids"], tokens["offset_mapping"], spans)
        sample = {"input_ids": torch.tensor(tokens["input_ids"]), "labels": torch.tensor(labels)}
        if self.processor.return_mm_token_type_ids:
            sample["mm_token_type_ids"] = token_types
        sample |= join([medium.tensors for medium in media], in_one_sample=True)
        return sample, int((token_types > 0).sum())

    def _token_types(self, ids: list[int]) -> torch.Tensor:
        """0 for text, above 0 for media."""
        return torch.tensor(self.processor.create_mm_token_type_ids([ids])[0])

    def _expand(self, text: str, spans, media: list[EncodedMedium], where: str):
        """The text with every placeholder replaced, and its spans shifted accordingly."""
        parts, shifts, position = [], [], 0
        for medium in media:
            placeholder = getattr(self.processor, f"{medium.kind}_token")
            start = text.find(placeholder, position)
            if start < 0:
                raise InputError(
                    f"{where}: the chat template writes no {placeholder} where the row has a {medium.kind}"
                )
            parts += [text[position:start], medium.text]
            position = start + len(placeholder)
            shifts.append((position, len(medium.text) - len(placeholder)))
        parts.append(text[position:])

        def shift(index: int) -> int:
            return index + sum(by for end, by in shifts if end <= index)

        return "".join(parts), [(shift(start), shift(end)) for start, end in spans]

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
        media_end = 0
        if media_tokens:
            media_end = int(self._token_types(sample["input_ids"].tolist()).nonzero().max()) + 1
        if media_end > length or not (sample["labels"][:length] != IGNORED).any():
            raise InputError(
                f"{where}: its prompt leaves no tokens for an answer within max_length={length} (the whole row takes "
                f"{tokens} tokens, {media_tokens} of them media's at their fewest frames): raise max_length, or lower "
                "max_pixels_per_frame"
            )
        return {name: value[:length] if name in TOKENS else value for name, value in sample.items()}
