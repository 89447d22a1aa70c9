"""Rotations in float32, with the conventions and singular branches of the original.

Quaternions are XYZW. Lower-case Euler conventions are extrinsic, upper-case ones intrinsic, as
in roma 1.8, which the original calls. Angles are radians.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, cross

Convention = Literal["xyz", "ZYX", "XZY"]
_NORMALIZE_EPSILON = 1e-12
_GIMBAL_EPSILON = 1e-7
_SINGULAR_SINE = 1e-6


def normalized(vectors: Float32) -> Float32:
    """Unit vectors along the last axis; a vector shorter than 1e-12 is divided by 1e-12."""
    square = (vectors * vectors).sum(axis=-1, keepdims=True, dtype=np.float32)
    unit: Float32 = vectors / np.maximum(np.sqrt(square), np.float32(_NORMALIZE_EPSILON))
    return unit


def quaternion_product(left: Float32, right: Float32) -> Float32:
    """Hamilton product of [..., 4] quaternions; the result is not normalised."""
    product = np.empty(np.broadcast_shapes(left.shape, right.shape), np.float32)
    side = cross(left[..., :3], right[..., :3])
    product[..., :3] = left[..., 3:] * right[..., :3] + right[..., 3:] * left[..., :3] + side
    dot = (left[..., :3] * right[..., :3]).sum(axis=-1)
    product[..., 3] = left[..., 3] * right[..., 3] - dot
    return product


def matrix_from_quaternion(quaternion: Float32) -> Float32:
    """[..., 4] to [..., 3, 3] without normalising (roma's `unitquat_to_rotmat`)."""
    x, y, z, w = (quaternion[..., index] for index in range(4))
    x2, y2, z2, w2 = x * x, y * y, z * z, w * w
    xy, zw, xz, yw, yz, xw = x * y, z * w, x * z, y * w, y * z, x * w
    matrix = np.empty((*quaternion.shape[:-1], 3, 3), np.float32)
    matrix[..., 0, 0] = x2 - y2 - z2 + w2
    matrix[..., 0, 1] = 2 * (xy - zw)
    matrix[..., 0, 2] = 2 * (xz + yw)
    matrix[..., 1, 0] = 2 * (xy + zw)
    matrix[..., 1, 1] = -x2 + y2 - z2 + w2
    matrix[..., 1, 2] = 2 * (yz - xw)
    matrix[..., 2, 0] = 2 * (xz - yw)
    matrix[..., 2, 1] = 2 * (yz + xw)
    matrix[..., 2, 2] = -x2 - y2 + z2 + w2
    return matrix


def quaternion_from_matrix(matrix: Float32) -> Float32:
    """[..., 3, 3] to unit [..., 4] by Markley's method, which tolerates slight skew."""
    m = matrix
    m00, m01, m02 = m[..., 0, 0], m[..., 0, 1], m[..., 0, 2]
    m10, m11, m12 = m[..., 1, 0], m[..., 1, 1], m[..., 1, 2]
    m20, m21, m22 = m[..., 2, 0], m[..., 2, 1], m[..., 2, 2]
    one = np.float32(1)
    rows = [
        [one + m00 - m11 - m22, m10 + m01, m20 + m02, m21 - m12],
        [m10 + m01, one + m11 - m22 - m00, m21 + m12, m02 - m20],
        [m20 + m02, m21 + m12, one + m22 - m00 - m11, m10 - m01],
        [m21 - m12, m02 - m20, m10 - m01, one + m00 + m11 + m22],
    ]
    options = np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)
    best = np.argmax(np.diagonal(options, axis1=-2, axis2=-1), axis=-1)
    chosen = np.take_along_axis(options, best[..., None, None], axis=-2)[..., 0, :]
    unit: Float32 = chosen / np.sqrt((chosen * chosen).sum(axis=-1, keepdims=True))
    return unit


def matrix_from_euler(convention: Convention, angles: Float32) -> Float32:
    """[..., 3] angles in the order of `convention` to [..., 3, 3]."""
    order = [convention[index] for index in range(3)]
    values = [angles[..., index] for index in range(3)]
    if convention.islower():
        order, values = order[::-1], values[::-1]
    result: Float32 | None = None
    for axis, angle in zip(order, values, strict=True):
        half = angle * np.float32(0.5)
        turn = np.zeros((*angle.shape, 4), np.float32)
        turn[..., "xyz".index(axis.lower())] = np.sin(half)
        turn[..., 3] = np.cos(half)
        result = turn if result is None else quaternion_product(result, turn)
    assert result is not None
    return matrix_from_quaternion(normalized(result))


def euler_from_matrix(convention: Convention, matrix: Float32) -> Float32:
    """[..., 3, 3] to [..., 3] angles in the order of `convention`, each in -pi..pi.

    In gimbal lock (second angle within 1e-7 of its bound) the third angle is 0, as in roma's
    `rotmat_to_euler`.
    """
    quaternion = quaternion_from_matrix(matrix)
    extrinsic = convention.islower()
    axes = convention if extrinsic else convention.lower()[::-1]
    i, j, k = ("xyz".index(axis) for axis in axes)
    sign = np.float32((i - j) * (j - k) * (k - i) // 2)
    qi, qj, qk, qw = (quaternion[..., index] for index in (i, j, k, 3))
    a, b, c, d = qw - qj, qi + qk * sign, qj + qw, qk * sign - qi
    middle = 2 * np.arctan2(np.hypot(c, d), np.hypot(a, b))
    low = np.abs(middle) <= _GIMBAL_EPSILON
    high = np.abs(middle - math.pi) <= _GIMBAL_EPSILON
    half_sum, half_difference = np.arctan2(b, a), np.arctan2(d, c)
    angles = np.empty((*quaternion.shape[:-1], 3), np.float32)
    first, third = (0, 2) if extrinsic else (2, 0)
    angles[..., first] = half_sum - half_difference
    angles[..., third] = half_sum + half_difference
    angles[..., 2] = np.where(low | high, 0, angles[..., 2])
    angles[..., 0] = np.where(low, 2 * half_sum, angles[..., 0])
    turned = (-2 if extrinsic else 2) * half_difference
    angles[..., 0] = np.where(high, turned, angles[..., 0])
    angles[..., third] *= sign
    angles[..., 1] = middle - np.float32(math.pi / 2)
    angles = np.where(angles < -math.pi, angles + np.float32(2 * math.pi), angles)
    return np.where(angles > math.pi, angles - np.float32(2 * math.pi), angles)


def matrix_from_6d(values: Float32) -> Float32:
    """[..., 6] to [..., 3, 3]: Gram-Schmidt on the columns values[0:3] and values[3:6].

    The decoder of the global rotation (the original's `rot6d_to_rotmat`).
    """
    first, second = values[..., :3], values[..., 3:]
    b1 = normalized(first)
    dot = (b1 * second).sum(axis=-1, keepdims=True)
    b2 = normalized(second - dot * b1)
    return np.stack([b1, b2, cross(b1, b2)], axis=-1)


def xyz_from_6d(values: Float32) -> Float32:
    """[..., 6] to [..., 3] Euler angles with R = Rz Ry Rx, by cross products of the columns.

    The decoder of the body's and the hands' joints (the original's `batchXYZfrom6D`); where
    cos(y) falls under 1e-6 the z angle is 0.
    """
    x_axis = normalized(values[..., :3])
    z_axis = normalized(cross(x_axis, values[..., 3:]))
    y_axis = cross(z_axis, x_axis)
    cosine = np.sqrt(x_axis[..., 0] * x_axis[..., 0] + x_axis[..., 1] * x_axis[..., 1])
    singular = cosine < np.float32(_SINGULAR_SINE)
    x = np.where(
        singular,
        np.arctan2(-z_axis[..., 1], y_axis[..., 1]),
        np.arctan2(y_axis[..., 2], z_axis[..., 2]),
    )
    y = np.arctan2(-x_axis[..., 2], cosine)
    z = np.where(singular, np.float32(0), np.arctan2(x_axis[..., 1], x_axis[..., 0]))
    return np.stack([x, y, z], axis=-1)


def matrix_columns_from_xyz(angles: Float32) -> Float32:
    """[..., 3] Euler angles to [..., 6]: the first, then the second column of Rz Ry Rx."""
    sine, cosine = np.sin(angles), np.cos(angles)
    sx, sy, sz = (sine[..., index] for index in range(3))
    cx, cy, cz = (cosine[..., index] for index in range(3))
    columns = [
        cy * cz,
        cy * sz,
        -sy,
        -cx * sz + sx * sy * cz,
        cx * cz + sx * sy * sz,
        sx * cy,
    ]
    return np.stack(columns, axis=-1)


def angle_between(left: Float32, right: Float32) -> Float32:
    """[..., 3, 3] pairs to the angle of left @ right^T, radians, [...]."""
    relative = left @ np.swapaxes(right, -1, -2)
    trace = relative[..., 0, 0] + relative[..., 1, 1] + relative[..., 2, 2]
    angle: Float32 = np.arccos(np.clip((trace - 1) / 2, np.float32(-1), np.float32(1)))
    return angle
