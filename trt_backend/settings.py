"""Where settings come from: flags over the environment over a file over defaults, and a record of which it was.

A setting is known by its key in the file: `max_sessions`, or `server.http_port` for those of the `server` section.
Its variable is `DHS_MAX_SESSIONS` or `DHS_SERVER_HTTP_PORT`, its flag `--max-sessions` or `--http-port`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import annotated_types
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from trt_backend.config import ConfigError, DeploymentConfig, ServerConfig, read_mapping

SERVER = "server"
ENVIRONMENT_PREFIX = "DHS_"
DEFAULT = "default"
SECTIONS: dict[str, type[BaseModel]] = {"": DeploymentConfig, f"{SERVER}.": ServerConfig}
FIELDS: dict[str, FieldInfo] = {
    prefix + name: field for prefix, section in SECTIONS.items() for name, field in section.model_fields.items()
}
"""Every setting by its key."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, validated. `sources` says where each key that is not a default was written."""

    deployment: DeploymentConfig
    server: ServerConfig
    sources: dict[str, str]

    def table(self) -> list[tuple[str, Any, str]]:
        """(key, value, source) of every setting; values as JSON has them, secrets masked."""
        values = _flat(self.deployment.model_dump(mode="json") | {SERVER: self.server.model_dump(mode="json")})
        return [(key, values[key], self.sources.get(key, DEFAULT)) for key in FIELDS]


def variable_of(key: str) -> str:
    """The environment variable that sets `key`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def flag_of(key: str) -> str:
    """The command-line option that sets `key`."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


def is_secret(field: FieldInfo) -> bool:
    """Whether a value must not be shown, nor written on a command line, where every user of the machine can read it."""
    return SecretStr in _types(field)


def legal_values(field: FieldInfo) -> str:
    """ "16 to 1024, multiples of 16", "resident, hisparse": the range of a setting in words; empty if it has none."""
    choices = [choice.value for kind in _types(field) for choice in (kind if issubclass(kind, Enum) else ())]
    if choices:
        return ", ".join(choices)
    low = high = multiple = ""
    for rule in field.metadata:
        if isinstance(rule, annotated_types.Ge):
            low = f"{rule.ge:g}"
        elif isinstance(rule, annotated_types.Gt):
            low = f"more than {rule.gt:g}"
        elif isinstance(rule, annotated_types.Le):
            high = f"{rule.le:g}"
        elif isinstance(rule, annotated_types.MultipleOf):
            multiple = f", multiples of {rule.multiple_of}"
    return (f"{low} to {high}" if high else f"{low} and up") + multiple if low else ""


def read_settings(
    file: Path | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    preset: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings by key from `flags`, `environment` and `file`; `preset` has a command's own defaults.

    Raises:
        ConfigError: a line for each fault: where it is written, key, value and what is legal.
    """
    written: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for values, origins in (
        (dict(preset or {}), dict.fromkeys(preset or {}, DEFAULT)),
        _read_file(file),
        _read_environment(environment),
        (dict(flags), {key: flag_of(key) for key in flags}),
    ):
        _validate(values, origins)
        written |= values
        sources |= origins
    sections = _validate(written, sources)
    settings = Settings(DeploymentConfig(**sections[""]), ServerConfig(**sections[f"{SERVER}."]), sources)
    _require_tls_files(settings)
    return settings


def _read_file(file: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    if file is None:
        return {}, {}
    raw = read_mapping(file)
    server = raw.get(SERVER)
    if server is None:
        raw.pop(SERVER, None)
    elif not isinstance(server, dict):
        raise ConfigError(
            f"{file}: {SERVER}={server!r}: legal: settings of the server, one indented `key: value` a line"
        )
    values = _flat(raw)
    _refuse(
        f"{file}: {key}={value!r}: unknown setting; the nearest legal one is {_nearest(key, [*FIELDS, SERVER])}"
        for key, value in values.items()
        if key not in FIELDS
    )
    return values, dict.fromkeys(values, str(file))


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    keys = {variable_of(key): key for key in FIELDS}
    ours = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    _refuse(  # without the values: a misspelt variable may hold a secret
        f"environment {name}: unknown variable; the nearest legal one is {_nearest(name, keys)}"
        for name in ours
        if name not in keys
    )
    return {keys[name]: value for name, value in ours.items()}, {keys[name]: f"environment {name}" for name in ours}


def _nearest(name: str, legal: Iterable[str]) -> str:
    return difflib.get_close_matches(name, list(legal), n=1, cutoff=0.0)[0]


def _refuse(faults: Iterable[str]) -> None:
    lines = list(faults)
    if lines:
        raise ConfigError("\n".join(lines))


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The values by section.

    Raises:
        ConfigError: one line a fault.
    """
    sections: dict[str, dict[str, Any]] = {}
    faults = []
    for prefix, section in SECTIONS.items():
        given = {name: values[prefix + name] for name in section.model_fields if prefix + name in values}
        sections[prefix] = given
        try:
            section.model_validate(given)
        except ValidationError as error:
            keys = [(prefix + str(fault["loc"][0]), fault["msg"]) for fault in error.errors()]
            faults += [_fault(key, values[key], message, origins) for key, message in keys]
        # Python's True is the number 1, so `max_sessions: yes` would be one session.
        wrong = [name for name in given if isinstance(given[name], bool) and bool not in _types(FIELDS[prefix + name])]
        faults += [_fault(prefix + name, given[name], "Input is a truth value", origins) for name in wrong]
    _refuse(faults)
    return sections


def _fault(key: str, value: Any, message: str, origins: Mapping[str, str]) -> str:
    field = FIELDS[key]
    legal = legal_values(field)
    shown = "********" if is_secret(field) else repr(value)
    return f"{origins[key]}: {key}={shown}: {message}" + (f"; legal: {legal}" if legal else "")


def _require_tls_files(settings: Settings) -> None:
    """Triton ignores certificates while TLS is off, and says which file it lacks only in its log.

    Raises:
        ConfigError: naming the setting that is missing or too many, or the file that can't be read.
    """
    server = settings.server
    files = {
        "grpc_server_cert": (server.grpc_server_cert, server.grpc_use_ssl or server.grpc_use_ssl_mutual),
        "grpc_server_key": (server.grpc_server_key, server.grpc_use_ssl or server.grpc_use_ssl_mutual),
        "grpc_root_cert": (server.grpc_root_cert, server.grpc_use_ssl_mutual),
    }
    for name, (path, needed) in files.items():
        key = f"{SERVER}.{name}"
        switch = "grpc_use_ssl_mutual" if name == "grpc_root_cert" else "grpc_use_ssl or grpc_use_ssl_mutual"
        if path is None:
            if needed:
                raise ConfigError(f"{key} is not set: {switch} needs it; legal: a PEM file")
        elif not needed:
            raise ConfigError(f"{settings.sources[key]}: {key}={path}: would be ignored; set {switch}, too")
        elif not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(f"{settings.sources[key]}: {key}={path}: not a readable file; legal: a PEM file")


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    server = nested.get(SERVER, {})
    flat = {key: value for key, value in nested.items() if key != SERVER}
    return flat | {f"{SERVER}.{key}": value for key, value in server.items()}


def _types(field: FieldInfo) -> list[type]:
    """The types a value may have: `int` of `int | None`, `Residency` of `tuple[Residency, ...]`."""
    found = [field.annotation]
    while any(get_args(kind) for kind in found):
        found = [part for kind in found for part in (get_args(kind) or (kind,))]
    return [kind for kind in found if isinstance(kind, type) and kind is not type(None)]
