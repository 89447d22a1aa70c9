"""MHR: identity, expression and model parameters to a posed mesh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.body.neural import MhrProducts
from sam3d_gguf.runtime.geometry import mhr_rig
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig
from sam3d_gguf.runtime.ggml.network import Taps
from sam3d_gguf.schemas.errors import InputError

IDENTITY, PARAMETERS, EXPRESSION = 45, 204, 72

_STAGES = (
    "rest_identity",
    "rest_expression",
    "joint_parameters",
    "local_skel_state",
    "global_skel_state",
    "pose_features",
    "corrective_hidden",
    "corrective_offsets",
    "unposed",
    "vertices",
    "skel_state",
)
"""In the original's order."""


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
    """The body model: learned products on a GGML backend, kinematics here."""

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
        joints = self.products.joint_parameters(parameters)
        local = mhr_rig.local_states(self.rig, joints)
        states = mhr_rig.global_states(self.rig, local)
        features = mhr_rig.pose_features(joints) if correctives else None
        stages: dict[str, npt.NDArray[np.generic]] = {}
        mesh = self.products.mesh(
            np.ascontiguousarray(np.broadcast_to(identity, (count, IDENTITY))),
            expression,
            features,
            mhr_rig.skin_matrices(self.rig.inverse_bind, states),
            taps=None if taps is None else stages.__setitem__,
        )
        if taps is not None:
            stages["joint_parameters"] = joints
            stages["local_skel_state"] = local
            stages["global_skel_state"] = stages["skel_state"] = states
            if features is not None:
                stages["pose_features"] = features
            stages["unposed"], stages["vertices"] = mesh.rest, mesh.posed
            for name in _STAGES:
                if name in stages:
                    taps(name, stages[name])
        return MhrMesh(mesh.posed, states, local, mesh.rest)


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
