"""Ports of this machine: which are free, and whether those of a server are."""

from __future__ import annotations

import socket

from trt_backend.config import LOOPBACK, ConfigError, ServerConfig
from trt_backend.settings import SERVER, flag_of


def require_free_ports(config: ServerConfig) -> None:
    """Refuse to start where Triton would fail half-way.

    Raises:
        ConfigError: a port is named twice, or somebody listens on it.
    """
    seen: dict[int, str] = {}
    for (key, port), address in zip(config.ports().items(), config.addresses().values(), strict=True):
        if port in seen:
            raise ConfigError(f"{SERVER}.{key}={port}: already used by {SERVER}.{seen[port]}; name another port")
        seen[port] = key
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise ConfigError(
                    f"{SERVER}.{key}={port}: can't listen on {address}:{port} ({error.strerror}); "
                    f"name another port with {flag_of(key)}"
                ) from error


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((str(LOOPBACK), 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def on_free_ports(config: ServerConfig) -> ServerConfig:
    """The same server on three ports that nobody listens on now."""
    return config.model_copy(update=dict(zip(config.ports(), free_ports(3), strict=True)))
