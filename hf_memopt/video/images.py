"""Image files, upright."""

import contextlib
import io
from pathlib import Path

from hf_memopt.errors import one_line
from hf_memopt.video.video_files import BadVideo, display_name, out_of_host_memory

# Of a folder of frames; others in it (a list of times, a thumbnail database) are no frames.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # EXIF 2.32, tag Orientation


def open_image(source: Path | io.BytesIO):
    """A PIL image in RGB, turned as its EXIF data says.

    Raises:
        BadVideo: it is no image that can be decoded.
        InputError: host memory ran out.
    """
    from PIL import ImageOps

    with _readable(source):
        return ImageOps.exif_transpose(_open(source)).convert("RGB")


def image_size(source: Path | io.BytesIO) -> tuple[int, int]:
    """Height and width, upright; the picture is not decoded.

    Raises:
        BadVideo: it is no image.
    """
    with _readable(source):
        image = _open(source)
        turned = image.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS
        return (image.width, image.height) if turned else (image.height, image.width)


def _open(source: Path | io.BytesIO):
    from PIL import Image

    return Image.open(source)


@contextlib.contextmanager
def _readable(source: Path | io.BytesIO):
    """Errors of a file within this context are BadVideo."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except MemoryError as error:
        raise out_of_host_memory(source, error) from error
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadVideo(f"{display_name(source)}: not a readable image ({one_line(error)})") from error
