"""Checkpoints: what is read, and what each fault says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.reference import random_reference
from trt_backend.config import ConfigError, RowFormat
from trt_backend.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from trt_backend.models.registry import load_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of a small model."""
    folder = tmp_path_factory.mktemp("whole")
    random_reference(folder, num_hidden_layers=2)
    return json.loads((folder / "config.json").read_text()), load_file(folder / SINGLE_FILE)


@pytest.fixture
def folder(tmp_path: Path, weights: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> Path:
    """The same model in two shards, to be damaged."""
    config, tensors = weights
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name].clone() for name in half}, tmp_path / shard)
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def replace(folder: Path, name: str, tensor: torch.Tensor | None) -> str:
    """Put another tensor in the place of one (or none); the shard it is in."""
    shard: str = json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
    tensors = load_file(folder / shard)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / shard)
    return shard


def message(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(folder, RowFormat.FP32)
    return str(caught.value)


def test_shards_and_a_single_file_give_the_same_tensors(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, weights: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    single = tmp_path_factory.mktemp("single")
    save_file(weights[1], single / SINGLE_FILE)
    for name, tensor in weights[1].items():
        for checkpoint in (Checkpoint.open(folder), Checkpoint.open(single)):
            assert name in checkpoint
            assert torch.equal(checkpoint.tensor(name, tuple(tensor.shape)), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    narrow = torch.randn(4, 4).to(dtype)
    save_file({"w": narrow}, tmp_path / SINGLE_FILE)
    wide = Checkpoint.open(tmp_path).tensor("w", (4, 4))
    assert wide.dtype is torch.float32
    assert torch.equal(wide, narrow.float())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "nowhere").startswith(f"{tmp_path}/nowhere: not a folder")
    with pytest.raises(ConfigError, match="nowhere: not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_missing_or_broken_configuration_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert message(folder).startswith(f"{folder}/config.json: can't be read as JSON")
    (folder / "config.json").write_text("[]")
    assert message(folder) == f"{folder}/config.json: must be a JSON object, found list"
    (folder / "config.json").unlink()
    assert message(folder).startswith(f"{folder}/config.json: can't be read")


def test_another_model_type_is_named(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(model_type="glm5_next"))
    assert f"{folder}/config.json: model_type='glm5_next' is not supported" in message(folder)


def test_a_folder_without_weights_says_which_files_it_wants(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    assert message(folder) == f"{folder}: no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards"


@pytest.mark.parametrize("content", ["{", '{"metadata": {}}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(folder: Path, content: str) -> None:
    (folder / INDEX_FILE).write_text(content)
    assert message(folder).startswith(f"{folder / INDEX_FILE}: ")


def test_an_index_may_not_lead_out_of_its_folder(folder: Path) -> None:
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].update({"lm_head.weight": "../other.safetensors"}))
    assert "weight_map['lm_head.weight']='../other.safetensors' must be the name of a file" in message(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    assert message(folder) == f"{folder / SHARDS[1]}: this shard is missing"


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_cut_shard_is_named_with_its_size(folder: Path, keep: int) -> None:
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:keep])
    assert message(folder).startswith(f"{folder / SHARDS[0]}: not a whole safetensors file ({keep} bytes found)")


def test_a_shard_with_a_damaged_header_is_named(folder: Path) -> None:
    content = bytearray((folder / SHARDS[0]).read_bytes())
    content[8:16] = b"\xff" * 8
    (folder / SHARDS[0]).write_bytes(content)
    assert message(folder).startswith(f"{folder / SHARDS[0]}: not a whole safetensors file")


def test_an_index_that_names_what_a_shard_lacks_is_named(folder: Path) -> None:
    shard = replace(folder, "model.norm.weight", None)
    assert message(folder) == (
        f"{folder / INDEX_FILE}: weight_map['model.norm.weight']={shard!r}, but that shard has no such tensor"
    )


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    wanted = "tensor 'model.layers.1.mlp.experts.3.up_proj.weight' is missing; expected shape [32, 64]"
    assert message(folder) == f"{folder}: {wanted}"


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    shard = replace(folder, "lm_head.weight", torch.zeros(255, 64))
    assert message(folder) == (
        f"{folder / shard}: tensor 'lm_head.weight' has shape [255, 64]; the configuration makes it [256, 64]"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_counted(folder: Path, value: float) -> None:
    bad = torch.ones(64)
    bad[[3, 60]] = value
    shard = replace(folder, "model.norm.weight", bad)
    assert message(folder) == (
        f"{folder / shard}: tensor 'model.norm.weight' has 2 of 64 values that are NaN or infinite"
    )


def test_quantised_weights_are_refused_by_name(folder: Path) -> None:
    shard = replace(folder, "lm_head.weight", torch.zeros(256, 64, dtype=torch.float8_e4m3fn))
    found = message(folder)
    assert found.startswith(f"{folder / shard}: tensor 'lm_head.weight' has dtype float8_e4m3fn; legal dtypes: float32")


def test_an_fp8_row_format_that_does_not_fit_fails_before_weights_are_read(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(kv_lora_rank=64))
    (folder / SHARDS[0]).unlink()
    with pytest.raises(ConfigError, match="row_format='fp8' needs kv_lora_rank to be a multiple of 128"):
        load_model(folder, RowFormat.FP8)
