"""The focal length and the depth shift of a point map that is known up to them.

Source: microsoft/MoGe (`normalized_view_plane_uv`, `recover_focal_shift`,
`solve_optimal_focal_shift`), whose optimiser is MINPACK's `lmdif` as SciPy calls it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    return _crossed(*_axes(size, aspect))


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
    x, y = _axes((height, width), width / height)
    across, down = nearest(x[None], (1, _GRID[1]))[0], nearest(y[None], (1, _GRID[0]))[0]
    pixels = _crossed(across, down)[inside].astype(np.float64)
    sampled = nearest(points.transpose(2, 0, 1), _GRID)[:, inside].T.astype(np.float64)
    if len(sampled) < 2:
        return Recovered(np.float32(1), np.float32(0))
    fit = _Fit(sampled[:, :2], sampled[:, 2], pixels)
    with np.errstate(all="ignore"):
        shift = np.float32(_Descent(fit).run())
        focal = np.float32(fit.at(float(shift)).focal)
    if not np.isfinite(focal) or not np.isfinite(shift):
        raise InputError(
            "the depth model's points give no focal length",
            expected="finite points that are not all on the axis",
            action="Use another photo, or give a pointmap.",
        )
    return Recovered(focal, shift)


def _axes(size: Size, aspect: float) -> tuple[Float32, Float32]:
    """The x of every column and the y of every row."""
    diagonal = math.hypot(1, aspect)
    return _centred(size[1], aspect / diagonal), _centred(size[0], 1 / diagonal)


def _centred(count: int, span: float) -> Float32:
    outer = span * (count - 1) / count
    return np.linspace(-outer, outer, count).astype(np.float32)


def _crossed(x: Float32, y: Float32) -> Float32:
    return np.stack(np.broadcast_arrays(x[None, :], y[:, None]), axis=-1)


@dataclass(frozen=True, slots=True)
class _Point:
    """What is known at a shift.

    Attributes:
        norm: of the residuals.
        slope: the norm of their derivative by the shift.
        gradient: the product of both.
        focal: the focal length that is best there.
    """

    norm: float
    slope: float
    gradient: float
    focal: float

    @property
    def is_flat(self) -> bool:
        """Whether no step lessens the residuals, or they are no numbers."""
        least = _GRADIENT_TOLERANCE * self.slope * self.norm
        return not math.isfinite(self.norm) or abs(self.gradient) <= least


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """Points and their pixels, each [N, .]."""

    xy: Float64
    z: Float64
    pixels: Float64

    def at(self, shift: float) -> _Point:
        depth = (self.z + shift)[:, None]
        projected = self.xy / depth
        moved = -projected / depth
        square = _product(projected, projected)
        focal = _product(projected, self.pixels) / square
        change = _product(moved, self.pixels) - 2 * focal * _product(projected, moved)
        residuals = focal * projected - self.pixels
        slopes = change / square * projected + focal * moved
        return _Point(
            norm=math.sqrt(_product(residuals, residuals)),
            slope=math.sqrt(_product(slopes, slopes)),
            gradient=float(_product(slopes, residuals)),
            focal=float(focal),
        )


@dataclass(frozen=True, slots=True)
class _Gain:
    """How a step turned out, all over the squared norm before it.

    Attributes:
        actual: the decrease; minus infinity where the norm grew tenfold.
        linear, damped: the parts of the decrease that the slope promises.
    """

    actual: float
    linear: float
    damped: float

    @classmethod
    def of(cls, before: _Point, after: _Point, step: float, damping: float) -> _Gain:
        ratio = after.norm / before.norm
        actual = 1 - ratio**2 if 0.1 * ratio < 1 else -math.inf
        scaled = step / before.norm
        return cls(actual, (before.slope * scaled) ** 2, damping * scaled**2)

    @property
    def predicted(self) -> float:
        return self.linear + 2 * self.damped

    @property
    def ratio(self) -> float:
        return self.actual / self.predicted if self.predicted else 0.0

    @property
    def shrinkage(self) -> float:
        """What a bad step's length is to be multiplied with."""
        if self.actual >= 0:
            return 0.5
        slope = self.linear + self.damped
        return max(0.1, 0.5 * slope / (slope - 0.5 * self.actual))


class _Descent:
    """MINPACK's `lmdif` from 0: a Levenberg-Marquardt descent in one dimension.

    Its steps and where it stops are MINPACK's, since at the original's tolerance of 1e-3 the
    result depends on them; SciPy scales them so before 1.16. The derivative is exact where
    MINPACK takes a difference.
    """

    def __init__(self, fit: _Fit) -> None:
        self._fit = fit
        self._shift = 0.0
        self._radius = _FIRST_RADIUS
        self._damping = 0.0
        self._evaluations = 1
        self._has_moved = False

    def run(self) -> float:
        """The shift."""
        point: _Point | None = self._fit.at(self._shift)
        while point is not None and not point.is_flat:
            self._evaluations += 1
            point = self._improve(point)
        return self._shift

    def _improve(self, point: _Point) -> _Point | None:
        """The point after a step that lessens the residuals; None at the end."""
        while True:
            self._damping = self._damping_at(point)
            step = -point.gradient / (point.slope**2 + self._damping)
            if not self._has_moved:
                self._radius = min(self._radius, abs(step))
            trial = self._fit.at(self._shift + step)
            self._evaluations += 1
            gain = _Gain.of(point, trial, step, self._damping)
            self._adapt(gain, abs(step))
            is_better = gain.ratio >= _ACCEPTED
            if is_better:
                self._shift += step
                self._has_moved = True
            if self._is_done(gain):
                return None
            if is_better:
                return trial

    def _adapt(self, gain: _Gain, length: float) -> None:
        if gain.ratio <= 0.25:
            self._radius = gain.shrinkage * min(self._radius, 10 * length)
            self._damping /= gain.shrinkage
        elif self._damping == 0 or gain.ratio >= 0.75:
            self._radius = 2 * length
            self._damping *= 0.5

    def _is_done(self, gain: _Gain) -> bool:
        small = max(abs(gain.actual), gain.predicted) <= _COST_TOLERANCE and gain.ratio <= 2
        still = self._radius <= _STEP_TOLERANCE * abs(self._shift)
        return small or still or self._evaluations >= _EVALUATIONS

    def _damping_at(self, point: _Point) -> float:
        """What is added to the squared slope so that the step is within a tenth of the radius."""
        gradient, square = abs(point.gradient), point.slope**2
        if gradient <= 1.1 * self._radius * square:
            return 0.0
        exact = gradient / self._radius - square
        kept = min(self._damping, gradient / self._radius)
        return kept if kept > exact and gradient >= 0.9 * self._radius * (square + kept) else exact


def _product(a: Float64, b: Float64) -> np.float64:
    return np.float64(np.vdot(a, b))
