"""A checkpoint of tiny_models.py with float8 weights, and transformers' model computing the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 32
LARGEST = 448.0  # of float8_e4m3fn
#: How weights and activations are scaled, as a checkpoint of compressed-tensors says it.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "channels": ({"strategy": "channel"}, {"strategy": "token"}),
    "blocks": ({"strategy": "block", "block_structure": [BLOCK, BLOCK]}, {"strategy": "group", "group_size": BLOCK}),
}


def quantise(folder: Path, model: Any, scheme: str) -> None:
    """Rewrite the checkpoint's linear layers, and replace those of transformers' `model`."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight, scale = tensors[name], weight_scale(tensors[name], scheme)
        tensors[name] = (weight / expanded(scale, weight.shape)).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        parent, _, attribute = name.removesuffix(".weight").rpartition(".")
        layer = Float8Linear(tensors[name].float() * expanded(scale, weight.shape), scheme)
        setattr(model.get_submodule(parent), attribute, layer)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights, activations = SCHEMES[scheme]
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "dynamic": False, **weights},
                "input_activations": {**common, "dynamic": True, **activations},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def weight_scale(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """[N, 1], or [N / BLOCK, K / BLOCK]."""
    if scheme == "channels":
        return weight.abs().amax(1, keepdim=True) / LARGEST
    return weight.abs().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3)) / LARGEST


def expanded(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each entry."""
    rows, columns = (size // have for size, have in zip(shape, scale.shape, strict=True))
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


class Float8Linear(torch.nn.Module):
    """``x W^T`` with x rounded as the scheme does it."""

    def __init__(self, weight: torch.Tensor, scheme: str) -> None:
        super().__init__()
        self.weight, self.group = weight, weight.shape[1] if scheme == "channels" else BLOCK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2) @ self.weight.t()
