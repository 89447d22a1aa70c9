"""What the components of SAM 3D Objects are timed on: always the same, of the official sizes."""

import numpy as np
import numpy.typing as npt

from benchmarks.serve import Arrays

COMPONENTS = ("ss_flow", "slat_flow", "ss_decoder", "gaussian_32", "gaussian_4", "mesh")

TIME = 437.5
SS_LATENTS = {
    "6drotation_normalized": (1, 1, 6),
    "scale": (1, 1, 3),
    "shape": (1, 4096, 8),
    "translation": (1, 1, 3),
    "translation_scale": (1, 1, 1),
}
SS_TOKENS = (1, 7528, 1024)
SLAT_TOKENS = (1, 5496, 1024)
LATENT_CHANNELS = 8

_GRID = 64
_RADII = (19.0, 25.0, 21.0)
_THICKNESS = 0.6


def voxels() -> npt.NDArray[np.int32]:
    """[N, 4] batch 0, x, y, z, sorted: those that the surface of a dented ellipsoid runs through."""
    axes = np.arange(_GRID) - (_GRID - 1) / 2
    x, y, z = np.meshgrid(axes, axes, axes, indexing="ij")
    a, b, c = _RADII
    length = np.sqrt((x / a) ** 2 + (y / b) ** 2 + (z / c) ** 2)
    dents = 1 + 0.06 * np.sin(x / 4) * np.cos(y / 5) + 0.04 * np.sin(z / 3)
    away = np.abs(length - dents) * min(_RADII)
    places = np.argwhere(away < _THICKNESS)
    return np.ascontiguousarray(np.pad(places, ((0, 0), (1, 0))), np.int32)  # as spconv reads them


def inputs(component: str) -> Arrays:
    """The float32 inputs of a component by name, and `coords` where it has voxels."""
    rng = np.random.Generator(np.random.PCG64(COMPONENTS.index(component)))

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    if component == "ss_flow":
        latents = {name: normal(*shape) for name, shape in SS_LATENTS.items()}
        return {**latents, "tokens": normal(*SS_TOKENS)}
    if component == "ss_decoder":
        return {"latent": normal(*SS_LATENTS["shape"])}
    coords = voxels()
    feats = normal(len(coords), LATENT_CHANNELS)
    if component == "slat_flow":
        return {"coords": coords, "feats": feats, "tokens": normal(*SLAT_TOKENS)}
    return {"coords": coords, "feats": feats}
