"""The published checkpoint: what an independent implementation makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from build_engines.tiny.checkpoint import FP32_SUFFIXES, INDEX_FILE, read_checkpoint, write_checkpoint
from build_engines.tiny.config import CHECKPOINT_DIR, TinyConfig
from build_engines.tiny.network import TinyGlm
from build_engines.tiny.tokenizer import load_tokenizer

SNIPPET = '''
class Stack:
    """A last-in, first-out list."""

    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)

    def __repr__(self):
        return "%s(%r)" % (self.__class__.__name__, self.items)
'''
# Nats per token. The shipped weights reach 2.61; an untrained network has log(2048) = 7.62.
SNIPPET_CEILING = 2.9


@pytest.fixture(scope="module")
def snippet() -> torch.Tensor:
    ids = load_tokenizer(CHECKPOINT_DIR).encode(SNIPPET).ids
    assert len(ids) > TinyConfig().index_topk
    return torch.tensor([ids])


@pytest.fixture(scope="module")
def reference() -> tuple[Any, dict[str, Any]]:
    model, report = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT_DIR, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), report


def test_transformers_finds_every_tensor_and_no_stranger(reference: tuple[Any, dict[str, Any]]) -> None:
    model, report = reference
    assert type(model).__name__ == "GlmMoeDsaForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_transformers_reads_the_same_layer_pattern(reference: tuple[Any, dict[str, Any]]) -> None:
    config = reference[0].config
    full = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, 2, 6]
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 7
    assert config.rope_parameters["rope_theta"] == 8_000_000


def test_our_sparse_pass_agrees_with_transformers(reference: tuple[Any, dict[str, Any]], snippet: torch.Tensor) -> None:
    network = read_checkpoint(CHECKPOINT_DIR)
    with torch.no_grad():
        theirs = reference[0](snippet).logits
        ours = network.logits(network(snippet, sparse=True).hidden)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_python_is_likelier_than_chance(reference: tuple[Any, dict[str, Any]], snippet: torch.Tensor) -> None:
    with torch.no_grad():
        loss = reference[0](snippet, labels=snippet).loss.item()
    assert loss < SNIPPET_CEILING


def test_weights_are_small_sharded_and_in_bfloat16_but_for_the_routers(reference: tuple[Any, dict[str, Any]]) -> None:
    files = sorted(CHECKPOINT_DIR.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    listed = json.loads((CHECKPOINT_DIR / INDEX_FILE).read_text())
    assert len(files) >= 2
    assert {file.name for file in files} == set(listed["weight_map"].values())
    assert sum(sizes) < 12_000_000
    parameters = sum(p.numel() for p in reference[0].parameters())
    assert 2_000_000 < parameters < 4_000_000
    fp32 = [name for name in listed["weight_map"] if name.endswith(FP32_SUFFIXES)]
    assert len(fp32) == 7 + 7 + 4


def test_auto_tokenizer_reads_the_tokeniser() -> None:
    theirs = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    config = TinyConfig()
    assert theirs(SNIPPET).input_ids == load_tokenizer(CHECKPOINT_DIR).encode(SNIPPET).ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
        config.bos_token_id,
        config.eos_token_id,
        config.pad_token_id,
    )


def test_writing_and_reading_back_rounds_once(tmp_path: Any) -> None:
    torch.manual_seed(0)
    network = TinyGlm(TinyConfig(num_hidden_layers=2, vocab_size=64))
    write_checkpoint(network, tmp_path)
    once = read_checkpoint(tmp_path)
    write_checkpoint(once, tmp_path)
    twice = read_checkpoint(tmp_path)
    for (name, a), b, original in zip(
        once.state_dict().items(), twice.state_dict().values(), network.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
        torch.testing.assert_close(a, original, rtol=2**-8, atol=0)
