"""The way in: callers name a folder or a preset, and never a model family.

Reading a configuration and working out a layout import no torch; loading a model does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_backend.config import ConfigError, RowFormat
from trt_backend.kv.layout import KvLayout
from trt_backend.models import glm_config
from trt_backend.models.json_file import read_json
from trt_backend.models.state import Model, ModelConfig

PRESETS_DIR = Path(__file__).parent / "presets"
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Family:
    """What a model family brings: its configuration, the layout of its rows, and how to load it."""

    parse_config: Callable[[object, str], Any]
    kv_layout: Callable[[Any, RowFormat, int, int], KvLayout]
    load: Callable[[Path, Any, RowFormat], Model]


def _load_glm(folder: Path, config: glm_config.GlmMoeDsaConfig, row_format: RowFormat) -> Model:
    from trt_backend.models.checkpoint import Checkpoint
    from trt_backend.models.glm_moe_dsa import GlmMoeDsa

    return GlmMoeDsa.load(Checkpoint.open(folder), config, row_format)


FAMILIES = {
    glm_config.MODEL_TYPE: Family(glm_config.parse_glm_config, glm_config.kv_layout, _load_glm),
}


def preset_names() -> tuple[str, ...]:
    """Models whose configuration ships with the project, without weights."""
    return tuple(sorted(path.stem for path in PRESETS_DIR.glob("*.json")))


def read_config(source: str | Path) -> ModelConfig:
    """Read the configuration of a checkpoint folder, or a preset by name. A folder of that name comes first.

    Raises:
        ConfigError: there is no such folder or preset, or the configuration can't be used.
    """
    path = Path(source) / CONFIG_FILE
    if not Path(source).is_dir():
        path = PRESETS_DIR / f"{source}.json"
        if str(source) not in preset_names():
            raise ConfigError(
                f"model={str(source)!r} is neither a checkpoint folder nor a preset; "
                f"presets: {', '.join(preset_names())}"
            )
    raw = read_json(path)
    return _family(raw.get("model_type"), str(path)).parse_config(raw, str(path))  # type: ignore[no-any-return]


def kv_layout(config: ModelConfig, row_format: RowFormat, page_tokens: int, hot_tokens: int) -> KvLayout:
    """What a session of this model costs. Sizes in tokens; `hot_tokens` 0 means no hot cache.

    Raises:
        ConfigError: the row format does not fit the model.
        ValueError: `page_tokens` or `hot_tokens` is not legal (see `KvLayout`).
    """
    return FAMILIES[config.model_type].kv_layout(config, row_format, page_tokens, hot_tokens)


def load_model(folder: Path, row_format: RowFormat) -> Model:
    """Load a checkpoint folder (config.json and safetensors) onto the CPU.

    Raises:
        ConfigError: anything is missing, damaged, of the wrong shape or not supported.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder; a model is a folder with {CONFIG_FILE} and safetensors files")
    config = read_config(folder)
    family = FAMILIES[config.model_type]
    family.kv_layout(config, row_format, 1, 0)  # a row format that does not fit should fail before weights are read
    return family.load(folder, config, row_format)


def _family(model_type: object, origin: str) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"{origin}: model_type={model_type!r} is not supported; legal values: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
