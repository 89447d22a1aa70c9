"""Patch features of the DINOv3 ViT as the `transformers` package implements it.

    .oracle/bin/python tests/oracle/dinov3_features.py weights.safetensors features.safetensors

The input holds F32 tensors under the names of the original checkpoint without
`backbone.encoder.`, and `image` [B, 3, H, W]; the output holds `features` [B, patches, C] after
the final norm.
"""

import re
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import DINOv3ViTConfig, DINOv3ViTModel

RENAMED = {
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "mlp.gate_proj": "mlp.w1",
    "mlp.up_proj": "mlp.w2",
    "mlp.down_proj": "mlp.w3",
    "attention.o_proj": "attn.proj",
    "embeddings.patch_embeddings": "patch_embed.proj",
    "embeddings.register_tokens": "storage_tokens",
    "embeddings.cls_token": "cls_token",
}


def model_of(weights: dict[str, torch.Tensor], image_size: int) -> DINOv3ViTModel:
    """The model of the sizes that the weights have, before they are loaded."""
    channels = weights["cls_token"].shape[-1]
    blocks = [int(match[1]) for name in weights if (match := re.match(r"blocks\.(\d+)\.", name))]
    config = DINOv3ViTConfig(
        hidden_size=channels,
        num_hidden_layers=max(blocks) + 1,
        num_attention_heads=channels // (4 * len(weights["rope_embed.periods"])),
        intermediate_size=weights["blocks.0.mlp.w1.weight"].shape[0],
        use_gated_mlp=True,
        hidden_act="silu",
        num_register_tokens=weights["storage_tokens"].shape[1],
        patch_size=weights["patch_embed.proj.weight"].shape[-1],
        image_size=image_size,
        rope_theta=100.0,
        query_bias=True,
        key_bias=False,
        value_bias=True,
        proj_bias=True,
        mlp_bias=True,
        layer_norm_eps=1e-5,
    )
    model: DINOv3ViTModel = DINOv3ViTModel(config)
    model.eval()
    return model


def original_tensor(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The original tensor for a parameter of `transformers`."""
    name = re.sub(r"^(model\.)?layer\.", "blocks.", name)
    if match := re.match(r"(blocks\.\d+)\.attention\.([qkv])_proj\.(weight|bias)", name):
        joined = weights[f"{match[1]}.attn.qkv.{match[3]}"]
        return joined.chunk(3)["qkv".index(match[2])]
    for theirs, original in RENAMED.items():
        name = name.replace(theirs, original)
    return weights[name]


def main() -> None:
    """Compute the features."""
    weights = load_file(sys.argv[1])
    image = weights.pop("image")
    model = model_of(weights, image.shape[-1])
    state = {}
    for name, parameter in model.state_dict().items():
        if name.endswith("mask_token"):
            state[name] = torch.zeros_like(parameter)
        else:
            state[name] = original_tensor(name, weights).reshape(parameter.shape).clone()
    model.load_state_dict(state)
    with torch.no_grad():
        tokens = model(image).last_hidden_state
    prefix = 1 + weights["storage_tokens"].shape[1]
    save_file({"features": tokens[:, prefix:].contiguous()}, sys.argv[2])


if __name__ == "__main__":
    main()
