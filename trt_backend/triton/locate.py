"""Finds a tritonserver and makes it startable: an installed one, or the one inside the nvidia-pytriton wheel."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from trt_backend.config import ConfigError

STUB = "triton_python_backend_stub"
INSTALLED_FOLDER = Path("/opt/tritonserver")
"""Where NVIDIA's containers put it."""


@dataclass(frozen=True, slots=True)
class ServerHome:
    """A tritonserver that can be started.

    `variables` are environment variables that it needs in front of what is already there (`PATH`-like lists).
    """

    binary: Path
    backends: Path
    origin: str
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The environment to start it in: ours, with this interpreter's `python3` first on PATH.

        The Python backend's stub takes its packages from the first `python3` on PATH and from nowhere else.
        """
        environment = dict(os.environ)
        for name, front in {"PATH": str(Path(sys.executable).parent), **self.variables}.items():
            rest = environment.get(name)
            environment[name] = f"{front}{os.pathsep}{rest}" if rest else front
        return environment


def find_server(explicit: Path | None = None) -> ServerHome:
    """The tritonserver named by `explicit` or by TRITONSERVER, else an installed one, else the wheel's.

    Raises:
        ConfigError: the named one does not exist, or there is none at all.
    """
    named = explicit or (Path(os.environ["TRITONSERVER"]) if os.environ.get("TRITONSERVER") else None)
    if named is not None:
        option = "--tritonserver" if explicit else "TRITONSERVER"
        if not (named.is_file() and os.access(named, os.X_OK)):
            raise ConfigError(f"{option}={named}: not an executable file; legal: the path of a tritonserver binary")
        return installed_server(named, option)
    on_path = shutil.which("tritonserver")
    for binary in (Path(on_path) if on_path else None, INSTALLED_FOLDER / "bin" / "tritonserver"):
        if binary is not None and binary.is_file():
            return installed_server(binary, "installed")
    return wheel_server()


def installed_server(binary: Path, origin: str) -> ServerHome:
    """A tritonserver with its backends beside it (`bin/tritonserver`, `backends/python`).

    Raises:
        ConfigError: the Python backend is missing there.
    """
    backends = binary.resolve().parent.parent / "backends"
    if not (backends / "python" / STUB).is_file():
        raise ConfigError(
            f"{binary}: no Python backend at {backends / 'python' / STUB}; "
            "name a tritonserver that has one with --tritonserver, or install the nvidia-pytriton wheel"
        )
    return ServerHome(binary, backends, origin)


def wheel_server() -> ServerHome:
    """The tritonserver of the nvidia-pytriton wheel.

    The wheel keeps the stubs of all Python versions outside its backends folder, where the server does not look, so
    the backends are copied once to the user's cache together with the stub of the running Python.

    Raises:
        ConfigError: the wheel is not installed, or has no stub for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "no tritonserver: none named by --tritonserver or TRITONSERVER, none on PATH, none in "
            f"{INSTALLED_FOLDER}, and the nvidia-pytriton wheel is not installed; fix: pip install nvidia-pytriton"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = package / "tritonserver" / "python_backend_stubs" / python / STUB
    if not stub.is_file():
        have = sorted(folder.name for folder in stub.parent.parent.glob("*"))
        raise ConfigError(f"nvidia-pytriton has no stub for Python {python}; legal: one of {', '.join(have)}")
    version = importlib.metadata.version("nvidia-pytriton")
    home = prepare_wheel(package, stub, cache_folder() / f"pytriton-{version}-py{python}-{path_key(package)}")
    variables = {}
    library_folder = shared_libpython()
    if library_folder is not None:
        variables["LD_LIBRARY_PATH"] = str(library_folder.parent)
    return ServerHome(
        binary=package / "tritonserver" / "bin" / "tritonserver",
        backends=home,
        origin=f"nvidia-pytriton {version}",
        variables=variables,
    )


def prepare_wheel(package: Path, stub: Path, target: Path) -> Path:
    """Copy the wheel's backends and `stub` under `target`, unless that was done before; returns the backends folder.

    The libraries find their own dependencies four folders up, in `nvidia_pytriton.libs`: a link keeps that true.
    """
    backends = target / "pytriton" / "tritonserver" / "backends"
    libraries = package.parent / "nvidia_pytriton.libs"
    if (backends / "python" / STUB).is_file() and (target / libraries.name).exists():
        return backends
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".prepare-") as folder:
        draft = Path(folder) / "home"
        shutil.copytree(package / "tritonserver" / "backends", draft / "pytriton" / "tritonserver" / "backends")
        shutil.copy2(stub, draft / "pytriton" / "tritonserver" / "backends" / "python" / STUB)
        (draft / libraries.name).symlink_to(libraries)
        if target.exists():
            shutil.rmtree(target)
        try:
            draft.rename(target)
        except OSError:
            # Another process prepared the same folder in the meantime: its copy is as good.
            if not (backends / "python" / STUB).is_file():
                raise
    return backends


def shared_libpython() -> Path | None:
    """The shared library of the running Python, which the stub loads; None if this Python has none."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or not folder or not name:
        return None
    library = Path(folder) / name
    return library if library.is_file() else None


def cache_folder() -> Path:
    """Where prepared servers are kept: `adaptive-dhisparse` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "adaptive-dhisparse"


def path_key(path: Path) -> str:
    """A short name for a folder, so that two environments never share one prepared copy."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:10]
