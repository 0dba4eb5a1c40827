"""The run folder of one server: the model repository that it serves, its deployment, its log and start-up record."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import trt_backend
from trt_backend.config import LEGAL_MODEL_NAME, ConfigError, DeploymentConfig

DEPLOYMENT_VARIABLE = "TRT_BACKEND_DEPLOYMENT"
"""Environment variable that names the JSON file with the deployment's settings. (DHS_* are an operator's settings.)"""
RECORD_VARIABLE = "TRT_BACKEND_STARTUP_RECORD"
"""Environment variable that names the file to which the model writes how its start-up goes (JSON lines)."""

KEPT_LOGS = 5
"""Logs of earlier runs that stay in the run folder, as server.log.1 (the latest) to server.log.5."""
BATCH_SIZE = re.compile(r"^max_batch_size: *\d+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything one server leaves on disk. All but the logs is made anew at each run of `serve`."""

    root: Path

    @property
    def models(self) -> Path:
        """The model repository given to tritonserver."""
        return self.root / "models"

    @property
    def deployment(self) -> Path:
        """The settings, for the model to read."""
        return self.root / "deployment.json"

    @property
    def log(self) -> Path:
        """What tritonserver, the model and `serve` write, in the order of time; restarts are in one file."""
        return self.root / "server.log"

    @property
    def record(self) -> Path:
        """How the model's start-up goes, a JSON object a line."""
        return self.root / "startup.jsonl"

    @property
    def admin_key(self) -> Path:
        """The key for restricted protocols, for this user's eyes only."""
        return self.root / "admin.key"


def make_run_folder(root: Path, model_name: str, config: DeploymentConfig, template: Path | None = None) -> RunFolder:
    """Lay out `root` so that `template` (default: `model_repo/dhs`) is served under `model_name`.

    Raises:
        ConfigError: the name is not legal, or the folder can't be written.
    """
    if not re.fullmatch(LEGAL_MODEL_NAME, model_name):
        raise ConfigError(
            f"model_name={model_name!r}: legal: up to 64 letters, digits, '.', '_', '-', "
            "the first one a letter or digit"
        )
    source = template or default_template()
    folder = RunFolder(root)
    try:
        shutil.rmtree(folder.models, ignore_errors=True)
        shutil.copytree(source, folder.models / model_name, ignore=shutil.ignore_patterns("__pycache__"))
        set_batch_dimension(folder.models / model_name / "config.pbtxt", config.batch_dimension)
        folder.deployment.write_text(config.model_dump_json(indent=2) + "\n")
        folder.record.write_text("")
        keep_earlier_logs(folder.log)
    except OSError as error:
        raise ConfigError(f"state_dir={root.parent}: can't be written: {error}") from error
    return folder


def set_batch_dimension(config: Path, batched: bool) -> None:
    """Write into a model's config.pbtxt whether its tensors begin with a batch dimension (of 1).

    Raises:
        ConfigError: the file has no line `max_batch_size: N`, or several.
    """
    text, count = BATCH_SIZE.subn(f"max_batch_size: {int(batched)}", config.read_text())
    if count != 1:
        raise ConfigError(f"{config}: {count} lines `max_batch_size: N`; batch_dimension needs exactly one to set")
    config.write_text(text)


def keep_earlier_logs(log: Path) -> None:
    """Make way for a new log: server.log becomes server.log.1, that one server.log.2, and so on."""
    for number in range(KEPT_LOGS - 1, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number + 1}"))
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))


def write_secret(path: Path, secret: str) -> None:
    """A file that only this user can read, from its first moment on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")


def default_template() -> Path:
    """`model_repo/dhs`, which is installed beside the package.

    Raises:
        ConfigError: it is not there.
    """
    template = Path(trt_backend.__file__).resolve().parent.parent / "model_repo" / "dhs"
    if not (template / "config.pbtxt").is_file():
        raise ConfigError(f"{template}: config.pbtxt is missing; reinstall adaptive-dhisparse")
    return template


@dataclass(frozen=True, slots=True)
class StartupEvent:
    """One line of the start-up record: what is going on, or (`failed`) why it can't."""

    message: str
    failed: bool = False


def write_event(record: Path | None, event: StartupEvent) -> None:
    """Append one event; without a record (a server that our launcher did not start) it is only printed."""
    print(event.message, flush=True)
    if record is not None:
        with record.open("a") as file:
            file.write(json.dumps({"message": event.message, "failed": event.failed}) + "\n")


def read_events(record: Path) -> list[StartupEvent]:
    """All complete lines so far."""
    lines = record.read_text().split("\n")[:-1] if record.is_file() else []
    return [StartupEvent(**json.loads(line)) for line in lines]
