"""The original SAM 3D Objects in PyTorch on the CPU, as a program that answers timed requests (`serve`).

    python -m benchmarks.original_objects SAM_3D_OBJECTS FILES COMPONENT [--threads N]

SAM_3D_OBJECTS is a checkout of the original's repository, which this program imports and does not
copy; FILES is a folder with the checkpoints and YAML files. What is changed, all of it outside of the
measured arithmetic: the configurations ask for F32 and the CPU; `cuda` becomes the CPU; modules that are
imported and not used are stood in for; and spconv's layers are in training mode, since it has no fused
bias on the CPU.

spconv's CPU kernels give wrong rows on more threads than one, so that each sparse convolution runs on
one, and all else on N.
"""

import argparse
import importlib
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks import serve
from benchmarks.objects_inputs import COMPONENTS, SS_LATENTS, TIME, inputs

FILES = {
    "ss_flow": "ss_generator",
    "slat_flow": "slat_generator",
    "ss_decoder": "ss_decoder",
    "gaussian_32": "slat_decoder_gs",
    "gaussian_4": "slat_decoder_gs_4",
    "mesh": "slat_decoder_mesh",
}
FLOW = "_base_models.generator.reverse_fn.backbone."
BIASED = 8
"""Columns of the mesh decoder's features to which the extraction adds a bias in place."""


def stand_in() -> None:
    """Modules that the original imports and that are not used here."""
    for name in ("gsplat", "kaolin", "kaolin.utils", "kaolin.utils.testing", "plyfile"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["gsplat"].rasterization = None  # type: ignore[attr-defined]
    sys.modules["plyfile"].PlyData = sys.modules["plyfile"].PlyElement = None  # type: ignore[attr-defined]
    sys.modules["kaolin.utils.testing"].check_tensor = lambda *_, **__: True  # type: ignore[attr-defined]


def build(node: Any) -> Any:
    """What a configuration describes."""
    if isinstance(node, list):
        return [build(item) for item in node]
    if not isinstance(node, dict):
        return node
    settings = {key: build(value) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return settings
    module, _, name = node["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**settings)


def convolve_alone(threads: int) -> None:
    """Let spconv's layers run on one thread, all else on that many."""
    layer = importlib.import_module("spconv.pytorch.conv").SparseConvolution
    forward = layer.forward

    def alone(*arguments: Any, **named: Any) -> Any:
        torch.set_num_threads(1)
        try:
            return forward(*arguments, **named)
        finally:
            torch.set_num_threads(threads)

    layer.forward = alone


def load(component: str, files: Path) -> Any:
    """The component's module, in evaluation mode."""
    part = FILES[component]
    config = yaml.safe_load((files / f"{part}.yaml").read_text())
    state = torch.load(files / f"{part}.ckpt", mmap=component != "mesh", weights_only=True)
    if component in ("ss_flow", "slat_flow"):
        config = config["module"]["generator"]["backbone"]["reverse_fn"]["backbone"]
        state = {
            name.removeprefix(FLOW): tensor
            for name, tensor in state["state_dict"].items()
            if name.startswith(FLOW)
        }
    config["use_fp16"] = False
    if component == "mesh":
        config["device"] = "cpu"
    for name in ("xavier_uniform_", "normal_", "constant_"):
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    model = build(config)
    model.load_state_dict(state, strict=True)
    model.eval().requires_grad_(False)
    for module in model.modules():
        if type(module).__module__.startswith("spconv."):
            module.training = True
    return model


def tasks(component: str, model: Any) -> serve.Task:
    """One forward pass of the component."""
    given = {name: torch.from_numpy(array) for name, array in inputs(component).items()}
    time_ = torch.tensor([TIME])

    def ss_flow() -> serve.Arrays:
        latents = {name: given[name] for name in SS_LATENTS}
        velocities = model(latents, time_, given["tokens"], d=torch.zeros(1))
        return {name: velocity.numpy() for name, velocity in velocities.items()}

    def slat_flow() -> serve.Arrays:
        velocity = model(given["feats"][None], time_, given["tokens"], given["coords"])
        return {"feats": velocity[0].numpy()}

    def ss_decoder() -> serve.Arrays:
        latent = given["latent"].permute(0, 2, 1).contiguous().view(1, 8, 16, 16, 16)
        return {"logits": model(latent)[0, 0].numpy()}

    def sparse() -> Any:
        module = importlib.import_module("sam3d_objects.model.backbone.tdfy_dit.modules.sparse")
        return module.SparseTensor(feats=given["feats"], coords=given["coords"])

    def gaussians() -> serve.Arrays:
        found = model(sparse())[0]
        return {
            "positions": found._xyz.numpy(),
            "features": found._features_dc.numpy(),
            "scales": found._scaling.numpy(),
            "rotations": found._rotation.numpy(),
            "opacities": found._opacity.numpy(),
        }

    def mesh() -> serve.Arrays:
        surface = model(sparse())[0]
        features = decoded.pop()
        return {
            "distances": features[:, :BIASED].numpy(),
            "values": features[:, BIASED:].numpy(),
            "vertex_count": np.array([float(len(surface.vertices))]),
        }

    decoded: list[torch.Tensor] = []
    if component == "mesh":
        model.out_layer.register_forward_hook(lambda *call: decoded.append(call[2].feats))
    found: dict[str, Callable[[], serve.Arrays]] = {
        "ss_flow": ss_flow,
        "slat_flow": slat_flow,
        "ss_decoder": ss_decoder,
        "gaussian_32": gaussians,
        "gaussian_4": gaussians,
        "mesh": mesh,
    }
    return torch.no_grad()(found[component])


def main() -> None:
    """Load, then answer requests."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("original", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("component", choices=COMPONENTS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.update(LIDRA_SKIP_INIT="1", ATTN_BACKEND="sdpa", SPARSE_ATTN_BACKEND="sdpa")
    sys.path.insert(0, str(options.original))
    stand_in()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    with redirect_stdout(sys.stderr):
        convolve_alone(options.threads)
        model = load(options.component, options.files)
        gaussian: Any = importlib.import_module(
            "sam3d_objects.model.backbone.tdfy_dit.models.structured_latent_vae.decoder_gs"
        )
        whole = gaussian.Gaussian
        gaussian.Gaussian = lambda **settings: whole(**settings, device="cpu")
        task = tasks(options.component, model)
    facts = {"load_seconds": time.perf_counter() - started, "pytorch": torch.__version__}

    def quiet() -> serve.Arrays:
        with redirect_stdout(sys.stderr):
            return task()

    serve.serve({options.component: quiet}, facts)


if __name__ == "__main__":
    main()
