"""SAM 3D Objects as a Python object: a photo and masks to Gaussians, meshes and poses.

from sam3d_gguf.runtime.objects.pipeline import ObjectsPipeline

with ObjectsPipeline.load("objects/") as pipeline:
    scene = pipeline(photo, [mask], [SeededNoise(42)], points=points)
    scene.objects[0].mesh
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.models import MOGE, ObjectsModel, part
from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Uint8
from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.ggml.network import Taps
from sam3d_gguf.runtime.objects import stages
from sam3d_gguf.runtime.objects.gaussians import Gaussians
from sam3d_gguf.runtime.objects.mesh import Mesh
from sam3d_gguf.runtime.objects.metadata import integer
from sam3d_gguf.runtime.objects.networks import Networks
from sam3d_gguf.runtime.objects.neural_ss_flow import SHAPE
from sam3d_gguf.runtime.objects.noise import Noise
from sam3d_gguf.runtime.objects.pose import Pose, PoseDecoder
from sam3d_gguf.runtime.objects.preprocess import (
    PreprocessSettings,
    latent_inputs,
    structure_inputs,
    with_mask,
)
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.sampler import SamplerSettings
from sam3d_gguf.runtime.objects.stages import ScenePoints, Stages, no_taps
from sam3d_gguf.runtime.objects.structure import OccupancySettings, Structure, structure
from sam3d_gguf.runtime.objects.watch import QUIET, Progress, Watch
from sam3d_gguf.runtime.provenance import provenance_of
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import ContractError, InputError, within

_Thing = TypeVar("_Thing")
_Made = TypeVar("_Made")

GaussianCount = Literal[32, 4]
MAX_OBJECTS = 64


@dataclass(frozen=True, slots=True)
class ObjectsOptions:
    """What may be chosen of a run.

    Attributes:
        structure_steps, latent_steps: Euler steps of the two flows; None is the release's number.
        gaussians: of a voxel.
        mesh: whether the mesh is decoded too.

    Raises:
        InputError: another number of Gaussians. `ObjectsPipeline` refuses steps out of range.
    """

    structure_steps: int | None = None
    latent_steps: int | None = None
    gaussians: GaussianCount = 32
    mesh: bool = True

    def __post_init__(self) -> None:
        known = get_args(GaussianCount)
        if self.gaussians not in known:
            raise InputError(
                f"{self.gaussians!r} Gaussians of a voxel", expected=" or ".join(map(str, known))
            )


@dataclass(frozen=True, slots=True, eq=False)
class ObjectResult:
    """One object of a photo.

    Attributes:
        shape: [1, T, channels] latent of the sparse structure.
        logits: [1, 1, X, Y, Z] of occupancy.
        structure: which voxels there are.
        latent: [N, channels] of them, denormalised.
        gaussians: in the object's space, z up, -0.5..0.5.
        mesh: in the same, if it was asked for.
        pose: from there to the camera's space: x left, y up, z forward.
        scene_scale, scene_shift: [3] of the normalised pointmap, in which the pose was sampled.
    """

    shape: Float32
    logits: Float32
    structure: Structure
    latent: Float32
    gaussians: Gaussians
    mesh: Mesh | None
    pose: Pose
    scene_scale: Float32
    scene_shift: Float32


@dataclass(frozen=True, slots=True, eq=False)
class SceneResult:
    """The objects of one photo, and how they came about.

    Attributes:
        seconds: wall time by stage; `memory`: bytes on the device by stage and kind.
        verified: whether all of the models' data was hashed before.
    """

    objects: tuple[ObjectResult, ...]
    points: ScenePoints
    structure_sampling: SamplerSettings
    latent_sampling: SamplerSettings
    occupancy: OccupancySettings
    seconds: dict[str, float]
    memory: dict[str, dict[str, int]]
    provenance: dict[str, str]
    verified: bool


class ObjectsPipeline(Closing):
    """The opened parts of a release on one device. Not safe for concurrent calls, except `cancel`.

    Attributes:
        release: the parts.
        verified: whether all of their data was hashed.
        networks: on the device, while a stage needs them or all along.
        provenance: what results are made with, as reports say it.
    """

    @classmethod
    def load(
        cls,
        folder: str | PathLike[str],
        options: ObjectsOptions | None = None,
        *,
        depth: bool = False,
        backend: BackendName = "cpu",
        device: int = 0,
        threads: int | None = None,
        precision: Precision = "strict-f32",
        expect_device: str | None = None,
        verify: bool = False,
        resident: bool = False,
    ) -> Self:
        """Open the parts that a run with these options needs, and check them together.

        Args:
            folder: with the parts of one release.
            depth: open the depth model too, for photos without a pointmap.
            backend, device, threads, precision, expect_device: see `open_backend`; no other
                device is ever taken instead.
            verify: also hash all tensors' data first.
            resident: keep all networks on the device between stages and calls.

        Raises:
            InputError: the folder or a part is missing, or is no GGUF of the accepted form.
            ContractError: a part is another model, incomplete, or of another release.
            BackendError: the device is not there, or is another one.
        """
        chosen = options or ObjectsOptions()
        with contextlib.ExitStack() as stack:
            release = stack.enter_context(
                ObjectsRelease.open(Path(folder), needed(chosen, depth=depth), verify=verify)
            )
            opened = stack.enter_context(
                open_backend(
                    load_library(),
                    backend,
                    device=device,
                    threads=threads,
                    precision=precision,
                    expect_device=expect_device,
                )
            )
            pipeline = cls(release, opened, chosen, resident=resident, verified=verify)
            pipeline._closing.push(stack.pop_all())
        return pipeline

    def __init__(
        self,
        release: ObjectsRelease,
        backend: Backend,
        options: ObjectsOptions,
        *,
        resident: bool = False,
        verified: bool = False,
    ) -> None:
        """Take the parts and the device, which stay the caller's to close.

        Raises:
            ContractError: the parts do not fit each other, or a key is missing.
            InputError: a number of steps is out of range.
        """
        _check_grids(release, options)
        self.release = release
        self.verified = verified
        self.backend = backend
        self.options = options
        self.provenance = provenance_of(backend, release.metadata)
        self._structure = _sampling(release, stages.STRUCTURE, options.structure_steps)
        self._latent = _sampling(release, stages.LATENT, options.latent_steps)
        self._occupancy = OccupancySettings.of(release[stages.OCCUPANCY])
        self._cancelled = threading.Event()
        self._closing = contextlib.ExitStack()
        self.networks = Networks(backend, release, resident=resident)
        self._closed = False

    def __call__(
        self,
        photo: Uint8,
        masks: Sequence[Uint8 | Bool],
        noise: Sequence[Noise],
        points: ScenePoints | None = None,
        *,
        progress: Progress = QUIET,
        taps: Sequence[Taps] | None = None,
    ) -> SceneResult:
        """Reconstruct the objects that the masks mark.

        Args:
            photo: [H, W, 3] uint8 RGB.
            masks: [H, W] uint8 or bool, one an object; not 0 on the object.
            noise: where each object's sampling starts.
            points: of the photo, of any size; estimated without them, for which `load` opens the depth
                model.
            progress: hears of stages and steps.
            taps: one an object; each hears of its object's intermediates.

        Raises:
            InputError: a mask, the pointmap or the noise cannot be used, or no voxel is occupied.
            CancelledError: `cancel` was called.
            BackendError: the device has too little memory.
        """
        self._check(photo, masks, noise, points)
        images = _each(masks, lambda mask: with_mask(photo, mask))
        return self.of_images(images, noise, points, progress=progress, taps=taps)

    def of_images(
        self,
        images: Sequence[Uint8],
        noise: Sequence[Noise],
        points: ScenePoints | None = None,
        *,
        progress: Progress = QUIET,
        taps: Sequence[Taps] | None = None,
    ) -> SceneResult:
        """The same from images with their masks as alpha, which captures of the original have.

        Args:
            images: [H, W, 4] uint8 of one photo, one an object; alphas between 0 and 255 are kept.

        Raises:
            InputError, CancelledError, BackendError: as the call.
        """
        if self._closed:
            raise BackendError("the pipeline is closed", action="Load it again.")
        self._cancelled.clear()
        watch = Watch(self._cancelled, progress)
        run = Stages(self.release, self.networks, watch, taps or [no_taps] * len(images))
        known = run.depth(images[0][..., :3]) if points is None else points
        with watch.stage("preprocess", len(images)):
            inputs = _each(images, lambda image: self._inputs(image, known.points))
        return self._run(inputs, noise, known, run)

    def _check(self, photo: Any, masks: Sequence[Any], noise: Sequence[Noise], points: Any) -> None:
        if not 1 <= len(masks) <= MAX_OBJECTS:
            raise InputError(f"{len(masks)} masks", expected=f"1 to {MAX_OBJECTS}")
        if len(noise) != len(masks):
            raise InputError(f"noise for {len(noise)} objects", expected=f"{len(masks)}, as masks")
        shape: tuple[int, ...] = getattr(photo, "shape", ())
        kind: Any = getattr(photo, "dtype", None)
        if len(shape) != 3 or shape[2] != 3 or kind != np.uint8 or not photo.size:
            raise InputError(
                f"the photo is {type(photo).__name__} {list(shape)}",
                expected="[H, W, 3] uint8 RGB, as `read_photo` gives it",
            )
        if points is None and MOGE not in self.release.parts:
            raise InputError(
                "there are no points, and the depth model is not loaded",
                action="Give points, or load with depth=True.",
            )
        if points is not None:
            _check_points(points)

    def cancel(self) -> None:
        """Make the running call raise CancelledError after its current step; from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Free the networks, and what `load` opened; safe to call twice."""
        self._closed = True
        self.networks.close()
        self._closing.close()

    def _inputs(self, rgba: Uint8, points: Float32) -> _Inputs:
        structural = PreprocessSettings.of(self.release[stages.STRUCTURE])
        latent = PreprocessSettings.of(self.release[stages.LATENT])
        return _Inputs(
            dict(structure_inputs(rgba, points, structural)), dict(latent_inputs(rgba, latent))
        )

    def _run(
        self, inputs: Sequence[_Inputs], noise: Sequence[Noise], points: ScenePoints, run: Stages
    ) -> SceneResult:
        watch = run.watch
        for each, tap in zip(inputs, run.taps, strict=True):
            for name, array in each.named():
                tap(name, array)
        with np.errstate(all="ignore"):
            tokens = run.embed("embed-ss", stages.STRUCTURE, [each.structure for each in inputs])
            latents = run.sample_structure(tokens, noise, self._structure)
            logits = run.decode_structure([latent[SHAPE] for latent in latents])
            with watch.stage("structure", len(inputs)):
                decoder = PoseDecoder.of(self.release[stages.STRUCTURE])
                structures = _each(logits, lambda each: structure(each, self._occupancy))
                poses = [
                    _posed(decoder, latent, each, found)
                    for latent, each, found in zip(latents, inputs, structures, strict=True)
                ]
            coords = [found.coords for found in structures]
            tokens = run.embed("embed-slat", stages.LATENT, [each.latent for each in inputs])
            features = run.sample_latent(tokens, coords, noise, self._latent)
            clouds = run.decode_gaussians(features, coords, self.options.gaussians)
            meshes: list[Mesh | None] = [None] * len(inputs)
            if self.options.mesh:
                meshes[:] = run.decode_mesh(features, coords)
        objects = tuple(
            ObjectResult(
                latents[i][SHAPE],
                logits[i],
                structures[i],
                features[i],
                clouds[i],
                meshes[i],
                poses[i],
                inputs[i].structure["pointmap_scale"][0],
                inputs[i].structure["pointmap_shift"][0],
            )
            for i in range(len(inputs))
        )
        _each(objects, _require_finite)
        return SceneResult(
            objects,
            points,
            self._structure,
            self._latent,
            self._occupancy,
            watch.seconds,
            watch.memory,
            self.provenance,
            self.verified,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What the encoders take of one object."""

    structure: dict[str, Float32]
    latent: dict[str, Float32]

    def named(self) -> list[tuple[str, Float32]]:
        """All of them, with names for taps."""
        groups = (("ss", self.structure), ("slat", self.latent))
        return [(f"{key}.{name}", array) for key, group in groups for name, array in group.items()]


def needed(options: ObjectsOptions, *, depth: bool) -> tuple[ObjectsModel, ...]:
    """The parts that a run opens."""
    found: list[ObjectsModel] = [stages.STRUCTURE, stages.LATENT, stages.OCCUPANCY]
    found.append(stages.GAUSSIANS[options.gaussians])
    if options.mesh:
        found.append(stages.MESH)
    if depth:
        found.append(MOGE)
    return tuple(found)


def _each(things: Iterable[_Thing], make: Callable[[_Thing], _Made]) -> list[_Made]:
    """What is made of every object's thing, with the object in errors where there are several."""
    given = list(things)
    found: list[_Made] = []
    for number, thing in enumerate(given, start=1):
        with within(f"object {number}" if len(given) > 1 else ""):
            found.append(make(thing))
    return found


def _check_points(points: Any) -> None:
    shape: tuple[int, ...] = getattr(getattr(points, "points", None), "shape", ())
    if (
        not isinstance(points, ScenePoints)
        or len(shape) != 3
        or shape[0] != 3
        or not points.points.size
    ):
        raise InputError(
            f"the points are {type(points).__name__} {list(shape)}",
            expected="ScenePoints with [3, height, width] float32",
        )


def _sampling(release: ObjectsRelease, model: ObjectsModel, steps: int | None) -> SamplerSettings:
    settings = SamplerSettings.of(release[model])
    with within(f"the flow of {part(model)}"):
        return settings if steps is None else settings.with_steps(steps)


def _check_grids(release: ObjectsRelease, options: ObjectsOptions) -> None:
    """Refuse decoders of another voxel grid than the one that is found."""
    side = integer(release[stages.OCCUPANCY], "resolution")
    decoders: list[ObjectsModel] = [stages.GAUSSIANS[options.gaussians]]
    if options.mesh:
        decoders.append(stages.MESH)
    for model in decoders:
        found = integer(release[model], "resolution")
        if found != side:
            raise ContractError(
                f"its voxel grid has the side {found}",
                where=str(release[model].path),
                expected=f"{side}, as that of {release[stages.OCCUPANCY].path.name}",
            )


def _posed(decoder: PoseDecoder, latent: Any, inputs: _Inputs, found: Structure) -> Pose:
    given = inputs.structure
    pose = decoder.decode(latent, given["pointmap_scale"], given["pointmap_shift"])
    return Pose(pose.translation, pose.rotation, pose.scale * np.float32(found.scale_factor))


def _require_finite(found: ObjectResult) -> None:
    cloud, pose = found.gaussians, found.pose
    arrays: dict[str, NDArray[Any]] = {
        "latent": found.latent,
        "gaussians": cloud.positions,
        "gaussians' scales": cloud.scales,
        "gaussians' opacities": cloud.logits,
        "translation": pose.translation,
        "rotation": pose.rotation,
        "scale": pose.scale,
    }
    if found.mesh is not None:
        arrays |= {"mesh": found.mesh.vertices, "mesh's attributes": found.mesh.attributes}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise InputError(
                f"numbers of the object's {name} are not finite",
                action="Check the pointmap and the mask, and the models with --verify.",
            )
