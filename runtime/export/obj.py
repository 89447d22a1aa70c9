"""Wavefront OBJ: the posed meshes, in the same axes and places as the glTF file."""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.export.surface import vertex_normals
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig


def obj(rig: MhrRig, people: list[Float32]) -> bytes:
    """The text of an .obj file.

    Args:
        rig: triangles and texture coordinates.
        people: posed vertices [V, 3] of each, metres, y up.
    """
    lines = ["# sam3d-gguf: metres, y up, the camera at the origin looking along -z"]
    lines += [f"vt {u:.6g} {v:.6g}" for u, v in rig.texture_coordinates.tolist()]
    offset = 1
    for index, vertices in enumerate(people):
        normals = vertex_normals(vertices, rig.faces)
        lines.append(f"o person_{index}")
        lines += [f"v {x:.7g} {y:.7g} {z:.7g}" for x, y, z in vertices.tolist()]
        lines += [f"vn {x:.4f} {y:.4f} {z:.4f}" for x, y, z in normals.tolist()]
        corners = np.stack([rig.faces + offset, rig.texture_faces + 1], axis=-1)
        lines += [
            f"f {a}/{at}/{a} {b}/{bt}/{b} {c}/{ct}/{c}"
            for (a, at), (b, bt), (c, ct) in corners.tolist()
        ]
        offset += len(vertices)
    return ("\n".join(lines) + "\n").encode()
