"""Write tests/fixtures/tiny-moge/: MoGe in miniature with random weights, and what its code computes.

    PYTHONPATH=SCIPY .oracle/bin/python tests/oracle/make_tiny_moge.py --original MOGE --out DIR

MOGE is a checkout of microsoft/MoGe (0744441; a8c3734, which SAM 3D Objects names, computes the same),
whose code is imported and not copied. SCIPY is a folder with SciPy 1.15.3, which the oracle lacks
(`uv pip install --target SCIPY --no-deps scipy==1.15.3`): from 1.16 on its optimiser scales its steps
otherwise. The model is `MoGeModel` itself, with a DINOv2 of 32 channels under the name of the large one.

The limits are ten times what F32 differs by from F64, with floors of 1e-5 (scaled up to 1e-4 with the
tensor's largest value) and, of the relative norm, 2e-5.
"""

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_weights import generator
from safetensors.torch import save_file

CHANNELS, BLOCKS = 32, 5
CONFIG: dict[str, Any] = {
    "encoder": "dinov2_vitl14",
    "remap_output": "exp",
    "intermediate_layers": 4,
    "dim_proj": 24,
    "dim_upsample": [32, 16, 16],
    "dim_times_res_block_hidden": 2,
    "num_res_blocks": 2,
    "num_tokens_range": [6, 12],
    "last_conv_channels": 8,
    "last_conv_size": 1,
}
PHOTOS = {"landscape": (44, 60), "portrait": (70, 33), "small": (9, 13), "large": (110, 130)}
"""Height and width; the first one's stages are kept."""
GRIDS = ((37, 37), (50, 50), (38, 66), (1, 40), (74, 33), (3, 4))
TAPPED = "landscape"
NORMS = tuple(f"{norm}.weight" for norm in ("norm", "norm1", "norm2", "layers.0", "layers.3"))
Tensors = dict[str, torch.Tensor]


def stub_imports() -> None:
    """What the original imports and needs one function of, or none."""

    def intrinsics(
        fx: torch.Tensor, fy: torch.Tensor, cx: torch.Tensor, cy: torch.Tensor
    ) -> torch.Tensor:
        zero, one = torch.zeros_like(fx), torch.ones_like(fx)
        rows = (fx, zero, cx.expand_as(fx), zero, fy, cy.expand_as(fx), zero, zero, one)
        matrix: torch.Tensor = torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
        return matrix

    for name in ("cv2", "huggingface_hub", "utils3d"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["huggingface_hub"].hf_hub_download = None  # type: ignore[attr-defined]
    sys.modules["utils3d"].pt = types.SimpleNamespace(  # type: ignore[attr-defined]
        intrinsics_from_focal_center=intrinsics
    )


def tiny_model() -> torch.nn.Module:
    """The original's model with random weights."""
    from moge.model.dinov2.models import vision_transformer
    from moge.model.v1 import MoGeModel

    large = vision_transformer.vit_large

    def small(**arguments: Any) -> torch.nn.Module:
        block = vision_transformer.partial(
            vision_transformer.Block, attn_class=vision_transformer.MemEffAttention
        )
        sizes = {"embed_dim": CHANNELS, "depth": BLOCKS, "num_heads": 16, "mlp_ratio": 4}
        made: torch.nn.Module = vision_transformer.DinoVisionTransformer(
            **sizes, block_fn=block, **arguments
        )
        return made

    vision_transformer.vit_large = small
    model: torch.nn.Module = MoGeModel(**CONFIG)
    vision_transformer.vit_large = large
    state = {name: random(name, value) for name, value in model.state_dict().items()}
    make_plausible(state)
    model.load_state_dict(state)
    return model.eval()


def random(name: str, like: torch.Tensor) -> torch.Tensor:
    """Weights whose products keep about the size of what they multiply."""
    if name in ("image_mean", "image_std"):
        return like
    values = torch.from_numpy(generator(f"tiny-moge {name}").standard_normal(tuple(like.shape)))
    if name.endswith(NORMS):
        values = 1 + 0.2 * values
    elif like.ndim > 1 and not name.endswith(("cls_token", "pos_embed", "mask_token")):
        inputs = like.shape[0] if ".0.0.weight" in name and "upsample" in name else like[0].numel()
        values = values / inputs**0.5
    else:
        values = 0.3 * values
    return values.to(like.dtype)


def make_plausible(state: Tensors) -> None:
    """Points that fan out from a camera, at varied depths, most of them in the mask."""
    first, last = "head.output_block.0.0.weight", "head.output_block.0.2.weight"
    state[first][:4, -2:] = 0
    for channel, (source, sign) in enumerate(((-2, 1), (-2, -1), (-1, 1), (-1, -1))):
        state[first][channel, source, 1, 1] = sign
    state["head.output_block.0.0.bias"][:4] = 0
    state[first][:4, :-2] *= 0.02
    state[last] *= 0.1
    state[last][0, :4, 0, 0] = torch.tensor([0.8, -0.8, 0, 0])
    state[last][1, :4, 0, 0] = torch.tensor([0, 0, 0.8, -0.8])
    state["head.output_block.0.2.bias"][:] = torch.tensor([0.01, -0.02, 0.4])
    state["head.output_block.1.2.bias"][:] = 0.8


def photo(name: str) -> np.ndarray:
    """A smooth random picture with some noise, [H, W, 3] uint8."""
    height, width = PHOTOS[name]
    random_ = generator(f"photo {name}")
    y, x = np.mgrid[:height, :width] / max(height, width)
    planes = [
        np.sin(2 * np.pi * (random_.uniform(0.5, 3) * x + random_.uniform(0.5, 3) * y) + phase)
        for phase in random_.uniform(0, 6, 3)
    ]
    noisy = 127 + 80 * np.stack(planes, axis=-1) + random_.normal(0, 20, (height, width, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def hook(model: Any, found: Tensors) -> list[Any]:
    """Keep the stages of the next run."""
    handles: list[Any] = []

    def keep(name: str, module: torch.nn.Module) -> None:
        def store(_module: object, _inputs: object, output: torch.Tensor) -> None:
            found[name] = output.detach().clone()

        handles.append(module.register_forward_hook(store))

    keep("patch_embed", model.backbone.patch_embed)
    handles.append(
        model.backbone.blocks[0].register_forward_pre_hook(
            lambda _module, inputs: found.update(tokens=inputs[0].detach().clone())
        )
    )
    for index, block in enumerate(model.backbone.blocks):
        keep(f"block{index}", block)
    for level, upsampling in enumerate(model.head.upsample_blocks):
        for index, layer in enumerate(upsampling):
            if (level, index) == (0, 0):
                handles.append(layer.register_forward_pre_hook(keep_projected(found)))
            keep(f"upsample{level}.{index}", layer)
    for name, block in zip(("points", "mask"), model.head.output_block, strict=True):
        keep(f"output.{name}", block)
    return handles


def keep_projected(found: Tensors) -> Any:
    """A hook before the first upsampling: its input less the two channels of coordinates."""

    def store(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        found["projected"] = inputs[0][:, :-2].detach().clone()

    return store


def infer(model: Any, name: str) -> Tensors:
    """The stages of the first photo and the results of each, as SAM 3D Objects asks for them."""
    image = torch.from_numpy(photo(name)).to(model.dtype).permute(2, 0, 1) / 255
    found: Tensors = {}
    handles = hook(model, found) if name == TAPPED else []
    result = model.infer(image, force_projection=False, use_fp16=False)
    for handle in handles:
        handle.remove()
    finite = torch.isfinite(result["points"])
    outside = finite.logical_not().all(dim=-1)
    assert torch.equal(finite.all(dim=-1), result["mask"])
    assert torch.equal(outside, result["mask"].logical_not())
    found["points"] = torch.where(finite, result["points"], 0)
    found["mask"] = result["mask"].to(torch.uint8)
    found["intrinsics"] = result["intrinsics"]
    return {f"{name}.{stage}": value for stage, value in found.items()}


def positions(dtype: torch.dtype) -> Tensors:
    """Two channels of positions, brought to grids."""
    from moge.model.dinov2.models.vision_transformer import DinoVisionTransformer

    stored = position_table().to(dtype)
    holder = DinoVisionTransformer(
        img_size=518, patch_size=14, embed_dim=2, depth=0, num_heads=1, block_chunks=0
    ).to(dtype)
    holder.pos_embed.data = stored
    found: Tensors = {}
    for height, width in GRIDS:
        tokens = torch.zeros(1, 1 + height * width, 2, dtype=dtype)
        with torch.no_grad():
            given = holder.interpolate_pos_encoding(tokens, 14 * height, 14 * width)
        found[f"positions.{height}x{width}"] = given[0, 1:].clone()
    return found


def position_table() -> torch.Tensor:
    """[1, 1370, 2]."""
    values = generator("positions").standard_normal((1, 37 * 37 + 1, 2))
    return torch.from_numpy(values).to(torch.float32)


def fits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Points that are nearly those of a camera, and masks."""
    cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, size, focal, shift, noise, inside in (
        ("exact", (30, 40), 1.3, 0.6, 0.0, 1.0),
        ("noisy", (40, 30), 0.7, -0.4, 0.1, 0.7),
        ("far", (25, 25), 3.0, 1.0, 0.03, 1.0),
        ("near", (25, 60), 0.5, -0.8, 0.02, 0.5),
        ("large", (70, 66), 1.0, 0.2, 0.05, 0.9),
        ("overstep", (20, 24), 1.0, -0.9, 0.01, 1.0),
        ("chaos", (20, 20), 1.0, 0.0, 3.0, 1.0),
        ("two", (16, 16), 1.0, 0.3, 0.01, 0.0),
        ("none", (8, 8), 1.0, 0.3, 0.0, -1.0),
    ):
        random_ = generator(f"fit {name}")
        height, width = size
        diagonal = (height**2 + width**2) ** 0.5
        y, x = np.mgrid[:height, :width]
        u, v = (2 * x + 1 - width) / diagonal, (2 * y + 1 - height) / diagonal
        z = 2 + 0.5 * np.sin(5 * u + 3 * v) + 0.1 * random_.standard_normal(size)
        if name == "overstep":  # the first step is too long, so that the next are damped
            z = 1 + 0.5 * random_.random(size)
        points = np.stack([u * z / focal, v * z / focal, z - shift], axis=-1)
        points += noise * random_.standard_normal(points.shape)
        if name == "chaos":
            points[..., 2] = np.exp(points[..., 2] / 3)
        mask = random_.random(size) < inside
        if name == "two":
            mask[3, 2] = mask[9, 11] = True
        cases[name] = torch.from_numpy(points).to(torch.float32), torch.from_numpy(mask)
    return cases


def recovered(dtype: torch.dtype) -> Tensors:
    """The focal length and shift of each of `fits`."""
    from moge.utils.geometry_torch import recover_focal_shift

    return {
        f"fit.{name}": torch.stack(recover_focal_shift(points.to(dtype)[None], mask[None]))[:, 0]
        for name, (points, mask) in fits().items()
    }


def computed(model: Any) -> Tensors:
    """All expected tensors."""
    found: Tensors = {}
    for name in PHOTOS:
        found |= infer(model, name)
    return found | positions(model.dtype) | recovered(model.dtype)


def rule(name: str, value: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """The limits of a tensor."""
    if value.dtype is torch.uint8:
        assert torch.equal(value, exact)
        return {"name": name, "mode": "exact"}
    difference = (value.to(torch.float64) - exact).abs()
    peak = float(exact.abs().max())
    norm = float(exact.norm())
    relative = float(difference.norm()) / norm
    return {
        "name": name,
        "mode": "float",
        "max_abs": max(min(1e-5 * max(1, peak), 1e-4), 10 * float(difference.max())),
        "relative_l2": max(2e-5, 10 * relative),
        "zero_reference_floor": 1e-6,
    }


def main() -> None:
    """Write the fixture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.original))
    stub_imports()
    torch.set_num_threads(1)
    model = tiny_model()
    found = computed(model)
    to_float = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        control = computed(tiny_model().double())
    finally:
        torch.Tensor.float = to_float  # type: ignore[method-assign]
    numbered = {name: f"{index:03d}.{name}" for index, name in enumerate(found)}
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    content = {"model_config": CONFIG, "model": model.state_dict()}
    torch.save(content, out / "model.pt")
    inputs = {f"photo.{name}": torch.from_numpy(photo(name)) for name in PHOTOS}
    inputs["positions"] = position_table()
    for name, (points, mask) in fits().items():
        inputs |= {f"fit.{name}.points": points, f"fit.{name}.mask": mask.to(torch.uint8)}
    save_file(inputs, out / "inputs-depth.safetensors")
    expected = {numbered[name]: value.contiguous() for name, value in found.items()}
    save_file(expected, out / "expected-depth.safetensors")
    rules = [rule(numbered[name], found[name], control[name]) for name in found]
    document = {"schema_version": 1, "boundary": "depth", "tensors": rules}
    (out / "rules-depth.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
