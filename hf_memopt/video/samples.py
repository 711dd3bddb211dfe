"""Rows as a dataset of samples, decoded when they are asked for."""

import math

import torch

from hf_memopt.data.columns import row_number
from hf_memopt.data.row_places import Place
from hf_memopt.video.bad_videos import BadVideos
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.outlines import outline_encoder
from hf_memopt.video.video_files import BadVideo


class VideoSamples(torch.utils.data.Dataset):
    """A row without a decodable video is replaced by the next row.

    Args:
        rows: a sequence of rows in the forms that conversation() takes.
        encode: rows -> samples.
        bad: counts files without decodable frames; by default none is allowed.
        name: what messages call a row, "SOURCE: KIND".
    """

    def __init__(self, rows, encode: Encoder, bad: BadVideos | None = None, name: str = "row") -> None:
        self.rows, self.encode, self.name = rows, encode, name
        self.bad = bad or BadVideos("bad_videos.txt")
        self._lengths: list[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> Place | str:
        """Name a row as messages do."""
        source, _, kind = self.name.rpartition(": ")
        number = row_number(getattr(self.rows, "_indices", None), index)
        return Place(source, number, kind=kind) if source else f"{kind} {number}"

    def sizes(self, max_rows: float = math.inf) -> list[float]:
        """Roughly the pixels of each row's videos, from the files' headers; 0 beyond `max_rows` and for bad files.

        Raises:
            BadVideo: more bad files than allowed.
        """
        return [self._estimate_pixels(index) if index < max_rows else 0.0 for index in range(len(self))]

    def _estimate_pixels(self, index: int) -> float:
        try:
            _, media = self.encode.read(self.rows[index], self.where(index))
            return float(sum(self.encode.media.outline(medium).pixels for medium in media if medium.kind == "video"))
        except BadVideo as error:
            self.bad.skip(error)
            return 0.0

    def lengths(self) -> list[int]:
        """Tokens of each row's sample, from its files' headers; of a bad file's row, those of the row in its place.

        Raises:
            BadVideo: more bad files than allowed.
            InputError: the model's family has no such counts, or a row's prompt is too long.
        """
        if self._lengths is None:
            encode, count = outline_encoder(self.encode), len(self)
            lengths = [self._length(encode, index) for index in range(count)]
            for index in reversed(range(2 * count)):  # twice, since the first row follows the last
                if lengths[index % count] is None:
                    lengths[index % count] = lengths[(index + 1) % count]
            if None in lengths:
                raise self._nothing_left()
            self._lengths = lengths
        return self._lengths

    def _length(self, encode: Encoder, index: int) -> int | None:
        try:
            return len(encode(self.rows[index], self.where(index))["input_ids"])
        except BadVideo as error:
            self.bad.skip(error)
            return None

    def outline(self, index: int) -> dict[str, torch.Tensor]:
        """The outline of `self[index]`, from the files' headers: its pixels are on the meta device."""
        return self._make(outline_encoder(self.encode), index)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} {index} of {len(self)}")
        return self._make(self.encode, index)

    def _make(self, encode: Encoder, index: int) -> dict[str, torch.Tensor]:
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            try:
                return encode(self.rows[candidate], self.where(candidate))
            except BadVideo as error:
                self.bad.skip(error)
        raise self._nothing_left()

    def _nothing_left(self) -> BadVideo:
        return BadVideo(f"none of the {len(self)} rows has a video that can be decoded")
