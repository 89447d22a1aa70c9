"""The focal length and the depth shift of a point map that is known up to them.

Source: microsoft/MoGe (`normalized_view_plane_uv`, `recover_focal_shift`,
`solve_optimal_focal_shift`), whose optimiser is MINPACK's `lmdif` as SciPy calls it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.objects.resize import Size, nearest
from sam3d_gguf.schemas.errors import InputError

_GRID: Size = (64, 64)
"""So many pixels are looked at."""

_COST_TOLERANCE = 1e-3
_STEP_TOLERANCE = 1e-8
_GRADIENT_TOLERANCE = 1e-8
_FIRST_RADIUS = 100.0
_EVALUATIONS = 200
_ACCEPTED = 1e-4

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What makes a point map one of a camera.

    Attributes:
        focal: the focal length over half of the image's diagonal.
        shift: is added to the depths.
    """

    focal: np.float32
    shift: np.float32

    def intrinsics(self, size: Size) -> Float32:
        """[3, 3] of the camera, whose image plane is 1 wide and 1 high."""
        aspect = size[1] / size[0]
        half_diagonal = self.focal / np.float32(2) * np.float32(math.hypot(1, aspect))
        matrix = np.eye(3, dtype=np.float32)
        matrix[0, 0], matrix[1, 1] = half_diagonal / np.float32(aspect), half_diagonal
        matrix[:2, 2] = 0.5
        return matrix


def view_plane(size: Size, aspect: float) -> Float32:
    """[H, W, 2] x and y of the pixels' centres, over half of the diagonal, from the image's centre.

    Args:
        aspect: width over height of the image, which need not be those of the grid of pixels.
    """
    diagonal = math.hypot(1, aspect)
    x = _centred(size[1], aspect / diagonal)
    y = _centred(size[0], 1 / diagonal)
    return np.stack(np.broadcast_arrays(x[None, :], y[:, None]), axis=-1)


def recover(points: Float32, mask: NDArray[np.bool_]) -> Recovered:
    """The focal length and shift that bring the points closest to their pixels.

    They minimise |focal * xy / (z + shift) - pixel| over a grid of 64 x 64 points. With fewer
    than two points in the mask they are 1 and 0.

    Args:
        points: [H, W, 3], x right, y down, z forward.
        mask: [H, W], where the points count.

    Raises:
        InputError: a point is not finite, or none is off the axis.
    """
    height, width = mask.shape
    inside = nearest(mask, _GRID)
    pixels = _sampled(view_plane((height, width), width / height), inside)
    sampled = _sampled(points, inside)
    if len(sampled) < 2:
        return Recovered(np.float32(1), np.float32(0))
    fit = _Fit(sampled[:, :2], sampled[:, 2], pixels)
    with np.errstate(all="ignore"):
        shift = np.float32(_minimise(fit))
        focal = np.float32(fit.at(float(shift)).focal)
    if not np.isfinite(focal) or not np.isfinite(shift):
        raise InputError(
            "the depth model's points give no focal length",
            expected="finite points that are not all on the axis",
            action="Use another photo, or give a pointmap.",
        )
    return Recovered(focal, shift)


def _centred(count: int, span: float) -> Float32:
    outer = span * (count - 1) / count
    return np.linspace(-outer, outer, count).astype(np.float32)


def _sampled(planes: NDArray[Any], inside: NDArray[np.bool_]) -> Float64:
    values: Float64 = np.moveaxis(nearest(np.moveaxis(planes, -1, 0), _GRID), 0, -1)[inside]
    return values.astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """The residuals at a shift, their derivative by it, and the focal length that is best there."""

    residuals: Float64
    slopes: Float64
    focal: float


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    xy: Float64
    z: Float64
    pixels: Float64

    def at(self, shift: float) -> _Point:
        depth = (self.z + shift)[:, None]
        projected = self.xy / depth
        moved = -projected / depth
        square = np.vdot(projected, projected)
        focal = np.vdot(projected, self.pixels) / square
        change = (np.vdot(moved, self.pixels) - 2 * focal * np.vdot(projected, moved)) / square
        residuals = focal * projected - self.pixels
        slopes = change * projected + focal * moved
        return _Point(residuals.ravel(), slopes.ravel(), float(focal))


def _minimise(fit: _Fit) -> float:
    """The shift that `lmdif` finds from 0: a Levenberg-Marquardt descent in one dimension.

    Its steps and where it stops are MINPACK's, since at the original's tolerance of 1e-3 the
    result depends on them. The derivative is exact where MINPACK takes a difference.
    """
    shift, damping, radius = 0.0, 0.0, _FIRST_RADIUS
    point = fit.at(shift)
    norm = _norm(point.residuals)
    evaluations, first = 1, True
    while norm > 0 and math.isfinite(norm):
        evaluations += 1
        slope = _norm(point.slopes)
        gradient = float(np.vdot(point.slopes, point.residuals))
        if slope == 0 or abs(gradient) <= _GRADIENT_TOLERANCE * slope * norm:
            break
        while True:
            damping = _damping(slope, gradient, radius, damping)
            step = -gradient / (slope**2 + damping)
            radius = min(radius, abs(step)) if first else radius
            trial = fit.at(shift + step)
            trial_norm = _norm(trial.residuals)
            evaluations += 1
            actual = 1 - (trial_norm / norm) ** 2 if 0.1 * trial_norm < norm else -1.0
            linear, damped = (slope * step / norm) ** 2, damping * (step / norm) ** 2
            predicted = linear + 2 * damped
            ratio = actual / predicted if predicted else 0.0
            if ratio <= 0.25:
                shrink = 0.5
                if actual < 0:
                    shrink = 0.5 * (linear + damped) / (linear + damped - 0.5 * actual)
                if 0.1 * trial_norm >= norm or shrink < 0.1:
                    shrink = 0.1
                radius = shrink * min(radius, 10 * abs(step))
                damping /= shrink
            elif damping == 0 or ratio >= 0.75:
                radius = 2 * abs(step)
                damping *= 0.5
            if ratio >= _ACCEPTED:
                shift, point, norm, first = shift + step, trial, trial_norm, False
            settled = max(abs(actual), predicted) <= _COST_TOLERANCE and ratio <= 2
            still = radius <= _STEP_TOLERANCE * abs(shift)
            if settled or still or evaluations >= _EVALUATIONS:
                return shift
            if ratio >= _ACCEPTED:
                break
    return shift


def _damping(slope: float, gradient: float, radius: float, before: float) -> float:
    """What is added to the squared slope so that the step is within a tenth of the radius."""
    free = abs(gradient) / slope**2
    if free <= 1.1 * radius:
        return 0.0
    exact = abs(gradient) / radius - slope**2
    kept = min(before, abs(gradient) / radius)
    return kept if kept > exact and abs(gradient) / (slope**2 + kept) >= 0.9 * radius else exact


def _norm(values: Float64) -> float:
    return math.sqrt(float(np.vdot(values, values)))
