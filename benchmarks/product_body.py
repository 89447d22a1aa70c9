"""The product as a program that answers timed requests (`serve`).

python -m benchmarks.product_body BODY_GGUF MHR_GGUF [--threads N] [--backend cpu|vulkan]
    [--precision strict-f32|fast]
"""

import argparse
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import serve
from benchmarks.stages import StageClock
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.runtime.body.estimator import Estimator, InferenceType
from sam3d_gguf.runtime.body.model import BodyModel
from sam3d_gguf.runtime.body.neural_network import GgmlBodyNetwork
from sam3d_gguf.runtime.body.passes import Passes
from sam3d_gguf.runtime.body.pose_head import PoseHead
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.network import Network, Parts
from sam3d_gguf.runtime.ggml.store import WeightStore
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.weights import WeightTensor

DENSE = "pose.dense.weight"


class Product:
    """MHR's corrective product alone, on the weights of the file."""

    def __init__(self, backend: Backend, mhr: Path) -> None:
        with load_weights(mhr, "mhr") as weights:
            self._hidden: npt.NDArray[np.float32] = np.maximum(
                np.linspace(-1, 1, weights.tensor(DENSE).shape[1], dtype=np.float32), 0
            )[None]
            self._parts = Parts(WeightStore(backend, weights, [DENSE]), backend)

    def __call__(self) -> serve.Arrays:
        def build(network: Network) -> None:
            network.output("y", network.matmul(network.tensors["x"], network.weight(DENSE)))

        offsets = self._parts.run("product", {"x": self._hidden}, build)["y"]
        return {"offsets": offsets.reshape(1, -1, 3)}

    def close(self) -> None:
        """Free it."""
        self._parts.close()


def float32_bytes(paths: tuple[tuple[Path, Model], ...]) -> int:
    """What the files' tensors take with every floating-point number as F32."""
    tensors: list[WeightTensor] = []
    for path, model in paths:
        with load_weights(path, model) as weights:
            tensors += weights.tensors.values()
    return sum(tensor.elements * (1 if tensor.type == "I8" else 4) for tensor in tensors)


def staged() -> StageClock:
    """A clock of the stages; the product's calls return when their work is done."""
    clock = StageClock()
    clock.wrap(Estimator, "_hand_pass", "hands", whole=True)
    clock.wrap(Passes, "features", "crop")
    clock.wrap(GgmlBodyNetwork, "image_features", "backbone")
    clock.wrap(GgmlBodyNetwork, "decode", "decoder")
    clock.wrap(PoseHead, "pose", "mhr")
    return clock


def main() -> None:
    """Load, then answer requests."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("body", type=Path)
    parser.add_argument("mhr", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", choices=("cpu", "vulkan"), default="cpu")
    parser.add_argument("--precision", choices=("strict-f32", "fast"), default="strict-f32")
    options = parser.parse_args()
    clock = staged()
    started = time.perf_counter()
    with BodyModel.load(
        options.body,
        mhr=options.mhr,
        threads=options.threads,
        backend=options.backend,
        precision=options.precision,
    ) as model:
        loaded = time.perf_counter() - started
        product = Product(model.backend, options.mhr)
        image, inputs = serve.photo(), serve.mhr_inputs()

        def estimate(kind: InferenceType) -> serve.Arrays:
            found = model(image, [serve.BOX], serve.INTRINSICS, kind).person(0)
            return {name: found[name] for name in serve.FIELDS}

        def decode() -> serve.Arrays:
            mesh = model.mhr(inputs["identity"], inputs["parameters"], inputs["expression"])
            return {"vertices": mesh.vertices, "states": mesh.states}

        accelerator = model.backend.accelerator
        facts = {
            "load_seconds": loaded,
            "accelerator": None if accelerator is None else accelerator.name,
            "device": model.backend.device.description,
            "libraries": {file.path.name: file.sha256 for file in model.backend.files},
            "float32_weight_bytes": float32_bytes(((options.body, "body"), (options.mhr, "mhr"))),
        }
        tasks: dict[str, serve.Task] = {
            "body": lambda: estimate("body"),
            "full": lambda: estimate("full"),
            "mhr": decode,
            "product": product,
        }
        serve.serve(tasks, facts, clock)
        product.close()


if __name__ == "__main__":
    main()
