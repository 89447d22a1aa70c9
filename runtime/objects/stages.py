"""The stages of the pipeline that compute on the device, each for all objects of a photo.

A stage opens its network once, so that only one network's weights are on the device at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.extractors.models import MOGE, ObjectsModel
from sam3d_gguf.runtime.geometry.arrays import Float32, Int32, Uint8
from sam3d_gguf.runtime.ggml.network import Taps
from sam3d_gguf.runtime.objects.gaussians import Gaussians, GaussianSettings, gaussians
from sam3d_gguf.runtime.objects.latent_tables import (
    decoder_windows,
    flow_tables,
    mesh_coords,
    mesh_tables,
)
from sam3d_gguf.runtime.objects.mesh import Mesh, extract_mesh
from sam3d_gguf.runtime.objects.mesh_cubes import MeshSettings
from sam3d_gguf.runtime.objects.metadata import integer, numbers
from sam3d_gguf.runtime.objects.networks import Networks
from sam3d_gguf.runtime.objects.neural_depth import DepthModel
from sam3d_gguf.runtime.objects.neural_embed import ConditionEmbedder
from sam3d_gguf.runtime.objects.neural_slat_decoders import GaussianDecoder, MeshDecoder
from sam3d_gguf.runtime.objects.neural_slat_flow import FEATURES, StructuredLatentFlow
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.runtime.objects.neural_ss_flow import SparseStructureFlow
from sam3d_gguf.runtime.objects.noise import LATENT as STORED_LATENT
from sam3d_gguf.runtime.objects.noise import STRUCTURE as STORED_STRUCTURE
from sam3d_gguf.runtime.objects.noise import Noise
from sam3d_gguf.runtime.objects.pointmap import from_depth_model
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.sampler import Latent, SamplerSettings, sample
from sam3d_gguf.runtime.objects.watch import Watch

STRUCTURE: ObjectsModel = "objects.ss_generator"
LATENT: ObjectsModel = "objects.slat_generator"
OCCUPANCY: ObjectsModel = "objects.ss_decoder"
MESH: ObjectsModel = "objects.slat_decoder_mesh"
GAUSSIANS: Mapping[int, ObjectsModel] = {
    32: "objects.slat_decoder_gs",
    4: "objects.slat_decoder_gs_4",
}
"""The decoder for each number of Gaussians of a voxel."""


@dataclass(frozen=True, slots=True, eq=False)
class ScenePoints:
    """The pointmap that a run used.

    Attributes:
        points: [3, H, W] float32 in the camera's space, NaN where invalid.
        intrinsics: [3, 3] float32 in units of the photo's width and height, if a model told them.
        estimated: whether the depth model made it.
    """

    points: Float32
    intrinsics: Float32 | None
    estimated: bool


def no_taps(_name: str, _array: object, /) -> None:
    """Keeps nothing."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages with the networks of a release.

    Attributes:
        taps: one for each object; each hears of its object's intermediates.
    """

    release: ObjectsRelease
    networks: Networks
    watch: Watch
    taps: Sequence[Taps]

    def depth(self, photo: Uint8) -> ScenePoints:
        """The points of a photo [H, W, 3] by the depth model."""
        stage = "depth"
        with self.watch.stage(stage, 1), self.networks.opened(DepthModel, MOGE) as model:
            estimate = model.estimate(photo)
            self.watch.holds(stage, model)
            self.watch.step(stage)
        return ScenePoints(from_depth_model(estimate.points), estimate.intrinsics, True)

    def embed(
        self, stage: str, model: ObjectsModel, inputs: Sequence[Mapping[str, Float32]]
    ) -> list[Float32]:
        """[1, tokens, channels] condition tokens of a generator."""
        found: list[Float32] = []
        with (
            self.watch.stage(stage, len(inputs)),
            self.networks.opened(ConditionEmbedder, model) as embedder,
        ):
            for each, tap in zip(inputs, self.taps, strict=True):
                tokens = embedder.tokens({name: each[name] for name in embedder.inputs})
                tap(f"{stage}.tokens", tokens)
                found.append(tokens)
                self.watch.holds(stage, embedder)
                self.watch.step(stage)
        return found

    def sample_structure(
        self, tokens: Sequence[Float32], noise: Sequence[Noise], settings: SamplerSettings
    ) -> list[Latent]:
        """The tokens of shape and pose of every object, [1, T, channels] by modality."""
        stage = "ss-flow"
        with (
            self.watch.stage(stage, len(tokens) * settings.steps),
            self.networks.opened(SparseStructureFlow, STRUCTURE) as flow,
        ):
            found: list[Latent] = []
            for each, source, tap in zip(tokens, noise, self.taps, strict=True):
                flow.prepare(each)
                start = source.structure(flow.shapes)
                for name, array in start.items():
                    tap(f"{STORED_STRUCTURE}.{name}", array)
                latents = sample(flow.velocity, start, settings)
                found.append(self._last(stage, latents, tap))
                self.watch.holds(stage, flow)
        return found

    def decode_structure(self, latents: Sequence[Float32]) -> list[Float32]:
        """[1, 1, X, Y, Z] logits of occupancy of [1, T, channels] shapes."""
        stage = "ss-decoder"
        found: list[Float32] = []
        with (
            self.watch.stage(stage, len(latents)),
            self.networks.opened(SparseStructureDecoder, OCCUPANCY) as decoder,
        ):
            for latent, tap in zip(latents, self.taps, strict=True):
                logits = decoder.logits(latent)[None, None]
                tap(f"{stage}.logits", logits)
                found.append(logits)
                self.watch.holds(stage, decoder)
                self.watch.step(stage)
        return found

    def sample_latent(
        self,
        tokens: Sequence[Float32],
        coords: Sequence[Int32],
        noise: Sequence[Noise],
        settings: SamplerSettings,
    ) -> list[Float32]:
        """[N, channels] of every object, denormalised: times the deviation, plus the mean."""
        stage = "slat-flow"
        weights = self.release[LATENT]
        channels = integer(weights, "flow.latent_channels")
        mean, deviation = (
            np.array(numbers(weights, f"latent.{name}", channels), np.float32)
            for name in ("mean", "std")
        )
        found: list[Float32] = []
        with (
            self.watch.stage(stage, len(tokens) * settings.steps),
            self.networks.opened(StructuredLatentFlow, LATENT) as flow,
        ):
            for each, places, source, tap in zip(tokens, coords, noise, self.taps, strict=True):
                flow.prepare(each, flow_tables(places))
                start = {FEATURES: source.latent((1, len(places), channels))}
                tap(STORED_LATENT, start[FEATURES])
                latent = self._last(stage, sample(flow.velocity, start, settings), tap)
                found.append(latent[FEATURES][0] * deviation + mean)
                self.watch.holds(stage, flow)
        return found

    def decode_gaussians(
        self, latents: Sequence[Float32], coords: Sequence[Int32], count: int
    ) -> list[Gaussians]:
        """The Gaussians of every object."""
        stage, model = f"gaussian-decoder-{count}", GAUSSIANS[count]
        settings = GaussianSettings.of(self.release[model])
        perturbation = self.release[model].array("offset_perturbation")
        found: list[Gaussians] = []
        with (
            self.watch.stage(stage, len(latents)),
            self.networks.opened(GaussianDecoder, model) as decoder,
        ):
            for latent, places, tap in zip(latents, coords, self.taps, strict=True):
                raw = decoder.raw(latent, places, decoder_windows(places, decoder.window_size))
                tap(f"{stage}.raw", raw)
                found.append(gaussians(places, raw, perturbation, settings))
                self.watch.holds(stage, decoder)
                self.watch.step(stage)
        return found

    def decode_mesh(self, latents: Sequence[Float32], coords: Sequence[Int32]) -> list[Mesh]:
        """The surface of every object."""
        stage = "mesh-decoder"
        settings = MeshSettings.of(self.release[MESH])
        found: list[Mesh] = []
        with (
            self.watch.stage(stage, len(latents)),
            self.networks.opened(MeshDecoder, MESH) as decoder,
        ):
            for latent, places, tap in zip(latents, coords, self.taps, strict=True):
                tables = mesh_tables(places, decoder.window_size)
                features = decoder.features(latent, places, tables)
                self.watch.holds(stage, decoder)
                tap(f"{stage}.features", features)
                found.append(extract_mesh(mesh_coords(places), features, settings))
                self.watch.step(stage)
        return found

    def _last(self, stage: str, latents: Iterator[Latent], tap: Taps) -> Latent:
        """The result of a sampling, step by step."""
        latent: Latent = {}
        for number, latent in enumerate(latents, 1):
            for name, array in latent.items():
                tap(f"{stage}.step{number:02d}.{name}", array)
            self.watch.step(stage)
        return latent
