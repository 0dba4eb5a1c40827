"""The published form of the weights: bf16 safetensors shards under the names of the real GLM-5.3 checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import TinyConfig
from .network import TinyGlm

SHARD_BYTES = 4_500_000
INDEX_FILE = "model.safetensors.index.json"
# Kept in fp32 by the reference implementation (transformers, GlmMoeDsaPreTrainedModel._keep_in_fp32_modules).
FP32_SUFFIXES = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "indexer.weights_proj.weight")


def published_tensors(network: TinyGlm) -> dict[str, Tensor]:
    """The weights by published name, rounded to bf16 except where the architecture keeps fp32."""
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        block, _, leaf = name.rpartition(".")
        if leaf == "gate_up":
            for e, pair in enumerate(value):
                tensors[f"{block}.experts.{e}.gate_proj.weight"], tensors[f"{block}.experts.{e}.up_proj.weight"] = (
                    pair.chunk(2)
                )
        elif leaf == "down":
            for e, one in enumerate(value):
                tensors[f"{block}.experts.{e}.down_proj.weight"] = one
        elif leaf == "gate_weight":
            tensors[f"{block}.gate.weight"] = value
        elif leaf == "e_score_correction_bias":
            tensors[f"{block}.gate.{leaf}"] = value
        else:
            tensors[name] = value
    return {
        name: value.to(torch.float32 if name.endswith(FP32_SUFFIXES) else torch.bfloat16).contiguous().clone()
        for name, value in tensors.items()
    }


def write_checkpoint(network: TinyGlm, folder: Path) -> int:
    """Write configuration, shards and their index; each file is replaced whole.

    Returns:
        Bytes of all tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = network.config
    _replace_json(folder / "config.json", config.to_hf())
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    _replace_json(folder / "generation_config.json", generation)

    tensors = published_tensors(network)
    shards: list[dict[str, Tensor]] = [{}]
    for name in sorted(tensors, key=_reading_order):
        if sum(map(_size, shards[-1].values())) + _size(tensors[name]) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensors[name]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        partial = folder / f"{file}.partial"
        save_file(shard, str(partial), metadata={"format": "pt"})
        partial.chmod(0o644)
        os.replace(partial, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(map(_size, tensors.values()))
    _replace_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def read_checkpoint(folder: Path) -> TinyGlm:
    """The network with the published, rounded weights, widened to fp32.

    Raises:
        KeyError: if a tensor is missing.
        ValueError: if the folder holds tensors the network has no place for.
    """
    network = TinyGlm(TinyConfig.from_hf(folder / "config.json"))
    files: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        tensors |= load_file(str(folder / file))
    left = dict(tensors)
    state: dict[str, Tensor] = {}
    experts = range(network.config.n_routed_experts)
    for name in network.state_dict():
        public = name if name.startswith("lm_head") else f"model.{name}"
        block, _, leaf = public.rpartition(".")
        if leaf == "gate_up":
            pairs = (
                torch.cat([left.pop(f"{block}.experts.{e}.{kind}_proj.weight") for kind in ("gate", "up")])
                for e in experts
            )
            value = torch.stack(list(pairs))
        elif leaf == "down":
            value = torch.stack([left.pop(f"{block}.experts.{e}.down_proj.weight") for e in experts])
        elif leaf == "gate_weight":
            value = left.pop(f"{block}.gate.weight")
        elif leaf == "e_score_correction_bias":
            value = left.pop(f"{block}.gate.{leaf}")
        else:
            value = left.pop(public)
        state[name] = value.float()
    if left:
        raise ValueError(f"{len(left)} of {len(tensors)} tensors have no place, the first being {min(left)}")
    network.load_state_dict(state)
    return network.eval()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reading_order(name: str) -> tuple[int, str]:
    """Embedding, layers in order, then the final norm and the head."""
    parts = name.split(".")
    if name.startswith("model.layers."):
        return int(parts[2]), name
    return (-1 if "embed" in name else 1_000), name


def _replace_json(path: Path, content: object) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)
