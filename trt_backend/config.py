"""What an operator can set: name, type, legal range, default and meaning of every setting, each written once.

`trt_backend.settings` reads them from flags, the environment and a file. A wrong config never starts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

LEGAL_MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
LEGAL_ADMIN_KEY = re.compile(r"[A-Za-z0-9._-]{16,128}")
"""Triton takes the key from a command line in which commas, colons and equals signs have a meaning."""


class ConfigError(Exception):
    """A setting, checkpoint or file that can't be used. The message names file, key, value and legal range."""


class Residency(StrEnum):
    """Where the rows of a session's history live while it decodes."""

    RESIDENT = "resident"
    HISPARSE = "hisparse"
    ADAPTIVE = "adaptive"


class ReclaimOrder(StrEnum):
    """Whose optional memory is taken back first; see `kv.reclaim`."""

    OLDEST = "oldest"
    NEWEST = "newest"
    LARGEST = "largest"
    COLDEST = "coldest"


class RowFormat(StrEnum):
    """How a KV row is stored. fp8 is the 656-byte layout of GLM-5.3 (its sizes follow the model's)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class LogFormat(StrEnum):
    """How a line of our log is written; the fields are the same."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ServerProtocol(StrEnum):
    """Groups of Triton's calls that can be restricted to holders of the admin key; the names are Triton's."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


class DeploymentConfig(BaseModel):
    """What `serve` and `generate` run. Sizes in tokens or pages of `page_tokens` tokens.

    `hot_tokens` (B), `device_pages` and `host_pages` may be left out: B becomes twice the model's top-k, rounded up
    to pages; the pools become large enough for `max_sessions` sessions in the chosen residency.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(default="glm53-tiny", description="shipped model, or checkpoint folder")
    residency: Residency = Field(default=Residency.ADAPTIVE, description="where histories live")
    row_format: RowFormat = Field(default=RowFormat.FP32, description="how a KV row is stored")
    page_tokens: int = Field(default=64, ge=16, le=1024, multiple_of=16, description="positions in a page")
    hot_tokens: int | None = Field(default=None, ge=16, description="hot cache of a session, B, in tokens")
    device_pages: int | None = Field(default=None, ge=1, description="pages in the device pool")
    host_pages: int | None = Field(default=None, ge=1, description="pages in the host pool")
    max_sessions: int = Field(default=32, ge=1, le=4096, description="sessions at once")
    max_model_len: int | None = Field(default=None, ge=2, description="longest prompt and answer together, in tokens")
    prefill_chunk_tokens: int = Field(default=512, ge=16, le=65536, description="prompt tokens in a step")
    queue_limit: int = Field(default=256, ge=1, description="requests that may wait")
    threads: int | None = Field(default=None, ge=1, le=256, description="CPU threads of the engine")
    default_max_tokens: int = Field(default=256, ge=1, description="new tokens at most, where a request does not say")
    exclude_input_in_output: bool = Field(default=True, description="leave the prompt out of answers, unless asked for")
    batch_dimension: bool = Field(default=True, description="clients send [1, n] tensors; otherwise [n]")
    reclaim_order: ReclaimOrder = Field(default=ReclaimOrder.OLDEST, description="whose optional pages are taken first")
    reserve_pages: int | None = Field(default=None, ge=0, description="free pages that only admissions may use")
    refill_hysteresis_pages: int | None = Field(
        default=None, ge=0, description="pages above the reserve that refills leave free"
    )
    refill_pages_per_tick: int = Field(default=64, ge=1, description="pages brought back to the device in a tick")
    backup_pages_per_tick: int = Field(default=4, ge=0, description="dirty pages copied to the host in a tick")
    promote_decode_pages: bool = Field(default=True, description="keep pages that decoding fills, while there is room")
    transfer_timeout_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="a request whose rows take longer to copy fails"
    )
    stall_seconds: float = Field(default=60.0, gt=0, le=86400, description="time without a step, though there is work")


def _split(value: Any) -> Any:
    """ "trace, logging" → ["trace", "logging"]: a list as flags and the environment have it."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _require_key(value: SecretStr) -> SecretStr:
    if not LEGAL_ADMIN_KEY.fullmatch(value.get_secret_value()):
        raise ValueError("legal: 16 to 128 letters, digits, '.', '_', '-'")
    return value


ADMINISTRATIVE = (
    ServerProtocol.MODEL_REPOSITORY,
    ServerProtocol.SHARED_MEMORY,
    ServerProtocol.TRACE,
    ServerProtocol.LOGGING,
)
LOOPBACK = IPv4Address("127.0.0.1")


class ServerConfig(BaseModel):
    """How `serve` runs tritonserver around a deployment. Times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model_name: str | None = Field(
        default=None, pattern=LEGAL_MODEL_NAME, description="name to serve under; the model's if none"
    )
    http_port: int = Field(default=8000, ge=1, le=65535, description="port of HTTP")
    grpc_port: int = Field(default=8001, ge=1, le=65535, description="port of gRPC")
    metrics_port: int = Field(default=8002, ge=1, le=65535, description="port of the metrics")
    http_address: IPv4Address = Field(default=LOOPBACK, description="IPv4 address HTTP listens on; 0.0.0.0 is all")
    grpc_address: IPv4Address = Field(default=LOOPBACK, description="IPv4 address gRPC listens on")
    metrics_address: IPv4Address = Field(default=LOOPBACK, description="IPv4 address the metrics port listens on")
    grpc_use_ssl: bool = Field(default=False, description="TLS on the gRPC port")
    grpc_use_ssl_mutual: bool = Field(default=False, description="TLS on the gRPC port, for clients with a certificate")
    grpc_server_cert: Path | None = Field(default=None, description="PEM file with the server's certificate")
    grpc_server_key: Path | None = Field(default=None, description="PEM file with the server's key")
    grpc_root_cert: Path | None = Field(default=None, description="PEM file with the roots of clients' certificates")
    restricted_protocols: Annotated[tuple[ServerProtocol, ...], BeforeValidator(_split)] = Field(
        default=ADMINISTRATIVE, description="groups of Triton's calls that need the admin key"
    )
    admin_key: Annotated[SecretStr, AfterValidator(_require_key)] | None = Field(
        default=None, description="key for restricted protocols; made anew at each start if none"
    )
    startup_seconds: float = Field(default=600.0, gt=0, le=86400, description="time to get ready")
    drain_seconds: float = Field(
        default=10.0, ge=0, le=86400, description="time for running streams to finish after a stop"
    )
    canary_seconds: float = Field(
        default=5.0, ge=0.1, le=3600, description="between two inferences that prove the model alive"
    )
    canary_timeout_seconds: float = Field(default=30.0, ge=1, le=3600, description="longest time without a good one")
    max_restarts: int = Field(
        default=2, ge=0, le=1000, description="restarts within the window; the next crash ends serve"
    )
    restart_window_seconds: float = Field(
        default=60.0, gt=0, le=86400, description="window, in time in which the model served"
    )
    restart_backoff_seconds: float = Field(
        default=1.0, ge=0, le=60, description="wait before a restart; doubles with each"
    )
    log_format: LogFormat = Field(default=LogFormat.TEXT, description="how lines of our log are written")
    log_level: LogLevel = Field(default=LogLevel.INFO, description="least important lines in the log")
    tritonserver: Path | None = Field(default=None, description="binary to run; else TRITONSERVER, PATH, the wheel's")
    state_dir: Path = Field(default=Path(".server"), description="where logs and the run's model repository go")

    def ports(self) -> dict[str, int]:
        """Setting → port."""
        return {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}

    def addresses(self) -> dict[str, str]:
        """Protocol → the address it listens on."""
        return {
            "http": str(self.http_address),
            "grpc": str(self.grpc_address),
            "metrics": str(self.metrics_address),
        }


class _UniqueKeys(yaml.SafeLoader):
    """YAML's loaders let the second of two equal keys win without a word; this one refuses the file."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key_node.value} twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file whose top level has keys; JSON is YAML, too.

    Raises:
        ConfigError: the file is missing, not YAML, has a key twice, or is something else at its top level.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: can't be read as YAML: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: (top level)={raw!r}: legal: settings, one `key: value` a line")
    return {str(key): value for key, value in raw.items()}


def load_deployment(path: Path) -> DeploymentConfig:
    """Read settled settings, as `serve` hands them to the model's process: no environment, no `server` section.

    Raises:
        ConfigError: the file is missing, not YAML, or has a wrong key or value.
    """
    try:
        return DeploymentConfig.model_validate(read_mapping(path))
    except ValidationError as error:
        raise ConfigError(describe_faults(error, str(path))) from error


def describe_faults(error: ValidationError, origin: str) -> str:
    """One line a fault: origin, key, value, and the rule it breaks."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        lines.append(f"{origin}: {key}={fault['input']!r}: {fault['msg']}")
    return "\n".join(lines)
