"""SAM 3D Body as a Python object.

from sam3d_gguf.runtime.body import BodyModel

with BodyModel.load("body.gguf", mhr="mhr.gguf") as model:
    result = model("photo.jpg", [[52, 8, 141, 139]])
    result["pred_vertices"]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sam3d_gguf.runtime.body.capture import Capture
from sam3d_gguf.runtime.body.estimator import Estimator, InferenceType, Request
from sam3d_gguf.runtime.body.hands import LEFT_SCALE, RIGHT_SCALE, ScaleStatistics
from sam3d_gguf.runtime.body.mhr import Mhr
from sam3d_gguf.runtime.body.neural_mhr import GgmlMhrProducts
from sam3d_gguf.runtime.body.neural_network import GgmlBodyNetwork
from sam3d_gguf.runtime.body.passes import Passes
from sam3d_gguf.runtime.body.pose_head import PoseHead, load_constants
from sam3d_gguf.runtime.body.result import (
    BodyResult,
    FeatureResult,
    body_result,
    feature_result,
)
from sam3d_gguf.runtime.body.settings import BodySettings
from sam3d_gguf.runtime.geometry.arrays import Float32, Uint8
from sam3d_gguf.runtime.geometry.camera import checked_intrinsics, default_intrinsics
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig, load_rig
from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError, CancelledError
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.images import read_photo
from sam3d_gguf.runtime.loading import check_companion, load_weights
from sam3d_gguf.runtime.provenance import provenance_of
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError

Photo = str | PathLike[str] | Uint8
MAX_PEOPLE = 64
MIN_SIDE = 1.0
"""Smallest side of a box, pixels."""


class BodyModel(Closing):
    """A loaded Body model and its MHR.

    Calls from several threads run one after another. Close it with `with` or `close`.

    Attributes:
        stage_seconds: wall time of the last call by stage.
        metadata: of the model files, by role (`body`, `mhr`).
        provenance: what results are made with, as reports say it.
    """

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        mhr: str | PathLike[str],
        backend: BackendName = "cpu",
        device: int = 0,
        threads: int | None = None,
        precision: Precision = "strict-f32",
        expect_device: str | None = None,
        verify: bool = False,
    ) -> Self:
        """Open the two files, check them, and place them on a device.

        Args:
            path: the Body GGUF.
            mhr: the MHR GGUF that goes with it.
            backend, device, threads, precision, expect_device: see `open_backend`; no other
                device is ever taken instead.
            verify: also hash all tensors' data first.

        Raises:
            InputError: a file that cannot be read, or is no GGUF of the accepted form.
            ContractError: a file that is another model, incomplete, or not the companion.
            BackendError: the device is not there, is another one, or has too little memory.
        """
        with (
            load_weights(Path(path), "body", verify=verify) as weights,
            load_weights(Path(mhr), "mhr", verify=verify) as companion,
        ):
            check_companion(weights, companion)
            opened = open_backend(
                load_library(),
                backend,
                device=device,
                threads=threads,
                precision=precision,
                expect_device=expect_device,
            )
            return cls(weights, companion, opened, owns_backend=True)

    def __init__(
        self, body: Weights, mhr: Weights, backend: Backend, *, owns_backend: bool = False
    ) -> None:
        """Place both models on a device.

        Args:
            body: a checked Body file, tensors under the checkpoint's names.
            mhr: the checked MHR file that goes with it.
            backend: stays the caller's to close, unless `owns_backend`.

        Raises:
            ContractError: the files do not go together, or one is incomplete.
            BackendError: the device has too little memory.
        """
        self.backend = backend
        self.stage_seconds: dict[str, float] = {}
        self.metadata: dict[str, dict[str, Any]] = {
            "body": dict(body.metadata),
            "mhr": dict(mhr.metadata),
        }
        self.provenance = provenance_of(backend, self.metadata)
        self._lock = threading.Lock()
        self._stages: list[tuple[str, float]] = []
        self._cancelled = threading.Event()
        self._closed = False
        with ExitStack() as stack:
            if owns_backend:
                stack.enter_context(backend)
            check_companion(body, mhr)
            self.rig: MhrRig = load_rig(mhr)
            self._faces = body.array("head_pose.faces")
            settings = BodySettings.of(body)
            network = stack.enter_context(
                GgmlBodyNetwork(backend, body, decoder_heads=settings.decoder_heads)
            )
            products = stack.enter_context(GgmlMhrProducts(backend, mhr))
            self._closing = stack.pop_all()
        self.mhr = Mhr(products, self.rig)
        passes = Passes(
            network,
            PoseHead("body", network, self.mhr, load_constants(body, "body")),
            PoseHead("hand", network, self.mhr, load_constants(body, "hand")),
            settings,
        )
        self.settings = settings
        self.estimator = Estimator(passes, _statistics(body), self._enter_stage)

    def __call__(
        self,
        image: Photo,
        boxes: ArrayLike,
        intrinsics: ArrayLike | None = None,
        inference_type: InferenceType = "full",
        *,
        masks: ArrayLike | None = None,
        recorded_hand_boxes: tuple[Float32, Float32] | None = None,
        capture: Capture | None = None,
    ) -> BodyResult:
        """Estimate the people in one photo.

        Args:
            image: a JPEG, PNG or WebP file, or [H, W, 3] uint8 RGB.
            boxes: [N, 4] x0, y0, x1, y1, pixels; for `hand`, boxes of right hands.
            intrinsics: [3, 3], pixels; None assumes the image's diagonal as focal length.
            inference_type: `full` refines the hands, `body` does not, `hand` sees hands alone.
            masks: [N, H, W] of 0 and 1, the people's silhouettes.
            recorded_hand_boxes: see `Request`.
            capture: collects the intermediates of a `body` or `full` run.

        Raises:
            InputError: an input that cannot be used.
            CancelledError: `cancel` was called.
            BackendError: the device has too little memory.
        """
        if inference_type not in ("full", "body", "hand"):
            raise InputError(
                f"unknown inference type {inference_type!r}", expected="full, body or hand"
            )
        if capture is not None and inference_type == "hand":
            raise InputError("intermediates of a hand alone", expected="full or body")
        request, assumed = self._request(image, boxes, intrinsics, masks, recorded_hand_boxes)
        with self._lock, np.errstate(all="ignore"):
            self._start()
            estimate = self.estimator.run(request, inference_type, capture)
            self._finish()
        result = body_result(
            request,
            estimate,
            self.rig,
            self._faces,
            inference_type,
            assumed=assumed,
            provenance=self.provenance,
            capture=capture,
        )
        _require_finite(result.arrays)
        return result

    def features(
        self,
        image: Photo,
        boxes: ArrayLike,
        intrinsics: ArrayLike | None = None,
        *,
        masks: ArrayLike | None = None,
    ) -> FeatureResult:
        """The pose tokens and camera translations alone, for motion trackers.

        Hand detection tokens are off, and the last layer decodes no mesh. Arguments and errors
        are those of a call.
        """
        request, assumed = self._request(image, boxes, intrinsics, masks, None)
        with self._lock, np.errstate(all="ignore"):
            self._start()
            tokens = self.estimator.tokens(request)
            self._finish()
        result = feature_result(request, tokens, assumed=assumed, provenance=self.provenance)
        _require_finite(result.arrays)
        return result

    def new_capture(self) -> Capture:
        """An empty capture that fits this model."""
        return Capture(self.settings.backbone_depth, self.settings.decoder_depth)

    def cancel(self) -> None:
        """Make the running call raise CancelledError before its next stage; from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Free the models, and the backend if `load` opened it; safe to call twice."""
        with self._lock:
            self._closed = True
            self._closing.close()

    def _start(self) -> None:
        if self._closed:
            raise BackendError("the model is closed", action="Load it again.")
        self._stages = []
        self._cancelled.clear()

    def _enter_stage(self, name: str) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"the run was cancelled before the stage {name!r}")
        self._stages.append((name, time.perf_counter()))

    def _finish(self) -> None:
        ends = [start for _, start in self._stages[1:]] + [time.perf_counter()]
        seconds: dict[str, float] = {}
        for (name, start), end in zip(self._stages, ends, strict=True):
            seconds[name] = seconds.get(name, 0.0) + end - start
        self.stage_seconds = seconds

    def _request(
        self,
        image: Photo,
        boxes: ArrayLike,
        intrinsics: ArrayLike | None,
        masks: ArrayLike | None,
        recorded: tuple[Float32, Float32] | None,
    ) -> tuple[Request, bool]:
        photo = _photo(image)
        height, width = photo.shape[:2]
        found = checked_boxes(boxes, width, height)
        assumed = intrinsics is None
        matrix = (
            default_intrinsics(width, height)
            if intrinsics is None
            else checked_intrinsics(_numbers(intrinsics, "intrinsics"))
        )
        silhouettes = None if masks is None else _masks(masks, len(found), photo)
        hands = None if recorded is None else _recorded(recorded, len(found))
        return Request(photo, found, matrix, silhouettes, hands), assumed


def _require_finite(arrays: Mapping[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise InputError(
                "the estimate is not finite",
                where=name,
                action="Check the box and the intrinsics, and the model with --verify.",
            )


def checked_boxes(boxes: ArrayLike, width: int, height: int) -> Float32:
    """[N, 4] float32 boxes that are finite, not empty, and meet the image.

    Raises:
        InputError: they are not.
    """
    numbers = _numbers(boxes, "boxes")
    if numbers.ndim == 1 and numbers.shape == (4,):
        numbers = numbers[None]
    if numbers.ndim != 2 or numbers.shape[1] != 4 or not 1 <= len(numbers) <= MAX_PEOPLE:
        raise InputError(
            f"boxes of shape {list(numbers.shape)}",
            expected=f"1 to {MAX_PEOPLE} boxes of x0, y0, x1, y1",
        )
    with np.errstate(over="ignore"):
        found = numbers.astype(np.float32)
    for index, (x0, y0, x1, y1) in enumerate(found.tolist()):
        where = f"box {index}"
        if not np.isfinite(found[index]).all():
            raise InputError("a coordinate is not finite", where=where, expected="pixels")
        if x1 <= x0 or y1 <= y0:
            raise InputError("the box is empty", where=where, expected="x0 < x1 and y0 < y1")
        if min(x1 - x0, y1 - y0) < MIN_SIDE:
            raise InputError(
                "the box is smaller than a pixel", where=where, expected="pixels, not fractions"
            )
        if x1 <= 0 or y1 <= 0 or x0 >= width or y0 >= height:
            raise InputError(
                "the box lies outside the image", where=where, expected=f"within {width}x{height}"
            )
        if max(x1 - x0, y1 - y0) > 64 * max(width, height):
            raise InputError(
                "the box is far larger than the image",
                where=where,
                expected=f"sides up to 64 times {max(width, height)}",
            )
    return found


def _numbers(values: ArrayLike, what: str) -> NDArray[np.float64]:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} are not numbers") from error


def _photo(image: Photo) -> Uint8:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            raise InputError(
                f"an image of shape {list(image.shape)} and type {image.dtype}",
                expected="[H, W, 3] uint8 RGB",
            )
        return image
    try:
        path = Path(image)
    except TypeError as error:
        raise InputError(
            f"the image is {type(image).__name__}", expected="a path, or [H, W, 3] uint8 RGB"
        ) from error
    return read_photo(path)


def _masks(masks: ArrayLike, count: int, photo: Uint8) -> Uint8:
    found: NDArray[Any] = np.asarray(masks)
    if found.shape == photo.shape[:2]:
        found = found[None]
    if found.shape != (count, *photo.shape[:2]) or found.dtype.name not in ("bool", "uint8"):
        raise InputError(
            f"masks of shape {list(found.shape)} and type {found.dtype}",
            expected=f"[{count}, {photo.shape[0]}, {photo.shape[1]}] bool or uint8",
        )
    silhouettes = found.astype(np.uint8)
    if silhouettes.max() > 1:
        raise InputError(f"a mask holds {silhouettes.max()}", expected="0 and 1")
    return silhouettes


def _recorded(boxes: tuple[ArrayLike, ArrayLike], count: int) -> tuple[Float32, Float32]:
    left, right = (_numbers(each, "recorded hand boxes").astype(np.float32) for each in boxes)
    if left.shape != (count, 4) or right.shape != (count, 4):
        raise InputError(
            f"recorded hand boxes of shapes {list(left.shape)} and {list(right.shape)}",
            expected=f"[{count}, 4]",
        )
    return left, right


def _statistics(body: Weights) -> ScaleStatistics:
    mean, steps = body.array("head_pose.scale_mean"), body.array("head_pose.scale_comps")
    places: Sequence[int] = (LEFT_SCALE, RIGHT_SCALE)
    left, right = (float(mean[place]) for place in places)
    left_step, right_step = (float(steps[place, place]) for place in places)
    return ScaleStatistics((left, right), (left_step, right_step))
