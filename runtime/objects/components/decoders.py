"""The decoders of the structured latent: Gaussians, and the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from sam3d_gguf.extractors.models import ObjectsModel
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.objects.components.captures import Captured, Recorder
from sam3d_gguf.runtime.objects.components.component import Component
from sam3d_gguf.runtime.objects.components.inputs import Arrays, Wanted, check_voxels
from sam3d_gguf.runtime.objects.gaussians import GaussianSettings, gaussians
from sam3d_gguf.runtime.objects.latent_tables import decoder_windows, mesh_coords, mesh_tables
from sam3d_gguf.runtime.objects.mesh import Mesh, extract_mesh
from sam3d_gguf.runtime.objects.mesh_cubes import MeshSettings
from sam3d_gguf.runtime.objects.metadata import integer
from sam3d_gguf.runtime.objects.neural_slat_decoders import GaussianDecoder, MeshDecoder
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.stages import GAUSSIANS, MESH

_GEOMETRY_COLUMNS = 6
"""PLY columns of places and normals, before those of looks."""
_SURFACES = ("decoder_features", "smooth")
_CUBE_BYTES = 1024
"""Memory that a cube's features and table take."""


def _latent_wanted(release: ObjectsRelease, model: ObjectsModel) -> Mapping[str, Wanted]:
    channels = integer(release[model], "latent_channels")
    return {"coords": Wanted(("N", 4), "int32"), "slat_feats": Wanted(("N", channels))}


def _gaussian_decoder(model: ObjectsModel) -> Component:
    """Raw Gaussians, their fields and what they mean."""

    def run(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
        weights, coords = release[model], inputs["coords"]
        settings = GaussianSettings.of(weights)
        check_voxels("coords", coords, settings.resolution)
        recorder = Recorder()
        with GaussianDecoder(backend, weights) as decoder:
            windows = decoder_windows(coords, decoder.window_size)
            raw = decoder.raw(inputs["slat_feats"], coords, windows, taps=recorder)
        names = _gaussian_stages(integer(weights, "block_count"))
        found: Captured = {name: recorder[name] for name in names}
        found["out_layer_raw"] = raw
        cloud = gaussians(coords, raw, weights.array("offset_perturbation"), settings)
        columns = np.stack([*cloud.cloud().columns().values()], axis=1)
        return found | {
            "gaussian._xyz": cloud.places,
            "gaussian._features_dc": cloud.features,
            "gaussian._scaling": cloud.raw_scales,
            "gaussian._rotation": cloud.raw_rotations,
            "gaussian._opacity": cloud.raw_opacities,
            "gaussian.get_xyz": cloud.positions,
            "gaussian.get_scaling": cloud.scales,
            "gaussian.get_rotation": cloud.rotations,
            "gaussian.get_opacity": cloud.opacities,
            "ply.x_y_z_nx_ny_nz": columns[:, :_GEOMETRY_COLUMNS],
            "ply.f_dc_opacity_scale_rot": columns[:, _GEOMETRY_COLUMNS:],
        }

    return Component((model,), lambda release: _latent_wanted(release, model), run)


def _gaussian_stages(blocks: int) -> Iterator[str]:
    """The output of every block, and the attention of the first that has shifted windows."""
    yield "input_layer"
    for block in range(blocks):
        if block == 1:
            yield "blocks.1.attn"
        yield f"blocks.{block}"


def _mesh_decoder(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """Features of the mesh's cubes, and the mesh."""
    weights, coords = release[MESH], inputs["coords"]
    check_voxels("coords", coords, integer(weights, "resolution"))
    cubes = mesh_coords(coords)
    check_available(_CUBE_BYTES * len(cubes), "the features of the mesh's cubes")
    recorder = Recorder()
    with MeshDecoder(backend, weights) as decoder:
        tables = mesh_tables(coords, decoder.window_size)
        features = decoder.features(inputs["slat_feats"], coords, tables, taps=recorder)
    blocks = integer(weights, "block_count")
    first = "upsample.0"
    names = ["input_layer", *(f"blocks.{block}" for block in range(blocks))]
    names += [f"{first}.{part}" for part in ("act_layers", "out_layers.0", "skip_connection")]
    found: Captured = {name: recorder[name] for name in [*names, first]}
    found["upsample.1_stride4"] = recorder["upsample.1"][::4]
    found["out_layer_stride8"] = features[::8]
    found["out_layer.coords"] = cubes
    mesh = extract_mesh(cubes, features, MeshSettings.of(weights))
    return found | _mesh_stages("mesh", mesh)


def _extract_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    features = integer(release[MESH], "feature_count")
    found: dict[str, Wanted] = {}
    for case, rows in zip(_SURFACES, ("M", "N"), strict=True):
        found[f"{case}.coords"] = Wanted((rows, 4), "int32")
        found[f"{case}.feats"] = Wanted((rows, features))
    return found


def _extract(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """The meshes of two sets of features."""
    del backend
    settings = MeshSettings.of(release[MESH])
    found: Captured = {}
    for case in _SURFACES:
        coords = inputs[f"{case}.coords"]
        check_voxels(f"{case}.coords", coords, settings.grid, ordered=False)
        mesh = extract_mesh(coords, inputs[f"{case}.feats"], settings)
        found |= _mesh_stages(case, mesh)
    return found


def _mesh_stages(prefix: str, mesh: Mesh) -> Captured:
    return {
        f"{prefix}.vertices": mesh.vertices,
        f"{prefix}.faces": mesh.faces,
        f"{prefix}.vertex_attrs": mesh.attributes,
    }


GAUSSIANS_32 = _gaussian_decoder(GAUSSIANS[32])
GAUSSIANS_4 = _gaussian_decoder(GAUSSIANS[4])
MESH_DECODER = Component((MESH,), lambda release: _latent_wanted(release, MESH), _mesh_decoder)
MESH_EXTRACT = Component((MESH,), _extract_wanted, _extract)
