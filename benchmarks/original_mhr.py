"""MHR in plain PyTorch, from the tensors of an archive whose code computes nothing.

The generated full-shape archive has the official tensors and no function. This module computes the
function that the official archive computes, with PyTorch's own operations: blend shapes as one
product each, the first corrective layer as a sparse COO product, forward kinematics in float64 by
prefix groups, skinning over the flat list of influences with `index_add_`.
"""

import torch
from torch import Tensor, nn

_LN2 = 0.6931471824645996
_SKIN = "character_torch.linear_blend_skinning"
_DIRECTIONS = "pose_correctives_model.pose_dirs_predictor"


class PlainMhr(nn.Module):
    """identity [B,45], parameters [B,204], expression [B,72] to ([B,V,3] cm, [B,127,8])."""

    def __init__(self, archive: torch.jit.ScriptModule) -> None:
        super().__init__()
        state = archive.state_dict()
        sizes = list(archive.character_torch.skeleton._pmi_buffer_sizes)
        self.groups = state["character_torch.skeleton.pmi"].split(sizes, dim=1)
        self.offsets = state["character_torch.skeleton.joint_translation_offsets"]
        self.prerotations = state["character_torch.skeleton.joint_prerotations"]
        self.transform = state["character_torch.parameter_transform.parameter_transform"]
        self.bind = state[f"{_SKIN}.inverse_bind_pose"]
        self.skin_joints = state[f"{_SKIN}.skin_indices_flattened"].long()
        self.skin_weights = state[f"{_SKIN}.skin_weights_flattened"]
        self.skin_vertices = state[f"{_SKIN}.vert_indices_flattened"]
        self.identities = state["character_torch.blend_shape.shape_vectors"]
        self.base = state["character_torch.blend_shape.base_shape"]
        self.expressions = state["face_expressions_model.shape_vectors"]
        self.dense = state[f"{_DIRECTIONS}.2.weight"]
        features = 6 * (len(self.offsets) - 2)
        self.sparse = torch.sparse_coo_tensor(
            state[f"{_DIRECTIONS}.0.sparse_indices"],
            state[f"{_DIRECTIONS}.0.sparse_weight"],
            (self.dense.shape[1], features),
        ).coalesce()

    def forward(
        self, identity: Tensor, parameters: Tensor, expression: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch = len(parameters)
        rest = torch.einsum("nvd,bn->bvd", self.identities, identity.expand(batch, -1)) + self.base
        rest = rest + torch.einsum("nvd,bn->bvd", self.expressions, expression)
        zeros = parameters.new_zeros(batch, self.transform.shape[1] - parameters.shape[1])
        joints = torch.cat([parameters, zeros], dim=1) @ self.transform.T
        joints = joints.unflatten(1, (-1, 7))
        states = self._global(self._local(joints))
        return self._skinned(states, rest + self.corrective(joints)), states

    def corrective(self, joints: Tensor) -> Tensor:
        """[B,127,7] joint parameters to offsets [B,V,3]."""
        hidden: Tensor = torch.sparse.mm(self.sparse, _columns(joints[:, 2:, 3:6]).T)
        return self.product(torch.relu(hidden).T)

    def product(self, hidden: Tensor) -> Tensor:
        """The large product alone: [B,3000] to [B,V,3]."""
        offsets: Tensor = hidden @ self.dense.T
        return offsets.reshape(len(offsets), -1, 3)

    def _local(self, joints: Tensor) -> Tensor:
        half = joints[..., 3:6] * 0.5
        (sx, sy, sz), (cx, cy, cz) = half.sin().unbind(-1), half.cos().unbind(-1)
        turn = torch.stack(
            [
                cz * cy * sx - sz * sy * cx,
                cz * sy * cx + sz * cy * sx,
                sz * cy * cx - cz * sy * sx,
                cz * cy * cx + sz * sy * sx,
            ],
            dim=-1,
        )
        rotation = _quaternion_product(self.prerotations.expand_as(turn), turn)
        scale = torch.exp(_LN2 * joints[..., 6:])
        return torch.cat([joints[..., :3] + self.offsets, rotation, scale], dim=-1)

    def _global(self, local: Tensor) -> Tensor:
        states = local.double()
        for joints, ancestors in self.groups:
            composed = _composed(states[:, ancestors], states[:, joints])
            states = states.index_copy(1, joints, composed)
        return states.float()

    def _skinned(self, states: Tensor, rest: Tensor) -> Tensor:
        posed = _composed(states, self.bind.expand_as(states))[:, self.skin_joints]
        rotation = nn.functional.normalize(posed[..., 3:7], dim=-1)
        points = rest[:, self.skin_vertices] * posed[..., 7:]
        moved = (posed[..., :3] + _rotated(rotation, points)) * self.skin_weights[:, None]
        return torch.zeros_like(rest).index_add_(1, self.skin_vertices, moved)


def _columns(angles: Tensor) -> Tensor:
    """[B,J,3] Euler angles, R = Rz Ry Rx: the first two columns minus identity, [B,6 J]."""
    (sx, sy, sz), (cx, cy, cz) = angles.sin().unbind(-1), angles.cos().unbind(-1)
    values = [
        cz * cy - 1,
        sz * cy,
        -sy,
        cz * sy * sx - sz * cx,
        sz * sy * sx + cz * cx - 1,
        cy * sx,
    ]
    return torch.stack(values, dim=-1).flatten(1)


def _quaternion_product(a: Tensor, b: Tensor) -> Tensor:
    av, aw, bv, bw = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
    vector = aw * bv + bw * av + torch.linalg.cross(av, bv)
    return torch.cat([vector, aw * bw - (av * bv).sum(-1, keepdim=True)], dim=-1)


def _rotated(quaternion: Tensor, points: Tensor) -> Tensor:
    axis, scalar = quaternion[..., :3], quaternion[..., 3:]
    side = torch.linalg.cross(axis, points)
    turned: Tensor = points + 2 * (side * scalar + torch.linalg.cross(axis, side))
    return turned


def _composed(a: Tensor, b: Tensor) -> Tensor:
    qa = nn.functional.normalize(a[..., 3:7], dim=-1)
    qb = nn.functional.normalize(b[..., 3:7], dim=-1)
    moved = a[..., :3] + a[..., 7:] * _rotated(qa, b[..., :3])
    return torch.cat([moved, _quaternion_product(qa, qb), a[..., 7:] * b[..., 7:]], dim=-1)
