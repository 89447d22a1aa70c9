"""Write a TorchScript MHR archive of the official shape, with random weights.

    .oracle/bin/python tests/oracle/make_full_mhr.py --out DIR [--vertices 18439 --faces 36874]

makes DIR/mhr_model.pt by `torch.jit.script`: the attribute paths, shapes and dtypes of the official
LOD1 asset (55 tensors, 696 MB), its joint hierarchy and prefix schedule, and the list attributes
`joint_names`, `parameter_names` and `_pmi_buffer_sizes`. The modules compute nothing. A smaller mesh
gives a small file of the same structure.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from random_weights import generator, weights
from torch import Tensor, nn

SKELETON = Path(__file__).parents[1] / "fixtures" / "facts" / "mhr-skeleton.json"
JOINTS = 127
JOINT_VALUES = 7 * JOINTS
MODEL_PARAMETERS = 204
IDENTITIES = 45
EXPRESSIONS = 72
POSE_FEATURES = 6 * (JOINTS - 2)
HIDDEN = 24 * (JOINTS - 2)
NONZERO = 53136  # of the sparse layer, and the skinning influences: counts of the official asset
INFLUENCES = 51337
TEXCOORDS = 19455
MINMAX_LIMITS = 198


class Mesh(NamedTuple):
    """Size of the mesh."""

    vertices: int
    faces: int


class Hierarchy(NamedTuple):
    """The joints: names, parents [127] int32, prefix schedule [2,266] int64 and its group sizes."""

    names: list[str]
    parents: Tensor
    schedule: Tensor
    sizes: list[int]


def hierarchy() -> Hierarchy:
    """The official joint hierarchy; its published hashes are checked."""
    facts = json.loads(SKELETON.read_text())
    groups = prefix_groups(facts["parents"])
    pairs = [pair for group in groups for pair in group]
    result = Hierarchy(
        facts["names"],
        torch.tensor(facts["parents"], dtype=torch.int32),
        torch.tensor(pairs, dtype=torch.int64).T.contiguous(),
        [len(group) for group in groups],
    )
    if sha256(result.parents) != facts["parents_sha256"]:
        raise SystemExit("the joint parents are not the official ones")
    if sha256(result.schedule) != facts["pmi_sha256"] or result.sizes != facts["prefix_sizes"]:
        raise SystemExit("the prefix schedule is not the official one")
    return result


def prefix_groups(parents: list[int]) -> list[list[tuple[int, int]]]:
    """(joint, ancestor) pairs by level: joints whose depth has the level's bit, with the joint of
    their root-first chain that closes the chain's part below that bit."""
    chains: list[list[int]] = []
    for joint, parent in enumerate(parents):
        chains.append([*(chains[parent] if parent >= 0 else []), joint])
    levels = max(len(chain) - 1 for chain in chains).bit_length()
    return [
        [
            (chain[-1], chain[((len(chain) - 1) >> level << level) - 1])
            for chain in chains
            if (len(chain) - 1) >> level & 1
        ]
        for level in range(levels)
    ]


def sha256(tensor: Tensor) -> str:
    """SHA-256 of the tensor's little-endian bytes."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def floats(name: str, *shape: int) -> Tensor:
    """Random F32 values."""
    return weights(name, shape, torch.float32)


def integers(name: str, bound: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Random integers from 0 to bound - 1."""
    return torch.from_numpy(generator(name).integers(0, bound, size=shape)).to(dtype)


def unit_quaternions(name: str, count: int) -> Tensor:
    """[count,4] F32 unit quaternions."""
    return nn.functional.normalize(floats(name, count, 4), dim=1)


class Module(nn.Module):
    """A module whose tensors matter, not what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def hold(self, **tensors: Tensor) -> None:
        """Register buffers in this order."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Skeleton(Module):
    _pmi_buffer_sizes: list[int]
    joint_names: list[str]

    def __init__(self) -> None:
        super().__init__()
        joints = hierarchy()
        self.hold(
            joint_translation_offsets=floats("joint_translation_offsets", JOINTS, 3),
            joint_prerotations=unit_quaternions("joint_prerotations", JOINTS),
            pmi=joints.schedule,
            joint_parents=joints.parents,
        )
        self._pmi_buffer_sizes = joints.sizes
        self.joint_names = joints.names


class RestMesh(Module):
    def __init__(self, size: Mesh, rest: Tensor) -> None:
        super().__init__()
        corners = [size.faces, 3]
        self.hold(
            rest_vertices=rest.clone(),
            faces=integers("faces", size.vertices, corners, torch.int32),
            texcoords=floats("texcoords", TEXCOORDS, 2).abs(),
            texcoord_faces=integers("texcoord_faces", TEXCOORDS, corners, torch.int32),
        )


class ParameterTransform(Module):
    parameter_names: list[str]

    def __init__(self) -> None:
        super().__init__()
        columns = MODEL_PARAMETERS + IDENTITIES
        at = torch.arange(columns)
        transform = floats("parameter_transform", JOINT_VALUES, columns)
        transform[:, MODEL_PARAMETERS:] = 0.0
        self.hold(
            parameter_transform=transform,
            pose_parameters=at < 136,
            rigid_parameters=at < 6,
            scaling_parameters=(at >= 136) & (at < MODEL_PARAMETERS),
        )
        self.parameter_names = [f"parameter_{index}" for index in range(columns)]


class LinearBlendSkinning(Module):
    def __init__(self, size: Mesh) -> None:
        super().__init__()
        count = min(INFLUENCES, 8 * size.vertices)
        pose = torch.cat(
            [
                floats("inverse_bind_translation", JOINTS, 3),
                unit_quaternions("inverse_bind_rotation", JOINTS),
                torch.ones(JOINTS, 1),
            ],
            dim=1,
        )
        self.hold(
            inverse_bind_pose=pose,
            skin_indices_flattened=integers("skin_indices", JOINTS, [count], torch.int32),
            skin_weights_flattened=torch.rand(count, generator=torch.Generator().manual_seed(0)),
            vert_indices_flattened=torch.arange(count) * size.vertices // count,
        )


class ParameterLimits(Module):
    def __init__(self) -> None:
        super().__init__()
        limits = floats("limits", MINMAX_LIMITS)
        self.hold(
            minmax_min=-limits.abs(),
            minmax_max=limits.abs(),
            minmax_weight=torch.ones(MINMAX_LIMITS),
            minmax_parameter_index=torch.arange(MINMAX_LIMITS, dtype=torch.int32),
        )
        index, value = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
        names = ("scale", "offset", "weight", "range_min", "range_max")
        self.hold(minmaxjoint_index=index.clone())
        self.hold(**{f"minmaxjoint_{name}": value.clone() for name in ("min", "max", "weight")})
        for kind in ("linear", "linear_joint"):
            self.hold(**{f"{kind}_{name}": index.clone() for name in ("refidx", "targetidx")})
            self.hold(**{f"{kind}_{name}": value.clone() for name in names})
        self.hold(halfplane_param1_idx=index.clone(), halfplane_param2_idx=index.clone())
        self.hold(halfplane_normal=torch.zeros(1, 1))
        self.hold(halfplane_offset=value.clone(), halfplane_weight=value.clone())
        self.hold(ellipsoid_parent=index.clone(), ellipsoid_ellipsoid_parent=index.clone())
        for name in ("offset", "ellipsoid", "ellipsoid_inv"):
            self.hold(**{f"ellipsoid_{name}": torch.zeros(1, 1)})
        self.hold(ellipsoid_weight=value.clone())


class BlendShape(Module):
    def __init__(self, name: str, count: int, size: Mesh, base: Tensor | None) -> None:
        super().__init__()
        self.hold(shape_vectors=floats(name, count, size.vertices, 3))
        if base is not None:
            self.hold(base_shape=base)


class Character(Module):
    def __init__(self, size: Mesh) -> None:
        super().__init__()
        rest = floats("rest_vertices", size.vertices, 3)
        self.skeleton = Skeleton()
        self.mesh = RestMesh(size, rest)
        self.parameter_transform = ParameterTransform()
        self.linear_blend_skinning = LinearBlendSkinning(size)
        self.parameter_limits = ParameterLimits()
        self.blend_shape = BlendShape("blend_shape", IDENTITIES, size, rest)


class SparseLinear(Module):
    def __init__(self) -> None:
        super().__init__()
        places = generator("sparse_indices").choice(
            HIDDEN * POSE_FEATURES, size=NONZERO, replace=False
        )
        rows_columns = np.stack(np.divmod(np.sort(places), POSE_FEATURES)).astype(np.int64)
        self.hold(sparse_indices=torch.from_numpy(rows_columns))
        self.sparse_weight = nn.Parameter(floats("sparse_weight", NONZERO))


class DenseLinear(Module):
    def __init__(self, size: Mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(floats("pose_correctives", 3 * size.vertices, HIDDEN))


class PoseCorrectives(Module):
    def __init__(self, size: Mesh) -> None:
        super().__init__()
        self.pose_dirs_predictor = nn.Sequential(SparseLinear(), nn.ReLU(), DenseLinear(size))


class Mhr(Module):
    def __init__(self, size: Mesh) -> None:
        super().__init__()
        self.pose_correctives_model = PoseCorrectives(size)
        self.character_torch = Character(size)
        self.face_expressions_model = BlendShape("face_expressions", EXPRESSIONS, size, None)


def main() -> None:
    """Write the archive and say how large it is."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vertices", type=int, default=18439)
    parser.add_argument("--faces", type=int, default=36874)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    target: Path = options.out / "mhr_model.pt"
    partial = target.with_suffix(".partial")
    torch.jit.script(Mhr(Mesh(options.vertices, options.faces)).eval()).save(str(partial))
    partial.rename(target)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
