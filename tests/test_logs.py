"""Lines of the log in both formats."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from trt_backend.config import LogFormat, LogLevel
from trt_backend.logs import model_variables, set_up_logging, set_up_model_logging

log = logging.getLogger("trt_backend.here")


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """The root logger is everybody's: leave it as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level


def write(file: Path, log_format: LogFormat) -> list[str]:
    set_up_logging(log_format, LogLevel.INFO, file)
    log.debug("not for anybody")
    log.info("cancelled %d", 3, extra={"request_id": "r-1", "tokens": 7})
    try:
        raise ValueError("no such luck")
    except ValueError:
        log.exception("failed")
    return file.read_text().splitlines()


def test_json_and_text_have_the_same_fields_the_requests_id_among_them(tmp_path: Path) -> None:
    first, second = map(json.loads, write(tmp_path / "json", LogFormat.JSON))
    fields = {"level": "INFO", "logger": "trt_backend.here", "message": "cancelled 3", "request_id": "r-1", "tokens": 7}
    assert {key: value for key, value in first.items() if key != "time"} == fields
    assert second["exc_info"].endswith("ValueError: no such luck")
    text = write(tmp_path / "text", LogFormat.TEXT)
    time, rest = text[0].split(" ", 1)
    assert rest == "INFO trt_backend.here: cancelled 3 request_id=r-1 tokens=7"
    assert len(time) == len(first["time"]) == len("2026-11-30T22:25:29.910+00:00")
    assert text[-1] == "ValueError: no such luck"


def test_a_log_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    write(tmp_path / "log", LogFormat.JSON)
    assert len(write(tmp_path / "log", LogFormat.JSON)) == 4


def test_the_models_process_logs_as_serve_told_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in model_variables(LogFormat.JSON, LogLevel.WARNING).items():
        monkeypatch.setenv(name, value)
    set_up_model_logging()
    log.info("not for anybody")
    log.warning("late", extra={"request_id": "r-2"})
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["request_id"] == "r-2"
