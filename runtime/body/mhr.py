"""MHR: identity, expression and model parameters to a posed mesh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.body.neural import MhrProducts, Taps
from sam3d_gguf.runtime.geometry import mhr_rig
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig
from sam3d_gguf.schemas.errors import InputError

IDENTITY, PARAMETERS, EXPRESSION = 45, 204, 72


@dataclass(frozen=True, slots=True, eq=False)
class MhrMesh:
    """A posed body in MHR's own axes.

    Attributes:
        vertices: [B, V, 3], cm.
        states: [B, 127, 8] global skeleton states: translation cm, quaternion XYZW, scale.
        local: [B, 127, 8] the same relative to the parents.
        rest: [B, V, 3] the mesh before skinning, correctives included, cm.
    """

    vertices: Float32
    states: Float32
    local: Float32
    rest: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Mhr:
    """The body model: learned products on a GGML backend, kinematics and skinning here."""

    products: MhrProducts
    rig: MhrRig

    def __call__(
        self,
        identity: Float32,
        parameters: Float32,
        expression: Float32 | None = None,
        *,
        correctives: bool = True,
        taps: Taps | None = None,
    ) -> MhrMesh:
        """Pose the body.

        Args:
            identity: [B, 45], or [1, 45] for all.
            parameters: [B, 204]: root translation (10 units a metre), root Euler angles, 130
                pose values, 68 scales.
            expression: [B, 72], or None for a neutral face.
            correctives: whether the pose correctives are added.
            taps: receives every stage.

        Raises:
            InputError: shapes that do not fit.
        """
        count = len(parameters)
        check_shapes(identity, parameters, expression)
        coefficients = np.broadcast_to(identity, (count, IDENTITY))
        rest = self.products.identity(np.ascontiguousarray(coefficients))
        _tap(taps, "rest_identity", rest)
        if expression is not None:
            rest = rest + self.products.expression(expression)
            _tap(taps, "rest_expression", rest)
        joints = self.products.joint_parameters(parameters)
        _tap(taps, "joint_parameters", joints)
        local = mhr_rig.local_states(self.rig, joints)
        _tap(taps, "local_skel_state", local)
        states = mhr_rig.global_states(self.rig, local)
        _tap(taps, "global_skel_state", states)
        if correctives:
            rest = rest + self._corrected(joints, taps)
        _tap(taps, "unposed", rest)
        vertices = mhr_rig.skin(self.rig, states, rest)
        _tap(taps, "vertices", vertices)
        _tap(taps, "skel_state", states)
        return MhrMesh(vertices, states, local, rest)

    def _corrected(self, joints: Float32, taps: Taps | None) -> Float32:
        features = mhr_rig.pose_features(joints)
        hidden, offsets = self.products.correctives(features)
        _tap(taps, "pose_features", features)
        _tap(taps, "corrective_hidden", hidden)
        _tap(taps, "corrective_offsets", offsets)
        return offsets


def _tap(taps: Taps | None, name: str, array: Float32) -> None:
    if taps is not None:
        taps(name, array)


def check_shapes(identity: Float32, parameters: Float32, expression: Float32 | None) -> None:
    """Check the arguments of `Mhr`.

    Raises:
        InputError: shapes that do not fit.
    """
    count = len(parameters) if parameters.ndim else 0
    fits = (
        parameters.shape == (count, PARAMETERS)
        and identity.shape in ((1, IDENTITY), (count, IDENTITY))
        and (expression is None or expression.shape == (count, EXPRESSION))
    )
    if not fits or count == 0:
        raise InputError(
            "MHR inputs of shapes that do not fit",
            expected=f"identity [B or 1, {IDENTITY}], parameters [B, {PARAMETERS}], "
            f"expression [B, {EXPRESSION}]",
        )
