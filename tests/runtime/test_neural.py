"""Every neural stage equals the original's, on every backend, under the fixtures' own rules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neural_capture import Arrays, capture, expected_names, references
from numpy.typing import NDArray
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]
from tiny_weights import DECODER_HEADS, TINY, tiny_body, tiny_mhr, weights_of

from sam3d_gguf.runtime.body.neural import Branch, Feedback, FloatArray, ImageFeatures, LayerOutput
from sam3d_gguf.runtime.body.neural_mhr import GgmlMhrProducts
from sam3d_gguf.runtime.body.neural_network import GgmlBodyNetwork
from sam3d_gguf.runtime.body.neural_parts import BodyDimensions
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.ggml.library import VULKAN_MODULE, load_library
from sam3d_gguf.runtime.parity.compare import compare_arrays
from sam3d_gguf.runtime.parity.rules import load_rules
from sam3d_gguf.schemas.errors import ContractError, InputError

HEADS: list[tuple[Branch, str]] = [("body", "head_pose"), ("hand", "head_pose_hand")]
RULES = load_rules(TINY / "rules.json")


def failures(found: Arrays) -> list[str]:
    reference = references()
    wanted = {name: reference[name] for name in expected_names(reference)}
    assert len(wanted) == 219
    verdicts = compare_arrays(wanted, found, RULES)
    return [f"{verdict.name}: {verdict.reason}" for verdict in verdicts if not verdict.passed]


@pytest.mark.parametrize("threads", [1, 2])
def test_every_stage_on_the_cpu(threads: int) -> None:
    with open_backend(load_library(), "cpu", threads=threads) as backend:
        found, nodes = capture(backend)
    assert failures(found) == []
    assert {node.buffer for node in nodes} == {"CPU"}
    assert {node.backend for node in nodes} <= {"CPU", "BLAS"}
    assert all(node.name for node in nodes)


def test_repetition_changes_no_bit() -> None:
    captures: list[Arrays] = []
    for _ in range(2):
        with open_backend(load_library(), "cpu", threads=2) as backend:
            captures.append(capture(backend)[0])
    first, second = captures
    assert {name: array.tobytes() for name, array in first.items()} == {
        name: array.tobytes() for name, array in second.items()
    }


@pytest.mark.skipif(
    not (load_library().directory / VULKAN_MODULE).exists(), reason="just setup-vulkan did not run"
)
def test_every_stage_on_vulkan(tmp_path: Path) -> None:
    out = tmp_path / "vulkan.safetensors"
    program = Path(__file__).parents[1] / "neural_capture.py"
    run = subprocess.run(
        [sys.executable, program, "vulkan", out],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"GGML_VK_VISIBLE_DEVICES": "0", **os.environ},
        timeout=600,
    )
    assert run.stdout.split() == ["Vulkan0"]
    assert failures(load_file(out)) == []


@pytest.fixture(name="network")
def _network() -> Iterator[GgmlBodyNetwork]:
    with (
        open_backend(load_library(), "cpu", threads=1) as backend,
        GgmlBodyNetwork(backend, tiny_body(), decoder_heads=DECODER_HEADS) as network,
    ):
        yield network


def zeros(*shape: int) -> FloatArray:
    return np.zeros(shape, np.float32)


def still(_output: LayerOutput) -> Feedback:
    return Feedback(zeros(1, 70, 2), np.ones((1, 70), np.float32), zeros(1, 70, 3))


def test_the_dimensions_are_those_of_the_fixture() -> None:
    assert BodyDimensions.of(tiny_body(), DECODER_HEADS) == BodyDimensions(
        channels=64,
        depth=3,
        heads=4,
        patch=16,
        storage_tokens=4,
        decoder_dim=48,
        decoder_depth=3,
        decoder_heads=4,
    )


def test_crops_of_a_batch_do_not_touch_each_other(network: GgmlBodyNetwork) -> None:
    images = np.random.default_rng(1).standard_normal((3, 3, 32, 48)).astype(np.float32)
    together = network.image_features(images).values
    apart = [network.image_features(image[None]).values[0] for image in images]
    assert together.shape == (3, 2, 3, 64)
    np.testing.assert_allclose(together, np.stack(apart), rtol=1e-5, atol=1e-5)


def test_people_of_a_batch_do_not_touch_each_other(network: GgmlBodyNetwork) -> None:
    generator = np.random.default_rng(2)

    def normal(*shape: int) -> FloatArray:
        return generator.standard_normal(shape).astype(np.float32)

    values, rays, conditions = normal(2, 4, 4, 64), normal(2, 2, 64, 64), normal(2, 3)
    points = Feedback(normal(2, 70, 2), np.ones((2, 70), np.float32), normal(2, 70, 3))
    prompts = np.array([[[0.25, 0.5, 7]], [[0, 0, -2]]], np.float32)

    def feedback(rows: slice) -> Callable[[LayerOutput], Feedback]:
        return lambda _output: Feedback(
            points.keypoints_2d_cropped[rows],
            points.keypoints_2d_depth[rows],
            points.keypoints_3d[rows],
        )

    def decode(rows: slice) -> FloatArray:
        return network.decode(
            "hand",
            ImageFeatures(values[rows]),
            rays[rows],
            conditions[rows],
            prompts[rows],
            feedback(rows),
        ).output.pose

    together = decode(slice(0, 2))
    apart = np.concatenate([decode(slice(0, 1)), decode(slice(1, 2))])
    np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-5)


def test_without_hand_tokens_no_boxes(network: GgmlBodyNetwork) -> None:
    features, rays = ImageFeatures(zeros(1, 2, 2, 64)), zeros(1, 2, 32, 32)
    prompts = np.array([[[0, 0, -2]]], np.float32)
    with_hands = network.decode("body", features, rays, zeros(1, 3), prompts, still)
    without = network.decode("body", features, rays, zeros(1, 3), prompts, still, hand_tokens=False)
    assert without.hand_box_logits is None
    assert without.hand_cls_logits is None
    assert with_hands.hand_box_logits is not None
    assert with_hands.hand_box_logits.shape == (1, 2, 4)
    assert np.abs(with_hands.output.pose - without.output.pose).max() > 1e-6


def test_a_mask_with_a_score_replaces_the_no_mask_embedding(network: GgmlBodyNetwork) -> None:
    image = zeros(1, 3, 32, 32)
    mask = np.ones((1, 1, 32, 32), np.float32)
    score = np.array([0.5], np.float32)
    plain = network.image_features(image).values
    masked = network.image_features(image, mask, score).values
    no_mask = tiny_body().array("prompt_encoder.no_mask_embed.weight")[0]
    embedded = network.mask_embeddings(mask).transpose(0, 2, 3, 1)
    expected = plain - no_mask + score[0] * embedded
    np.testing.assert_allclose(masked, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("branch", "module"), HEADS)
def test_small_products(network: GgmlBodyNetwork, branch: Branch, module: str) -> None:
    body = tiny_body()
    generator = np.random.default_rng(3)
    scale = generator.standard_normal((2, 28)).astype(np.float32)
    hand = generator.standard_normal((2, 54)).astype(np.float32)
    points = generator.standard_normal((2, 217, 3)).astype(np.float32)

    def stored(name: str) -> FloatArray:
        array: FloatArray = body.array(f"{module}.{name}")
        return array

    pairs = [
        (network.scales(branch, scale), stored("scale_mean") + scale @ stored("scale_comps")),
        (
            network.hand_pose(branch, hand),
            stored("hand_pose_mean") + hand @ stored("hand_pose_comps"),
        ),
        (network.keypoints(branch, points), stored("keypoint_mapping") @ points),
    ]
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_cancelled_run_ends_and_the_next_one_runs(network: GgmlBodyNetwork) -> None:
    network.cancel()
    with pytest.raises(CancelledError, match=r"cancelled before backbone\.embed"):
        network.image_features(zeros(1, 3, 32, 32))
    assert network.image_features(zeros(1, 3, 32, 32)).values.shape == (1, 2, 2, 64)


@pytest.mark.parametrize("shape", [(1, 3, 32, 40), (1, 1, 32, 32), (1, 3, 0, 32)])
def test_a_crop_of_broken_patches_is_refused(
    network: GgmlBodyNetwork, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match="the crop has the shape"):
        network.image_features(zeros(*shape))


def test_a_mask_of_broken_patches_is_refused(network: GgmlBodyNetwork) -> None:
    with pytest.raises(InputError, match="the mask has the shape"):
        network.mask_embeddings(zeros(1, 1, 40, 32))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1.5, 0, 3], "outside of the crop"),
        ([np.nan, 0, 3], "outside of the crop"),
        ([0, 0, 70], "unknown label"),
        ([0, 0, -3], "unknown label"),
        ([0, 0, 1.5], "unknown label"),
        ([0, 0, np.nan], "unknown label"),
    ],
)
def test_a_wrong_prompt_is_refused(
    network: GgmlBodyNetwork, prompt: list[float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        network.encode_prompts(np.array([[prompt]], np.float32))


def test_rays_of_another_crop_are_refused(network: GgmlBodyNetwork) -> None:
    with pytest.raises(InputError, match="the rays have the shape"):
        network.ray_condition("body", ImageFeatures(zeros(1, 2, 2, 64)), zeros(1, 2, 32, 48))


def test_a_missing_tensor_is_named() -> None:
    body = tiny_body()
    arrays = {
        name: (tensor.type, body.raw(name))
        for name, tensor in body.tensors.items()
        if name != "decoder.layers.1.ln1.weight"
    }
    with open_backend(load_library(), "cpu") as backend:
        network = GgmlBodyNetwork(backend, weights_of(arrays, {}), decoder_heads=DECODER_HEADS)
        with network, pytest.raises(ContractError, match=r"decoder\.layers\.1\.ln1\.weight"):
            network.decode(
                "body",
                ImageFeatures(zeros(1, 2, 2, 64)),
                zeros(1, 2, 32, 32),
                zeros(1, 3),
                np.array([[[0, 0, -2]]], np.float32),
                still,
            )


def mhr_arrays() -> dict[str, tuple[str, NDArray[Any]]]:
    mhr = tiny_mhr()
    return {name: (tensor.type, mhr.raw(name).copy()) for name, tensor in mhr.tensors.items()}


@pytest.mark.parametrize(("row", "index"), [(0, 3000), (1, 750), (0, -1)])
def test_a_sparse_index_out_of_range_is_refused(row: int, index: int) -> None:
    arrays = mhr_arrays()
    arrays["pose.sparse.indices"][1][row, 5] = index
    with (
        open_backend(load_library(), "cpu") as backend,
        pytest.raises(ContractError, match=r"index of pose\.sparse\.weight is out of range"),
    ):
        GgmlMhrProducts(backend, weights_of(arrays, {}))


@pytest.mark.parametrize(
    ("name", "index"), [("skin.vertices", 90), ("skin.joints", 127), ("skin.joints", -1)]
)
def test_a_skinning_index_out_of_range_is_refused(name: str, index: int) -> None:
    arrays = mhr_arrays()
    arrays[name][1][5] = index
    with (
        open_backend(load_library(), "cpu") as backend,
        pytest.raises(ContractError, match=r"index of skin\.weights is out of range"),
    ):
        GgmlMhrProducts(backend, weights_of(arrays, {}))


def test_a_vertex_without_influence_is_zero() -> None:
    arrays = mhr_arrays()
    kept = arrays["skin.vertices"][1] != 7
    for name in ("skin.vertices", "skin.joints", "skin.weights"):
        kind, array = arrays[name]
        arrays[name] = kind, array[kept]
    matrices = np.random.default_rng(4).standard_normal((1, 127, 3, 4)).astype(np.float32)
    with (
        open_backend(load_library(), "cpu", threads=2) as backend,
        GgmlMhrProducts(backend, weights_of(arrays, {})) as products,
    ):
        mesh = products.mesh(zeros(1, 45), None, None, matrices)
    assert np.flatnonzero((mesh.posed == 0).all(axis=(0, 2))).tolist() == [7]
    assert mesh.rest[0, 7].all()
