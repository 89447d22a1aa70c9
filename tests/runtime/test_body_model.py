"""The estimator equals the original on the tiny model, from its own intermediates."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import TINY
from numpy.typing import NDArray

from sam3d_gguf.runtime.body import BodyModel, MhrModel
from sam3d_gguf.runtime.body.cases import run_cases
from sam3d_gguf.runtime.body.estimator import InferenceType
from sam3d_gguf.runtime.ggml import host_memory
from sam3d_gguf.runtime.ggml.errors import BackendError, CancelledError
from sam3d_gguf.runtime.parity import Limits, ParityReport, Rules, compare, parse_rules
from sam3d_gguf.runtime.tensor_files import TensorFile, write_tensors
from sam3d_gguf.schemas.errors import ContractError, InputError

Tensors = dict[str, NDArray[Any]]
BOX = [[52, 8.5, 141.25, 139]]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def threaded(request: pytest.FixtureRequest, model_files: tuple[Path, Path]) -> Any:
    with BodyModel.load(model_files[0], mhr=model_files[1], threads=request.param) as loaded:
        yield loaded


def judge(tmp_path: Path, tensors: Tensors, reference: str, rules: Rules, limits: Limits) -> None:
    write_tensors(tmp_path / "candidate.safetensors", tensors)
    report: ParityReport = compare(
        [TINY / reference], tmp_path / "candidate.safetensors", rules, limits=limits
    )
    assert [(v.name, v.reason) for v in report.failed] == []
    assert report.passed


def test_body_run(
    threaded: BodyModel, rules: Rules, intrinsics: NDArray[np.float32], tmp_path: Path
) -> None:
    capture = threaded.new_capture()
    threaded(TINY / "input.png", BOX, intrinsics, "body", capture=capture)
    judge(tmp_path, capture.tensors, "expected.safetensors", rules, "plain")


def test_full_run_from_its_own_hand_boxes(
    threaded: BodyModel, rules: Rules, intrinsics: NDArray[np.float32], tmp_path: Path
) -> None:
    capture = threaded.new_capture()
    threaded(TINY / "input.png", BOX, intrinsics, "full", capture=capture)
    judge(tmp_path, capture.tensors, "expected-full.safetensors", rules, "free-running")


def test_full_run_from_the_recorded_hand_boxes(
    threaded: BodyModel,
    rules: Rules,
    intrinsics: NDArray[np.float32],
    expected_full: Tensors,
    tmp_path: Path,
) -> None:
    capture = threaded.new_capture()
    recorded = (
        expected_full["11.boxes.000.left_xyxy"],
        expected_full["11.boxes.001.right_xyxy"],
    )
    threaded(TINY / "input.png", BOX, intrinsics, recorded_hand_boxes=recorded, capture=capture)
    judge(tmp_path, capture.tensors, "expected-full.safetensors", rules, "plain")


@pytest.mark.parametrize("name", ["head-cases.safetensors", "mhr-cases.safetensors"])
def test_single_components(threaded: BodyModel, rules: Rules, tmp_path: Path, name: str) -> None:
    with TensorFile(TINY / name) as file:
        tensors = {tensor: file.read(tensor) for tensor in file.tensors}
    inputs = {
        tensor: array
        for tensor, array in tensors.items()
        if ".in_" in tensor or tensor.endswith("apply_correctives")
    }
    found = run_cases(inputs, threaded.estimator.passes)
    judge(tmp_path, found, name, rules, "plain")


# expected-people.safetensors holds what the original (b5c765a0, OpenCV 4.12, the patches of the
# fixture) says about three boxes of the same photo: `full`, `masked` (body, with masks), `hand`
# (the hand decoder's output), `alone` (full, the second box by itself, no hand accepted) and
# `assumed` (body, the first box, default camera).
PEOPLE_LIMITS = parse_rules(
    b'{"schema_version": 1, "tensors": [{"name": "*", "mode": "float", "max_abs": 0.02,'
    b' "relative_l2": 5e-5, "zero_reference_floor": 1e-6}]}',
    where="limits",
)


@pytest.mark.parametrize(
    ("tag", "kind"),
    [
        ("full", "full"),
        ("masked", "body"),
        ("hand", "hand"),
        ("alone", "full"),
        ("assumed", "body"),
    ],
)
def test_several_people_masks_and_hands(
    model: BodyModel, tmp_path: Path, tag: str, kind: InferenceType
) -> None:
    with TensorFile(TINY / "expected-people.safetensors") as file:
        people = {name: file.read(name) for name in file.tensors}
    boxes = people["boxes"][{"alone": slice(1, 2), "assumed": slice(0, 1)}.get(tag, slice(None))]
    result = model(
        TINY / "input.png",
        boxes,
        None if tag == "assumed" else people["cam_int"],
        kind,
        masks=people["masks"] if tag == "masked" else None,
    )
    wanted = {
        name.split(".")[1]: array for name, array in people.items() if name.startswith(f"{tag}.")
    }
    found = {name: result[name] for name in wanted}
    write_tensors(tmp_path / "wanted.safetensors", wanted)
    write_tensors(tmp_path / "found.safetensors", found)
    report = compare(
        [tmp_path / "wanted.safetensors"], tmp_path / "found.safetensors", PEOPLE_LIMITS
    )
    assert [(v.name, v.reason) for v in report.failed] == []
    assert result.assumed_intrinsics == (tag == "assumed")
    if tag == "full":
        assert result["hands_accepted"].tolist() == [[1, 1], [0, 0], [1, 0]]


def test_two_runs_are_byte_identical(model: BodyModel, intrinsics: NDArray[np.float32]) -> None:
    first = model(TINY / "input.png", BOX, intrinsics)
    second = model(TINY / "input.png", BOX, intrinsics)
    for name, array in first.arrays.items():
        assert array.tobytes() == second[name].tobytes(), name


def test_features_are_the_pose_token_and_camera(
    model: BodyModel, intrinsics: NDArray[np.float32], expected: Tensors
) -> None:
    found = model.features(TINY / "input.png", BOX, intrinsics)
    assert set(found.arrays) == {"bbox", "pose_token", "pred_cam_t", "cam_int"}
    assert found["pose_token"].shape == (1, 48)
    with_hands = expected["01.body.094.decoder.layer02.tokens_normed"][:, 0]
    assert not np.allclose(found["pose_token"], with_hands, atol=1e-4)
    head, camera = model.estimator.passes.network.heads("body", found["pose_token"])
    assert head.shape == (1, 519)
    initial = model.estimator.passes.network.initial_estimate("body")[519:]
    depth = 2 * intrinsics[0, 0] / -(camera[0, 0] + initial[0])
    side = expected["01.body.002.crop.bbox_scale"][0, 0]
    np.testing.assert_allclose(found["pred_cam_t"][0, 2], depth / side, rtol=1e-4)


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([[5, 5, 5, 9]], "empty"),
        ([[9, 5, 5, 9]], "empty"),
        ([[0.2, 0.1, 0.6, 0.9]], "smaller than a pixel; expected pixels, not fractions"),
        ([[300, 5, 310, 9]], "outside"),
        ([[0, 0, np.nan, 9]], "finite"),
        ([[0, 0, 1e9, 9]], "larger"),
        ([[1, 2, 3]], "shape"),
        ([], "shape"),
        ([["a", "b", "c", "d"]], "numbers"),
    ],
)
def test_unusable_boxes_are_refused(model: BodyModel, boxes: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        model(TINY / "input.png", boxes)


def test_other_unusable_inputs_are_refused(model: BodyModel) -> None:
    with pytest.raises(InputError, match="focal"):
        model(TINY / "input.png", BOX, np.diag([0, 1, 1]))
    with pytest.raises(InputError, match="masks"):
        model(TINY / "input.png", BOX, masks=np.zeros((1, 3, 3), np.uint8))
    with pytest.raises(InputError, match="inference type"):
        model(TINY / "input.png", BOX, None, "legs")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="uint8"):
        model(np.zeros((4, 4, 3)), BOX)  # type: ignore[arg-type]


def test_wrong_models_and_devices_are_refused(model_files: tuple[Path, Path]) -> None:
    body, mhr = model_files
    with pytest.raises(ContractError, match="the file is mhr"):
        BodyModel.load(mhr, mhr=mhr)
    with pytest.raises(ContractError, match="the file is body"):
        BodyModel.load(body, mhr=body)
    with pytest.raises(InputError):
        BodyModel.load(TINY / "model.ckpt", mhr=mhr)
    with pytest.raises(BackendError):
        BodyModel.load(body, mhr=mhr, device=9)
    with pytest.raises(BackendError):
        BodyModel.load(body, mhr=mhr, expect_device="another")


def test_hand_boxes_without_area_only_lose_the_hands(
    model: BodyModel, intrinsics: NDArray[np.float32]
) -> None:
    nothing = np.array([[30, 40, 30, 40]], np.float32)
    found = model(TINY / "input.png", BOX, intrinsics, recorded_hand_boxes=(nothing, nothing))
    assert found["hands_accepted"].tolist() == [[0, 0]]
    body = model(TINY / "input.png", BOX, intrinsics, "body")
    np.testing.assert_array_equal(found["hand_pose_params"], body["hand_pose_params"])
    np.testing.assert_allclose(found["pred_vertices"], body["pred_vertices"], atol=1e-6)


def test_cancel_ends_a_run_before_its_next_stage(model: BodyModel) -> None:
    class Cancelling:
        """Cancels while the photo's first stage is captured."""

        def __init__(self) -> None:
            self.capture = model.new_capture()

        def section(self, name: str) -> Any:
            model.cancel()
            return self.capture.section(name)

    with pytest.raises(CancelledError):
        model(TINY / "input.png", BOX, capture=Cancelling())  # type: ignore[arg-type]
    assert len(model(TINY / "input.png", BOX)) == 1


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (np.diag([0.9, 200, 1]), "focal lengths are 0.9 and 200"),
        (np.diag([200, 2e7, 1]), "focal lengths are 200 and 2e"),
        (np.diag([-200, 200, 1]), "focal lengths"),
        (np.diag([200, 200, 2]), "no camera's"),
        (np.array([[200, 0, 1e8], [0, 200, 75], [0, 0, 1]]), "no camera's"),
        (np.full((3, 3), np.nan), "not finite"),
        (np.eye(2), "shape"),
    ],
)
def test_unusable_intrinsics_are_refused(model: BodyModel, matrix: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        model(TINY / "input.png", BOX, matrix)


def test_inputs_that_would_be_misread_are_refused(model: BodyModel) -> None:
    white = np.full((1, 150, 200), 255, np.uint8)
    nowhere = np.full((1, 4), np.nan, np.float32)
    with pytest.raises(InputError, match="a mask holds 255; expected 0 and 1"):
        model(TINY / "input.png", BOX, masks=white)
    with pytest.raises(InputError, match="recorded hand boxes of shapes"):
        model(TINY / "input.png", BOX, recorded_hand_boxes=(nowhere[0], nowhere))
    with pytest.raises(InputError, match="lhand_bbox: the estimate is not finite"):
        model(TINY / "input.png", BOX, recorded_hand_boxes=(nowhere, nowhere))
    with pytest.raises(InputError, match="the image is NoneType"):
        model(None, BOX)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a hand alone"):
        model(TINY / "input.png", BOX, None, "hand", capture=model.new_capture())


@pytest.mark.parametrize(
    "wrong", [{"backend": "metal"}, {"precision": "half"}, {"threads": "2"}, {"device": "0"}]
)
def test_unknown_choices_are_refused(model_files: tuple[Path, Path], wrong: Any) -> None:
    with pytest.raises(BackendError):
        BodyModel.load(model_files[0], mhr=model_files[1], **wrong)


def test_a_closed_model_says_so(model_files: tuple[Path, Path]) -> None:
    body, mhr = model_files
    with BodyModel.load(body, mhr=mhr, threads=1) as closed:
        assert len(closed(TINY / "input.png", BOX, None, "body")) == 1
    for call in (closed, closed.features):
        with pytest.raises(BackendError, match="the model is closed"):
            call(TINY / "input.png", BOX)
    with MhrModel.load(mhr, threads=1) as gone:
        pass
    with pytest.raises(BackendError, match="the model is closed"):
        gone(np.zeros((1, 45)), np.zeros((1, 204)))


def test_calls_from_many_threads_give_one_result(model: BodyModel) -> None:
    wanted = model(TINY / "input.png", BOX)["pred_vertices"].tobytes()
    found: list[bytes] = []

    def call() -> None:
        found.append(model(TINY / "input.png", BOX)["pred_vertices"].tobytes())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


def test_mhr_takes_numbers_and_refuses_the_rest(model_files: tuple[Path, Path]) -> None:
    with MhrModel.load(model_files[1], threads=1) as mhr:
        assert mhr([[0] * 45], [[0] * 204] * 17).vertices.shape == (17, 90, 3)
        wrong: list[tuple[Any, Any, str]] = [
            (None, np.zeros((1, 204)), "not finite"),
            ("abc", np.zeros((1, 204)), "not numbers"),
            (np.zeros((1, 45)), np.full((1, 204), 1e300), "not finite"),
            (
                np.zeros((1, 45)),
                np.concatenate([np.zeros((20, 204)), np.full((1, 204), 200.0)]),
                "row 20: the mesh is not finite",
            ),
            (np.zeros((1, 45)), np.zeros((0, 204)), "do not fit"),
            (np.zeros(45), np.zeros(204), "do not fit"),
        ]
        for identity, parameters, words in wrong:
            with pytest.raises(InputError, match=words):
                mhr(identity, parameters)
        mhr.cancel()
        with pytest.raises(CancelledError):
            mhr(np.zeros((1, 45)), np.zeros((1, 204)))


def test_more_meshes_than_memory_are_refused(
    model_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MhrModel.load(model_files[1], threads=1) as mhr:
        monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
        with pytest.raises(BackendError, match="9 meshes need 0 MiB and 0 MiB are free"):
            mhr(np.zeros((1, 45)), np.zeros((9, 204)))
