"""The run folder of one server: the model repository that it serves, its deployment, its log and start-up record."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import trt_backend
from trt_backend.config import ConfigError, DeploymentConfig

DEPLOYMENT_VARIABLE = "DHS_DEPLOYMENT"
"""Environment variable that names the JSON file with the deployment's settings."""
RECORD_VARIABLE = "DHS_STARTUP_RECORD"
"""Environment variable that names the file to which the model writes how its start-up goes (JSON lines)."""

LEGAL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything one server leaves on disk. `root` is made anew at each start."""

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
        """What tritonserver and the model print."""
        return self.root / "server.log"

    @property
    def record(self) -> Path:
        """How the model's start-up goes, a JSON object a line."""
        return self.root / "startup.jsonl"


def make_run_folder(root: Path, model_name: str, config: DeploymentConfig, template: Path | None = None) -> RunFolder:
    """Lay out `root` so that `template` (default: `model_repo/dhs`) is served under `model_name`.

    Raises:
        ConfigError: the name is not legal, or the folder can't be written.
    """
    if not LEGAL_NAME.fullmatch(model_name):
        raise ConfigError(
            f"command line: model-name={model_name!r}: legal: up to 64 letters, digits, '.', '_', '-', "
            "the first one a letter or digit"
        )
    source = template or default_template()
    folder = RunFolder(root)
    try:
        if root.exists():
            shutil.rmtree(root)
        shutil.copytree(source, folder.models / model_name, ignore=shutil.ignore_patterns("__pycache__"))
        folder.deployment.write_text(config.model_dump_json(indent=2) + "\n")
        folder.record.touch()
    except OSError as error:
        raise ConfigError(f"command line: state-dir={root.parent}: can't be written: {error}") from error
    return folder


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
