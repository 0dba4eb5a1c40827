"""A Hugging Face checkpoint folder: tensors by name, out of one safetensors file or of indexed shards.

Knows no architecture. Everything that can be wrong with a file is found before a model is built on it, and says which
file, which key, what was found and what was expected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trt_backend.config import ConfigError
from trt_backend.models.json_file import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """An opened checkpoint. Tensors are read when asked for; only headers are read before."""

    def __init__(self, folder: Path, shard_of: dict[str, Path], shards: dict[Path, Any]) -> None:
        """Use `open`."""
        self.folder = folder
        self._shard_of = shard_of
        self._shards = shards

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the index and the header of every shard.

        Raises:
            ConfigError: the folder, the index or a shard is missing or damaged, or the index names a tensor that its
                shard does not hold.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder}: not a folder; a checkpoint is a folder with {SINGLE_FILE} or {INDEX_FILE}")
        index = folder / INDEX_FILE
        if not index.exists():
            path = folder / SINGLE_FILE
            if not path.exists():
                raise ConfigError(f"{folder}: no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards")
            shard = _open_shard(path)
            return cls(folder, dict.fromkeys(shard.keys(), path), {path: shard})
        shard_of = _read_index(index)
        shards = {path: _open_shard(path) for path in sorted(set(shard_of.values()))}
        held = {path: frozenset(shard.keys()) for path, shard in shards.items()}
        for name, path in shard_of.items():
            if name not in held[path]:
                raise ConfigError(f"{index}: weight_map[{name!r}]={path.name!r}, but that shard has no such tensor")
        return cls(folder, shard_of, shards)

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one tensor, widened to float32.

        Raises:
            ConfigError: it is missing, damaged, of another shape, quantised, or holds NaN or infinity.
        """
        if name not in self._shard_of:
            raise ConfigError(f"{self.folder}: tensor {name!r} is missing; expected shape {list(shape)}")
        path = self._shard_of[name]
        try:
            found = self._shards[path].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{path}: tensor {name!r} can't be read: {error}") from error
        assert isinstance(found, torch.Tensor)
        if tuple(found.shape) != shape:
            raise ConfigError(
                f"{path}: tensor {name!r} has shape {list(found.shape)}; the configuration makes it {list(shape)}"
            )
        if found.dtype not in _PLAIN:
            raise ConfigError(
                f"{path}: tensor {name!r} has dtype {_dtype_name(found.dtype)}; legal dtypes: "
                f"{', '.join(_dtype_name(dtype) for dtype in _PLAIN)} (quantised checkpoints are not supported)"
            )
        wide = found.to(torch.float32)
        low, high = wide.aminmax()  # both are NaN if any weight is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = int((~torch.isfinite(wide)).sum())
            raise ConfigError(f"{path}: tensor {name!r} has {bad} of {wide.numel()} values that are NaN or infinite")
        return wide


def _read_index(index: Path) -> dict[str, Path]:
    """Tensor names and the files that hold them."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map={weight_map!r} must map tensor names to shard files")
    shard_of: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index}: weight_map[{name!r}]={file!r} must be the name of a file in the same folder")
        shard_of[name] = index.parent / file
    return shard_of


def _open_shard(path: Path) -> Any:
    """Map a safetensors file; its header is checked against its size here."""
    if not path.is_file():
        raise ConfigError(f"{path}: this shard is missing")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path}: not a whole safetensors file ({path.stat().st_size} bytes found): {error}"
        ) from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
