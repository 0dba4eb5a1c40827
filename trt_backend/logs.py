"""Our log: lines of text or of JSON with the same fields, the id of the request among them where there is one.

A line's own fields come with `extra`: `log.info("cancelled", extra={"request_id": request_id})`.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from trt_backend.config import LogFormat, LogLevel

FORMAT_VARIABLE = "TRT_BACKEND_LOG_FORMAT"
LEVEL_VARIABLE = "TRT_BACKEND_LOG_LEVEL"
"""Environment variables in which `serve` tells the model's process how to log."""
NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}
"""Python's names of the fields → ours."""


class _JsonLines(JsonFormatter):
    """One JSON object a line: time, level, logger, message, the line's own fields, and `exc_info` for a traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=NAMES)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """ISO 8601 in UTC."""
        return _time(record)


class _TextLines(logging.Formatter):
    """`time LEVEL logger: message key=value ...`, and a traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without its traceback."""
        own = "".join(f" {key}={value}" for key, value in _own_fields(record).items())
        return f"{_time(record)} {record.levelname} {record.name}: {record.message}{own}"


def set_up_logging(log_format: LogFormat, level: LogLevel, file: Path | None = None) -> None:
    """Write all of this process's log in one format: at the end of `file`, or to standard error."""
    handler = logging.FileHandler(file, mode="a") if file is not None else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_format is LogFormat.JSON else _TextLines())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)


def set_up_model_logging() -> None:
    """In the model's process: log as `serve` does. Without a `serve`, as text from level info on."""
    log_format = LogFormat(os.environ.get(FORMAT_VARIABLE, LogFormat.TEXT))
    set_up_logging(log_format, LogLevel(os.environ.get(LEVEL_VARIABLE, LogLevel.INFO)))


def model_variables(log_format: LogFormat, level: LogLevel) -> dict[str, str]:
    """What the model's process needs in its environment for `set_up_model_logging`."""
    return {FORMAT_VARIABLE: log_format.value, LEVEL_VARIABLE: level.value}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _own_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in RESERVED_ATTRS}
