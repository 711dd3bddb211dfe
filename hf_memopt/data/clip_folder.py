"""A folder of clips or pictures with their captions, as a text file of the same name beside each."""

from pathlib import Path

from hf_memopt.errors import InputError, listed

_VIDEOS = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp")


def captioned_rows(folder: Path, source: str) -> list[dict[str, str | None]] | None:
    """Rows of `video` or `image` and `caption`; None of a folder without clips and pictures, and of one whose metadata
    `datasets` reads itself.

    Raises:
        InputError: a clip without a caption, or one that is empty.
    """
    media = sorted(path for path in folder.iterdir() if path.suffix.lower() in (*_VIDEOS, *_IMAGES))
    if not media or any((folder / f"metadata.{suffix}").is_file() for suffix in ("csv", "jsonl", "parquet")):
        return None
    texts = {path: path.with_suffix(".txt") for path in media}
    if bare := [path.name for path in media if not texts[path].is_file()]:
        raise InputError(
            f"data set {source!r}: {listed(bare, 3)} of {len(media)} files without a caption: write it into a text "
            f"file of the same name ({Path(bare[0]).stem}.txt), or rows of video and caption into a jsonl file"
        )
    rows = []
    for path, text in texts.items():
        if not (caption := text.read_text(encoding="utf-8").strip()):
            raise InputError(f"data set {source!r}: {text.name} is empty: write the caption of {path.name} into it")
        is_video = path.suffix.lower() in _VIDEOS
        rows.append(
            {
                "video": str(path.resolve()) if is_video else None,
                "image": None if is_video else str(path.resolve()),
                "caption": caption,
            }
        )
    return rows
