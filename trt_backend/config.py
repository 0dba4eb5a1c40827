"""One deployment's settings, validated before anything is allocated. A wrong config never starts."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ConfigError(Exception):
    """A setting, checkpoint or file that can't be used. The message names file, key, value and legal range."""


class Residency(StrEnum):
    """Where the rows of a session's history live while it decodes."""

    RESIDENT = "resident"
    HISPARSE = "hisparse"


class RowFormat(StrEnum):
    """How a KV row is stored. fp8 is the 656-byte layout of GLM-5.3 (its sizes follow the model's)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class DeploymentConfig(BaseModel):
    """What `serve` and `generate` run. Sizes in tokens or pages of `page_tokens` tokens.

    `hot_tokens` (B), `device_pages` and `host_pages` may be left out: B becomes twice the model's top-k, rounded up
    to pages; the pools become large enough for `max_sessions` sessions in the chosen residency.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "glm53-tiny"
    residency: Residency = Residency.HISPARSE
    row_format: RowFormat = RowFormat.FP32
    page_tokens: Annotated[int, Field(ge=16, le=1024, multiple_of=16)] = 64
    hot_tokens: Annotated[int, Field(ge=16)] | None = None
    device_pages: Annotated[int, Field(ge=1)] | None = None
    host_pages: Annotated[int, Field(ge=1)] | None = None
    max_sessions: Annotated[int, Field(ge=1, le=4096)] = 32
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    prefill_chunk_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    queue_limit: Annotated[int, Field(ge=1)] = 256
    threads: Annotated[int, Field(ge=1, le=256)] | None = None


def load_deployment(path: Path) -> DeploymentConfig:
    """Read a deployment from a JSON file.

    Raises:
        ConfigError: the file is missing, not JSON, or has a wrong key or value.
    """
    try:
        raw = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as JSON: {error}") from error
    return parse_deployment(raw, str(path))


def parse_deployment(raw: object, origin: str) -> DeploymentConfig:
    """Validate settings that came from `origin` (a file, or "command line").

    Raises:
        ConfigError: naming origin, key, value and what is legal, one line a fault.
    """
    try:
        return DeploymentConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(describe_faults(error, origin)) from error


def describe_faults(error: ValidationError, origin: str) -> str:
    """One line a fault: origin, key, value, and the rule it breaks."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        lines.append(f"{origin}: {key}={fault['input']!r}: {fault['msg']}")
    return "\n".join(lines)
