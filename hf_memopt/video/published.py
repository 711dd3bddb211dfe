"""Video processor settings of published checkpoints, for estimates that read no files of the checkpoint.

A file of preprocessors/ has the name of a bundled architecture, and says what the file at its `source` says of videos:
video_preprocessor_config.json of the checkpoint, or preprocessor_config.json where it has no other. The class defaults
of transformers are no substitute: Qwen2.5-VL's allow a frame of 0.6 megapixels, its checkpoints one of 12.8.
"""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "preprocessors"


def published_settings(model: str) -> dict[str, Any]:
    """Settings of a bundled architecture's name or of the hub id in its `source`; empty for others."""
    name = str(model)
    if "/" not in name:
        path = _FOLDER / f"{name.lower()}.json"
        return _read(path) if path.is_file() else {}
    source = f"https://huggingface.co/{name}/"
    contents = (_read(path) for path in sorted(_FOLDER.glob("*.json")))
    return next((content for content in contents if content["source"].startswith(source)), {})


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
