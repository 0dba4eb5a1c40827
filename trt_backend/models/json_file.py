"""Reading the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trt_backend.config import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: the file is missing, or not a JSON object.
    """
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a JSON object, found {type(raw).__name__}")
    return raw
