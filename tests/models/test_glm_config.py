"""Reading configurations, and the layouts that follow from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trt_backend.config import ConfigError, RowFormat
from trt_backend.models.glm_config import GlmMoeDsaConfig, key_bytes, kv_layout, parse_glm_config, row_bytes
from trt_backend.models.registry import PRESETS_DIR, read_config

MIB, GIB = 2**20, 2**30


def raw(**changes: Any) -> dict[str, Any]:
    """The published GLM-5.3 configuration with some keys changed; None removes a key."""
    content: dict[str, Any] = json.loads((PRESETS_DIR / "glm-5.3.json").read_text())
    content.update(changes)
    return {key: value for key, value in content.items() if value is not None}


def parsed(**changes: Any) -> GlmMoeDsaConfig:
    return parse_glm_config(raw(**changes), "config.json")


def test_glm_5_3_in_fp8_costs_what_its_paper_says() -> None:
    layout = kv_layout(parsed(), RowFormat.FP8, page_tokens=64, hot_tokens=4096)
    assert {source.row_bytes for source in layout.sources} == {656}
    assert {group.key_bytes for group in layout.groups} == {132}
    assert layout.page_bytes == 78 * 64 * 656 == 3_274_752
    assert round(layout.page_bytes / MIB, 2) == 3.12
    assert round(layout.hot_bytes / MIB) == 200
    assert layout.history_bytes(1) + layout.index_key_bytes(1) == 53_940
    assert round(layout.history_bytes(32_768) / GIB, 2) == 1.56
    assert round(layout.index_key_bytes(32_768) / MIB) == 87


def test_glm_5_3_in_bf16_costs_what_its_paper_says() -> None:
    layout = kv_layout(parsed(), RowFormat.BF16, page_tokens=64, hot_tokens=4096)
    assert layout.history_bytes(1) + layout.index_key_bytes(1) == 95_232


def test_glm_5_3_has_21_index_groups_that_cover_its_layers_in_order() -> None:
    layout = kv_layout(parsed(), RowFormat.FP8, page_tokens=64, hot_tokens=4096)
    assert [group.sources[0] for group in layout.groups] == [0, 1, *range(2, 78, 4)]
    assert len(layout.groups) == 21
    assert [source for group in layout.groups for source in group.sources] == list(range(78))
    assert {group.top_k for group in layout.groups} == {2048}


@pytest.mark.parametrize(
    ("row_format", "row", "key"),
    [(RowFormat.FP32, 4 * 576, 512), (RowFormat.BF16, 2 * 576, 256), (RowFormat.FP8, 656, 132)],
)
def test_rows_and_keys_have_the_sizes_of_their_format(row_format: RowFormat, row: int, key: int) -> None:
    assert row_bytes(parsed(), row_format) == row
    assert key_bytes(parsed(), row_format) == key


def test_an_absent_schedule_means_what_the_reference_class_assumes() -> None:
    config = parsed(index_topk_freq=None, index_skip_topk_offset=None)
    assert config.indexer_types == ("full",) * 78
    config = parsed(index_topk_freq=2, index_skip_topk_offset=None, num_hidden_layers=6)
    assert config.indexer_types == ("full", "full", "shared", "full", "shared", "full")


def test_a_list_or_a_pattern_goes_before_the_schedule() -> None:
    as_list = parsed(num_hidden_layers=4, indexer_types=["full", "shared", "shared", "full"])
    as_pattern = parsed(num_hidden_layers=4, index_topk_pattern="FSSF")
    assert as_list.indexer_types == as_pattern.indexer_types == ("full", "shared", "shared", "full")
    assert as_list.groups == ((0, 1, 2), (3,))


def test_feed_forward_types_come_from_a_list_or_from_the_number_of_dense_layers() -> None:
    assert parsed(num_hidden_layers=4).mlp_layer_types == ("dense", "dense", "dense", "sparse")
    types = ["sparse", "dense"]
    assert parsed(num_hidden_layers=2, mlp_layer_types=types).mlp_layer_types == ("sparse", "dense")


def test_rope_theta_is_found_in_either_place() -> None:
    assert parsed().rope_theta == 8e6
    assert parsed(rope_parameters=None, rope_theta=1e4).rope_theta == 1e4


def test_the_misleading_head_dim_is_not_used() -> None:
    assert parsed(head_dim=192) == parsed(head_dim=1)
    assert parsed().qk_head_dim == 256


@pytest.mark.parametrize(("given", "ends"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_may_be_none_one_or_many(given: object, ends: tuple[int, ...]) -> None:
    assert parsed(eos_token_id=given).end_ids == ends


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "deepseek_v32"}, ["model_type='deepseek_v32'", "glm_moe_dsa"]),
    ({"attention_bias": True}, ["attention_bias=True", "legal value: False"]),
    ({"n_group": 8}, ["n_group=8", "legal value: 1"]),
    ({"scoring_func": "softmax"}, ["scoring_func='softmax'", "sigmoid"]),
    ({"topk_method": "greedy"}, ["topk_method='greedy'", "noaux_tc"]),
    ({"rope_interleave": False}, ["rope_interleave=False", "True"]),
    ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, ["rope_parameters.rope_type='yarn'", "default"]),
    ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, ["rope_scaling.rope_type='linear'", "default"]),
    ({"rope_parameters": {"rope_type": "default"}}, ["rope_theta is missing"]),
    ({"index_topk_freq": 0}, ["index_topk_freq=0", "1 or more"]),
    ({"indexer_types": ["shared"] + ["full"] * 77}, ["indexer_types", "layer 0 'shared'"]),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, ["index_skip_topk_offset", "layer 0 'shared'"]),
    ({"indexer_types": ["full"] * 3}, ["indexer_types", "num_hidden_layers=78"]),
    ({"mlp_layer_types": ["dense", "moe"], "num_hidden_layers": 2}, ["mlp_layer_types", "'sparse'"]),
    ({"first_k_dense_replace": -1}, ["first_k_dense_replace=-1", "0 or more"]),
    ({"num_experts_per_tok": 300}, ["num_experts_per_tok=300", "n_routed_experts=256"]),
    ({"qk_rope_head_dim": 256}, ["qk_rope_head_dim=256", "index_head_dim=128"]),
    ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "multiple of 2"]),
    ({"num_key_value_heads": 8}, ["num_key_value_heads=8", "num_attention_heads=64"]),
    ({"hidden_size": 0}, ["hidden_size=0", "greater than or equal to 2"]),
    ({"hidden_size": "6144"}, ["hidden_size='6144'", "integer"]),
    ({"num_hidden_layers": True}, ["num_hidden_layers=True", "integer"]),
    ({"vocab_size": None}, ["vocab_size", "required"]),
    ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'", "token id"]),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[next(iter(changes)) for changes, _ in FAULTS])
def test_what_is_not_supported_is_refused_by_name_and_value(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**changes)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def test_fp8_rows_need_whole_tiles_and_other_formats_do_not() -> None:
    config = parsed(kv_lora_rank=96)
    with pytest.raises(ConfigError, match="multiple of 128; this model has 96"):
        kv_layout(config, RowFormat.FP8, 64, 4096)
    assert kv_layout(config, RowFormat.BF16, 64, 4096).sources[0].row_bytes == 2 * (96 + 64)


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: a configuration is a JSON object, not list"):
        parse_glm_config([], "config.json")


def test_a_preset_is_read_by_name_and_an_unknown_name_lists_the_presets(tmp_path: Path) -> None:
    assert read_config("glm-5.3") == parsed()
    with pytest.raises(ConfigError, match=r"'glm-6' is neither a checkpoint folder nor a preset; presets: glm-5\.3"):
        read_config("glm-6")
    with pytest.raises(ConfigError, match=r"config\.json: can't be read as JSON"):
        read_config(tmp_path)


def test_an_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type='llama' is not supported; legal values: glm_moe_dsa"):
        read_config(tmp_path)


def test_a_layout_is_worked_out_without_torch() -> None:
    code = (
        "import sys; from trt_backend.config import RowFormat; from trt_backend.models import registry;"
        "registry.kv_layout(registry.read_config('glm-5.3'), RowFormat.FP8, 64, 4096); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
