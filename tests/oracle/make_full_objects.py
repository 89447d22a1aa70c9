"""Write SAM 3D Objects checkpoints of the official shape with random weights, as the release has them.

    .oracle/bin/python tests/oracle/make_full_objects.py --out DIR [--parts ss_decoder ...]

The generators are wrapped in `state_dict`, with the empty dictionary and the unused decoder of the
official file; the decoders are flat, some tensors in F16; the mesh decoder has the form before torch
1.6; `moge` becomes model.pt. The two image encoders of slat_generator are equal, those of
ss_generator are not. The configurations and pipeline.yaml are the official ones. All six checkpoints
take 12.5 GB, and as much memory as the largest of them: 6.7 GB.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from random_weights import weights

sys.path.append(str(Path(__file__).parents[1]))
from objects_facts import MOGE_OFFICIAL, PARTS, inventory, official_config

DTYPES = {"F32": torch.float32, "F16": torch.float16}
GENERATORS = ("ss_generator", "slat_generator")


def tensors(part: str) -> dict[str, torch.Tensor]:
    """The state dict of a part, in the inventory's order."""
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in inventory()[part].items():
        seed = f"{part} {name}"
        if part == "slat_generator":
            seed = seed.replace(".module_list.1.backbone.", ".module_list.0.backbone.")
        found[name] = weights(seed, shape, DTYPES[dtype])
    return found


def save(part: str, path: Path) -> None:
    """Write a part's legacy file."""
    content: dict[str, Any] = {**tensors(part)}
    if part == "ss_generator":
        content["__mixhavior__"] = {}
    if part in GENERATORS:
        content = {"state_dict": content}
    if part == "moge":
        content["image_std"] = content["image_std"].abs()
        content = {"model_config": MOGE_OFFICIAL, "model": content}
    zipped = part != "slat_decoder_mesh"
    partial = path.with_suffix(".partial")
    torch.save(content, partial, _use_new_zipfile_serialization=zipped)
    partial.rename(path)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "moge"), default=PARTS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name in (*PARTS, "pipeline"):
        (out / f"{name}.yaml").write_bytes(official_config(name))
    for part in arguments.parts:
        save(part, out / ("model.pt" if part == "moge" else f"{part}.ckpt"))


if __name__ == "__main__":
    main()
