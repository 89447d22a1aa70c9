"""The original SAM 3D Body in PyTorch, as a program that answers timed requests (`serve`).

    python -m benchmarks.original_body SAM_3D_BODY DINOV3 FILES [--attention eager|sdpa]
        [--compile] [--threads N] [--device cpu|cuda] [--precision f32|bf16]

SAM_3D_BODY and DINOV3 are checkouts of the original's two repositories, which this program imports
and does not copy; FILES is a folder with model.ckpt, model_config.yaml and mhr_model.pt. What is
changed, all of it outside of the measured arithmetic: on the CPU, `cuda` becomes the CPU; the backbone
comes from the checkout and not from the network; for F32, the configuration asks for it; the one class
of torchvision that it uses is stood in for; and MHR is `original_mhr.PlainMhr`, because the generated
archive has tensors and no function.

F32 is without TF32. BF16 is what the original's configuration asks for, a backbone in BF16, and the
decoders' layers under autocast besides.
"""

import argparse
import importlib
import sys
import time
import types
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import serve
from benchmarks.original_mhr import PlainMhr
from benchmarks.stages import StageClock

DECODERS = ("decoder.layers", "decoder_hand.layers")
COMPILED = ("backbone.encoder.blocks", *DECODERS)


class ToTensor:
    """[H,W,C] uint8 to [C,H,W] float32 in 0..1, as torchvision's."""

    def __call__(self, image: Any) -> torch.Tensor:
        channels_first = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return channels_first.float().div(255)


def stand_in() -> None:
    """Modules that the original imports and that need not be installed for this."""
    transforms = types.ModuleType("torchvision.transforms")
    functional = types.ModuleType("torchvision.transforms.functional")
    transforms.ToTensor = ToTensor  # type: ignore[attr-defined]
    transforms.functional = functional  # type: ignore[attr-defined]
    package = types.ModuleType("torchvision")
    package.transforms = transforms  # type: ignore[attr-defined]
    for module in (package, transforms, functional):
        sys.modules[module.__name__] = module


def load(
    body: Path, dinov3: Path, files: Path, device: str, precision: str, clock: StageClock
) -> tuple[Any, Any]:
    """The original's estimator and its MHR, its stages measured by the clock."""
    sys.path[:0] = [str(body), str(dinov3)]
    importlib.import_module("pytorch_lightning")  # which looks for torchvision, before the stand-in
    stand_in()
    if device == "cpu":
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]

    import sam_3d_body.build_models as build  # type: ignore[import-not-found]
    import sam_3d_body.models.meta_arch.sam3d_body as model_module  # type: ignore[import-not-found]
    import sam_3d_body.sam_3d_body_estimator as estimator  # type: ignore[import-not-found]
    from dinov3.hub import backbones  # type: ignore[import-not-found]

    def local_hub(_: str, name: str, **options: Any) -> Any:
        options.pop("source")
        return getattr(backbones, name)(**options)

    def plain_mhr(path: str, map_location: str) -> PlainMhr:
        return archives.setdefault(path, PlainMhr(read_archive(path, map_location=map_location)))

    def float32_config(path: str) -> Any:
        config = read_config(path)
        config.defrost()
        config.TRAIN.USE_FP16 = False
        config.freeze()
        return config

    def to_cpu(value: Any, target: Any) -> Any:
        return move(value, "cpu" if target == "cuda" else target)

    archives: dict[str, PlainMhr] = {}
    read_archive, read_config, move = torch.jit.load, build.get_config, model_module.recursive_to
    torch.hub.load = local_hub  # type: ignore[assignment]
    torch.jit.load = plain_mhr  # type: ignore[assignment]
    if precision == "f32":
        build.get_config = float32_config
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    if device == "cpu":
        model_module.recursive_to = estimator.recursive_to = to_cpu
    model, config = build.load_sam_3d_body(
        str(files / "model.ckpt"), device, str(files / "mhr_model.pt")
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if precision == "bf16":
        for name in DECODERS:
            for layer in model.get_submodule(name):
                layer.forward = torch.autocast(device, torch.bfloat16)(layer.forward)
    measure(clock, model, model_module, estimator)
    return estimator.SAM3DBodyEstimator(model, config), model.head_pose.mhr


def measure(clock: StageClock, model: Any, model_module: Any, estimator: Any) -> None:
    """Let the clock measure the stages."""

    def kind(*_: Any, decoder_type: str = "body") -> str | None:
        return "hands" if decoder_type == "hand" else None

    clock.wrap(estimator, "prepare_batch", "crop")
    clock.wrap(model_module, "prepare_batch", "hands", whole=True)
    clock.wrap(model, "forward_step", kind, whole=True)
    for name in ("data_preprocess", "get_ray_condition", "_get_decoder_condition"):
        clock.wrap(model, name, "crop")
    clock.wrap(model.backbone, "forward", "backbone")
    clock.wrap(model, "forward_decoder", "decoder")
    clock.wrap(model.head_pose, "mhr_forward", "mhr")


def compile_layers(model: Any) -> None:
    """Compile each repeated layer; all layers of a kind share one compiled function."""
    torch._dynamo.config.cache_size_limit = 64
    inductor.compile_threads = 1  # in this process, whose time and memory are measured
    for name in COMPILED:
        for layer in model.get_submodule(name):
            layer.compile(dynamic=False)


def main() -> None:
    """Load, then answer requests."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("body", type=Path)
    parser.add_argument("dinov3", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    device = options.device
    clock = StageClock(torch.cuda.synchronize) if device == "cuda" else StageClock()
    started = time.perf_counter()
    with redirect_stdout(sys.stderr):
        estimator, mhr = load(
            options.body, options.dinov3, options.files, device, options.precision, clock
        )
    loaded = time.perf_counter() - started
    if options.compile:
        compile_layers(estimator.model)
    image, box = serve.photo(), np.array(serve.BOX, np.float32)
    intrinsics = torch.tensor([serve.INTRINSICS])
    backends = [SDPBackend.MATH] if options.attention == "eager" else None
    inputs = {
        name: torch.from_numpy(array).to(device) for name, array in serve.mhr_inputs().items()
    }
    hidden = torch.relu(torch.linspace(-1, 1, mhr.dense.shape[1], device=device))[None]

    def estimate(kind: str) -> serve.Arrays:
        with redirect_stdout(sys.stderr):
            found = estimator.process_one_image(
                image, bboxes=box, cam_int=intrinsics, inference_type=kind
            )[0]
        return {name: np.asarray(found[name]) for name in serve.FIELDS}

    def chosen(kind: str) -> serve.Arrays:
        if backends is None:
            return estimate(kind)
        with sdpa_kernel(backends):
            return estimate(kind)

    @torch.no_grad()
    def decode() -> serve.Arrays:
        vertices, states = mhr(**inputs)
        return {"vertices": vertices.cpu().numpy(), "states": states.cpu().numpy()}

    @torch.no_grad()
    def product() -> serve.Arrays:
        return {"offsets": mhr.product(hidden).cpu().numpy()}

    tasks = {
        "body": lambda: chosen("body"),
        "full": lambda: chosen("full"),
        "mhr": decode,
        "product": product,
    }
    serve.serve(tasks, {"load_seconds": loaded, "pytorch": torch.__version__}, clock)


if __name__ == "__main__":
    main()
