"""Files without decodable frames: counted, listed, and skipped up to a limit."""

import logging
from pathlib import Path

from hf_memopt.errors import one_line
from hf_memopt.video.video_files import BadVideo

logger = logging.getLogger(__name__)


class BadVideos:
    """Bad files, listed in a text file that all processes and data loader workers of a run share.

    Args:
        path: of the list, written with its first line.
        max_bad_videos: how many files may be skipped.
    """

    def __init__(self, path: str | Path, max_bad_videos: int = 0) -> None:
        self.path, self.max_bad_videos = Path(path), max_bad_videos

    def listed(self) -> list[str]:
        """One line per bad file: its name and what is wrong with it."""
        return list(dict.fromkeys(self.path.read_text(encoding="utf-8").splitlines())) if self.path.exists() else []

    def skip(self, error: BadVideo) -> None:
        """List a bad file.

        Raises:
            BadVideo: it is one more than may be skipped.
        """
        line = one_line(error)
        listed = self.listed()
        if line in listed:
            return
        if len(listed) >= self.max_bad_videos:
            earlier = f"; {len(listed)} before it already reach max_bad_videos={self.max_bad_videos}" if listed else ""
            raise BadVideo(f"{line}{earlier}. Remove it from the data, or raise max_bad_videos to skip it") from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        logger.warning("skipped: %s", line)
