"""Image files, upright."""

import io
from pathlib import Path

from hf_memopt.errors import one_line
from hf_memopt.video.video_files import BadVideo, display_name, out_of_host_memory

# Of a folder of frames; others in it (a list of times, a thumbnail database) are no frames.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def open_image(source: Path | io.BytesIO):
    """A PIL image in RGB, turned as its EXIF data says.

    Raises:
        BadVideo: it is no image that can be decoded.
        InputError: host memory ran out.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        return ImageOps.exif_transpose(Image.open(source)).convert("RGB")
    except MemoryError as error:
        raise out_of_host_memory(source, error) from error
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadVideo(f"{display_name(source)}: not a readable image ({one_line(error)})") from error
