"""The plain way to convert a Body checkpoint, for comparison: PyTorch, safetensors, gguf.

    .oracle/bin/python benchmarks/plain.py model.ckpt OUT [--layout single|components]

It loads everything with `torch.load(weights_only=True)`, widens it with `.float()`, saves backbone
and other tensors with `safetensors.torch.save_file` and writes GGUF with `gguf.GGUFWriter`. Like
the product it hashes the source and every file it writes, syncs each to disk, and reads each back
to compare it with what was meant. It checks no contract and no values, and runs in no sandbox.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

BACKBONE = "backbone.encoder."
POSE_BRANCH = (
    "init_pose.",
    "init_camera.",
    "init_to_token_mhr.",
    "prev_to_token_mhr.",
    "prompt_to_token.",
    "keypoint_embedding.",
    "keypoint3d_embedding.",
    "hand_box_embedding.",
    "ray_cond_emb.",
    "prompt_encoder.pe_layer.",
    "prompt_encoder.invalid_point_embed.",
    "prompt_encoder.not_a_point_embed.",
    "prompt_encoder.no_mask_embed.",
    "prompt_encoder.point_embeddings.",
    "decoder.",
    "head_pose.proj.",
    "head_pose.scale_mean",
    "head_pose.scale_comps",
    "head_pose.hand_pose_mean",
    "head_pose.hand_pose_comps",
    "head_pose.keypoint_mapping",
    "head_pose.hand_joint_idxs_",
    "head_pose.faces",
    "head_camera.",
    "keypoint_posemb_linear.",
    "keypoint3d_posemb_linear.",
    "keypoint_feat_linear.",
    "bbox_embed.",
    "hand_cls_embed.",
)


def convert(source: Path, out: Path, layout: str) -> dict[str, str]:
    """Convert into the folder `out`; SHA-256 by file name."""
    digests = {source.name: sha256(source)}
    checkpoint: Tensors = torch.load(source, map_location="cpu", weights_only=True)
    backbone = {
        name.removeprefix(BACKBONE): tensor.float()
        for name, tensor in checkpoint.items()
        if name.startswith(BACKBONE)
    }
    backbone["mask_token"] = torch.zeros(1, backbone["cls_token"].shape[-1])
    other = {name: tensor for name, tensor in checkpoint.items() if not name.startswith(BACKBONE)}
    digests["backbone.safetensors"] = write_safetensors(out / "backbone.safetensors", backbone)
    digests["other.safetensors"] = write_safetensors(out / "other.safetensors", other)
    if layout == "single":
        digests["body.gguf"] = write_gguf(out / "body.gguf", "sam3d.body", checkpoint)
        return digests
    pose = {name: tensor for name, tensor in other.items() if name.startswith(POSE_BRANCH)}
    for name, tensors in (("backbone", backbone), ("pose_branch", pose)):
        digests[f"{name}.gguf"] = write_gguf(out / f"{name}.gguf", f"sam3d.body.{name}", tensors)
    return digests


def write_safetensors(path: Path, tensors: Tensors) -> str:
    """Save, sync, read back and compare; the file's SHA-256."""
    save_file(unshared(tensors), path)
    sync(path)
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name), tensor):
                raise SystemExit(f"{path}: {name} is not what was meant")
    return sha256(path)


def unshared(tensors: Tensors) -> Tensors:
    """The same tensors, each with a storage of its own, as `save_file` requires."""
    seen: set[int] = set()
    result: Tensors = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def write_gguf(path: Path, architecture: str, tensors: Tensors) -> str:
    """Write, sync, read back and compare; the file's SHA-256."""
    arrays = {name: gguf_array(tensor) for name, tensor in sorted(tensors.items())}
    writer = gguf.GGUFWriter(path, architecture)
    for name, array in arrays.items():
        bfloat16 = array.dtype == np.uint8
        writer.add_tensor(
            name, array, raw_dtype=gguf.GGMLQuantizationType.BF16 if bfloat16 else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sync(path)
    for tensor in gguf.GGUFReader(path).tensors:
        if not np.array_equal(flat(tensor.data), flat(arrays[tensor.name])):
            raise SystemExit(f"{path}: {tensor.name} is not what was meant")
    return sha256(path)


def gguf_array(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """F32 as it is, BF16 as bytes, integers as I32."""
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.uint8).numpy()
    if tensor.is_floating_point():
        return tensor.numpy()
    return tensor.to(torch.int32).numpy()


def flat(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """The bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def sync(path: Path) -> None:
    """Force a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Convert and print the digests."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", choices=("single", "components"), default="single")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    print(json.dumps(convert(options.source, options.out, options.layout), indent=1))


if __name__ == "__main__":
    main()
