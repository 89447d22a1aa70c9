"""Write a SAM 3D Body checkpoint of the official shape, with random weights.

    .oracle/bin/python tests/oracle/make_full_body.py --out DIR

makes DIR/model.ckpt (2.1 GB, by `torch.save`) and DIR/model_config.yaml: the 1,127 tensors of the
official file by name, shape and dtype, in a flat dict, with the storages that its two heads share.
Values are deterministic, and keep the rules that the official ones keep. Takes about 3 GB of memory.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from random_weights import generator, weights

INVENTORY = Path(__file__).parents[1] / "fixtures" / "facts" / "body-inventory.txt"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
VERTICES = 18439
ROPE_BASE = 100.0
SHARED = ("keypoint_mapping", "faces")  # by head_pose and head_pose_hand, as the file size proves

CONFIG: dict[str, Any] = {
    "TRAIN": {"USE_FP16": True, "FP16_TYPE": "bfloat16"},
    "MODEL": {
        "IMAGE_SIZE": [512, 512],
        "IMAGE_MEAN": [0.485, 0.456, 0.406],
        "IMAGE_STD": [0.229, 0.224, 0.225],
        "BACKBONE": {
            "TYPE": "dinov3_vith16plus",
            "PRETRAINED_WEIGHTS": "",
            "FROZEN_STAGES": -1,
            "DROP_PATH_RATE": 0.1,
        },
        "DECODER": {
            "TYPE": "sam",
            "DIM": 1024,
            "DEPTH": 6,
            "HEADS": 8,
            "MLP_DIM": 1024,
            "DIM_HEAD": 64,
            "LAYER_SCALE_INIT": 0.0,
            "DROP_RATE": 0.0,
            "ATTN_DROP_RATE": 0.0,
            "DROP_PATH_RATE": 0.0,
            "FFN_TYPE": "origin",
            "ENABLE_TWOWAY": False,
            "REPEAT_PE": True,
            "FROZEN": False,
            "CONDITION_TYPE": "cliff",
            "USE_INTRIN_CENTER": True,
            "DO_INTERM_PREDS": True,
            "DO_INTERM_SUP": True,
            "DO_KEYPOINT_TOKENS": True,
            "DO_HAND_DETECT_TOKENS": True,
            "KEYPOINT_TOKEN_UPDATE": "v2",
            "KEYPOINT_TOKEN_UPDATE_COORD_EMB_USE_MLP": True,
            "DO_KEYPOINT3D_TOKENS": True,
        },
        "PROMPT_ENCODER": {
            "ENABLE": True,
            "MAX_NUM_CLICKS": 2,
            "PROMPT_KEYPOINTS": "mhr70",
            "FROZEN": False,
            "KEYPOINT_SAMPLER": {
                "TYPE": "v1",
                "WORST_RATIO": 0.8,
                "KEYBODY_RATIO": 0.8,
                "NEGATIVE_RATIO": 0.1,
                "DUMMY_RATIO": 0.1,
                "DISTANCE_THRESH": 0.0001,
            },
            "MASK_EMBED_TYPE": "v2",
            "MASK_PROMPT": "v1",
        },
        "PERSON_HEAD": {
            "POSE_TYPE": "mhr",
            "CAMERA_ENABLE": True,
            "CAMERA_TYPE": "perspective",
            "ZERO_POSE_INIT": True,
            "ZERO_POSE_INIT_BODY_FACTOR": 1,
        },
        "MHR_HEAD": {"MLP_DEPTH": 2, "MLP_CHANNEL_DIV_FACTOR": 1},
        "CAMERA_HEAD": {
            "MLP_DEPTH": 2,
            "MLP_CHANNEL_DIV_FACTOR": 1,
            "DEFAULT_SCALE_FACTOR_HAND": 10,
        },
        "ENABLE_BODY": True,
        "ENABLE_HAND": True,
    },
}


def official_tensors() -> list[tuple[str, list[int], torch.dtype]]:
    """Name, shape and dtype of the official tensors, in registration order."""
    rows = [line.split() for line in INVENTORY.read_text().splitlines()]
    return [
        (name, [int(size) for size in shape.split("x")], DTYPES[dtype])
        for name, dtype, shape in rows
    ]


def indices(name: str, shape: list[int]) -> torch.Tensor:
    """An index tensor within its range; those of the two heads are equal, as in the official file."""
    kind = name.rsplit(".", 1)[-1]
    rng = generator(kind)
    if kind == "faces":
        values = rng.integers(0, VERTICES, size=shape)
    elif kind == "hand_joint_idxs_left":
        values = rng.permutation(np.arange(95, 122))
    elif kind == "hand_joint_idxs_right":
        values = rng.permutation(np.arange(68, 95))
    elif kind == "nonhand_param_idxs":
        values = np.delete(np.arange(6, 178), np.arange(62, 89))
    else:
        raise ValueError(f"{name}: an index tensor of unknown meaning")
    return torch.from_numpy(values.astype(np.int64)).reshape(shape)


def bias_mask(name: str, shape: list[int]) -> torch.Tensor:
    """The mask of the fused q, k and v bias: q and v kept, k dropped; all zero in every 4th block."""
    block = int(name.split(".blocks.")[1].split(".")[0])
    kept = torch.full([shape[0] // 3], float(block % 4 != 3))
    return torch.cat([kept, torch.zeros_like(kept), kept]).to(torch.bfloat16)


def tensor(name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """One tensor of the checkpoint."""
    if dtype is torch.int64:
        return indices(name, shape)
    if name.endswith(".bias_mask"):
        return bias_mask(name, shape)
    if name.endswith(".rope_embed.periods"):
        return (ROPE_BASE ** (torch.arange(shape[0]) / shape[0])).to(dtype)
    return weights(name, shape, dtype)


def checkpoint() -> dict[str, torch.Tensor]:
    """The flat state dict: modules in a mixed order, which readers must not rely on."""
    tensors = {name: tensor(name, shape, dtype) for name, shape, dtype in official_tensors()}
    for kind in SHARED:
        tensors[f"head_pose_hand.{kind}"] = tensors[f"head_pose.{kind}"]
    modules = sorted({name.split(".")[0] for name in tensors})
    random.Random(0).shuffle(modules)
    place = {module: at for at, module in enumerate(modules)}
    return dict(sorted(tensors.items(), key=lambda item: place[item[0].split(".")[0]]))


def main() -> None:
    """Write both files and say how large the checkpoint is."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / "model_config.yaml").write_text(yaml.dump(CONFIG, sort_keys=False))
    partial = out / "model.ckpt.partial"
    torch.save(checkpoint(), partial)
    partial.rename(out / "model.ckpt")
    print(f"{out / 'model.ckpt'}: {(out / 'model.ckpt').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
