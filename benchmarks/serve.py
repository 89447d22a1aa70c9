"""One timed program of the run benchmark: it answers requests, a JSON document a line each.

The product and the original load their model once, then wait for requests, so that their runs can
take turns while both stay warm. A program that waits uses no processor.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.stages import StageClock

Arrays = dict[str, npt.NDArray[Any]]
Task = Callable[[], Arrays]

PHOTO_SIZE = (768, 1024)
BOX = (300.0, 60.0, 724.0, 740.0)
FIELDS = (
    "pred_vertices",
    "pred_keypoints_3d",
    "pred_keypoints_2d",
    "pred_cam_t",
    "pred_joint_coords",
    "mhr_model_params",
)
INTRINSICS = ((1100.0, 0.0, 512.0), (0.0, 1100.0, 384.0), (0.0, 0.0, 1.0))


def photo() -> npt.NDArray[np.uint8]:
    """The synthetic photo, [768, 1024, 3] RGB: smooth colours with noise, always the same."""
    rng = np.random.Generator(np.random.PCG64(3))
    height, width = PHOTO_SIZE
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [128 + 90 * np.sin(x / (31 + 7 * c) + c) * np.cos(y / (47 - 9 * c)) for c in range(3)]
    noisy = np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, 3))
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def mhr_inputs() -> Arrays:
    """One identity, pose and expression, all small."""
    rng = np.random.Generator(np.random.PCG64(4))
    sizes = {"identity": 45, "parameters": 204, "expression": 72}
    return {
        name: rng.uniform(-0.1, 0.1, (1, size)).astype(np.float32) for name, size in sizes.items()
    }


def serve(
    tasks: Mapping[str, Task], facts: Mapping[str, Any], clock: StageClock | None = None
) -> None:
    """Say `facts` once loaded, then answer `{"task": ..., "out": path or null}` until input ends.

    An answer holds `seconds` and `cpu_seconds`, of the task alone, and `file_seconds`, until its
    arrays were written to `out` as .npz. `{"task": "memory"}` is answered with the peak resident bytes so far.
    A request with `"stages": true` is answered with the clock's `stages` too.
    """
    _say(facts)
    for line in sys.stdin:
        request = json.loads(line)
        if request["task"] == "memory":
            _say({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
            continue
        staged = clock if request.get("stages") else None
        if staged is not None:
            staged.start()
        started, cpu = time.perf_counter(), time.process_time()
        arrays = tasks[request["task"]]()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        if request["out"] is not None:
            write(Path(request["out"]), arrays)
        written = time.perf_counter()
        _say(
            {
                "seconds": ended - started,
                "cpu_seconds": cpu,
                "file_seconds": written - started,
                "stages": {} if staged is None else staged.stop(),
            }
        )


def write(path: Path, arrays: Arrays) -> None:
    """The arrays as an .npz file."""
    np.savez(path, allow_pickle=False, **arrays)


def _say(document: Mapping[str, Any]) -> None:
    print(json.dumps(document), file=sys.__stdout__, flush=True)
