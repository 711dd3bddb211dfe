"""Files that give no frames: counted, listed, and skipped as far as may be."""

import logging
from pathlib import Path

from hf_memopt.errors import one_line
from hf_memopt.video.clips import BadVideo

logger = logging.getLogger(__name__)


class BadVideos:
    """Files that give no frames, listed in a text file that all processes and workers of a run share.

    Args:
        path: of the list; made with its first line.
        most: that may be skipped.
    """

    def __init__(self, path: str | Path, most: int = 0) -> None:
        self.path, self.most = Path(path), most

    def listed(self) -> list[str]:
        """What was wrong with each, once."""
        return list(dict.fromkeys(self.path.read_text(encoding="utf-8").splitlines())) if self.path.exists() else []

    def skip(self, error: BadVideo) -> None:
        """Count one more.

        Raises:
            BadVideo: there are more than may be.
        """
        line = one_line(error)
        known = self.listed()
        if line in known:
            return
        if len(known) >= self.most:
            more = f"; with {len(known)} before it more than max_bad_videos={self.most}" if known else ""
            raise BadVideo(f"{line}{more}. Take it out of the data, or raise max_bad_videos to skip it") from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        logger.warning("skipped: %s", line)
