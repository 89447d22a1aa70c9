"""What the geometry of SAM 3D Body asks of its neural parts.

    features = network.image_features(image, taps=taps)
    result = network.decode("body", features, rays, condition, prompts, feedback, taps=taps)

Every array is C-contiguous float32 unless said otherwise; B is the number of crops. Names of
tensors and stages are those of the original (facebookresearch/sam-3d-body b5c765a0). Every
product with learned tensors runs on the chosen backend; crops, rays, kinematics, projection and
decoding of the 519 pose values are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.network import Taps

FloatArray = npt.NDArray[np.float32]
Branch = Literal["body", "hand"]

POSE_VALUES = 519
CAMERA_VALUES = 3
KEYPOINTS = 70


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Normed backbone features plus the mask embedding, the decoder's image input.

    Attributes:
        values: [B, grid height, grid width, C], patches row-major.
    """

    values: FloatArray

    def select(self, index: int) -> ImageFeatures:
        """The features of one crop, still with a batch dimension."""
        return ImageFeatures(self.values[index : index + 1])


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """What the heads say after one decoder layer.

    Attributes:
        layer: index of the decoder layer, from 0.
        last: whether this is the last layer, after which no feedback is used.
        pose_token: [B, DIM], the first token after `norm_final`.
        pose_residual: [B, 519], the pose head's MLP output.
        pose: [B, 519], `pose_residual` plus the branch's initial pose: 6D global rotation 6 |
            body 260 | shape 45 | scale 28 | hands 2x54 | face 72.
        camera: [B, 3], raw (s, tx, ty): MLP output plus the branch's initial camera.
    """

    layer: int
    last: bool
    pose_token: FloatArray
    pose_residual: FloatArray
    pose: FloatArray
    camera: FloatArray


@dataclass(frozen=True, slots=True)
class Feedback:
    """The prediction of a layer, as the keypoint tokens of the next layer use it.

    Attributes:
        keypoints_2d_cropped: [B, 70, 2], crop units -0.5..0.5.
        keypoints_2d_depth: [B, 70], metres.
        keypoints_3d: [B, 70, 3], metres, y and z flipped.
    """

    keypoints_2d_cropped: FloatArray
    keypoints_2d_depth: FloatArray
    keypoints_3d: FloatArray


FeedbackFunction = Callable[[LayerOutput], Feedback]


@dataclass(frozen=True, slots=True)
class DecoderResult:
    """The end of a decoder pass.

    Attributes:
        output: what the heads say after the last layer.
        hand_box_logits: [B, 2, 4], (left, right) boxes cx, cy, w, h before the sigmoid; None
            when the pass ran without hand detection tokens.
        hand_cls_logits: [B, 2, 2], or None likewise.
    """

    output: LayerOutput
    hand_box_logits: FloatArray | None
    hand_cls_logits: FloatArray | None


@dataclass(frozen=True, slots=True)
class PromptEncoding:
    """Prompts as the decoder sees them.

    Attributes:
        embeddings: [B, N, C].
        mask: [B, N], 1 where the label is above -2.
        tokens: [B, N, DIM].
    """

    embeddings: FloatArray
    mask: FloatArray
    tokens: FloatArray


@dataclass(frozen=True, slots=True)
class KeypointUpdate:
    """The tokens after the feedback of a layer.

    Attributes:
        tokens: [B, tokens, DIM], sampled features added to the 2D keypoint rows.
        augment_2d: [B, tokens, DIM], 2D keypoint rows replaced.
        augment: [B, tokens, DIM], 2D and 3D keypoint rows replaced.
    """

    tokens: FloatArray
    augment_2d: FloatArray
    augment: FloatArray


class BodyNetwork(Protocol):
    """The neural parts of SAM 3D Body. Not safe for concurrent calls."""

    def image_features(
        self,
        image: FloatArray,
        mask: FloatArray | None = None,
        mask_score: FloatArray | None = None,
        *,
        taps: Taps | None = None,
    ) -> ImageFeatures:
        """The backbone and the mask prompt.

        Args:
            image: [B, 3, H, W], normalised RGB; H and W are multiples of the patch size.
            mask: [B, 1, H, W] in 0..1, resampled like the image; None is all zeros.
            mask_score: [B]; a crop with a score of 0 or less takes the no-mask embedding. None
                is all zeros.
        """
        ...

    def decode(
        self,
        branch: Branch,
        features: ImageFeatures,
        rays: FloatArray,
        condition: FloatArray,
        prompts: FloatArray,
        feedback: FeedbackFunction,
        previous: FloatArray | None = None,
        *,
        hand_tokens: bool = True,
        taps: Taps | None = None,
    ) -> DecoderResult:
        """One pass of a branch's promptable decoder; `feedback` is called after every layer.

        Args:
            rays: [B, 2, H, W], the (x, y) of every crop pixel's ray at z = 1.
            condition: [B, 3], CLIFF's (cx - K02) / fx, (cy - K12) / fx, side / fx.
            prompts: [B, N, 3], x and y in 0..1 of the crop, label: -2 dummy, -1 wrong, 0..69 a
                keypoint.
            previous: [B, 522], pose 519 | camera 3 of the previous pass; None is the branch's
                initial estimate.
            hand_tokens: whether the two hand detection tokens take part.
        """
        ...

    def initial_estimate(self, branch: Branch) -> FloatArray:
        """[522]: initial pose 519 | initial camera 3."""
        ...

    def heads(self, branch: Branch, pose_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[B, DIM] to the MLP outputs of the pose head [B, 519] and the camera head [B, 3]."""
        ...

    def ray_condition(
        self,
        branch: Branch,
        features: ImageFeatures,
        rays: FloatArray,
        *,
        taps: Taps | None = None,
    ) -> ImageFeatures:
        """The camera encoder alone: features conditioned on [B, 2, H, W] rays."""
        ...

    def encode_prompts(self, prompts: FloatArray) -> PromptEncoding:
        """The prompt encoder alone, for [B, N, 3] prompts."""
        ...

    def dense_position(self, branch: Branch, grid: tuple[int, int]) -> FloatArray:
        """[C, grid height, grid width]: the dense positional encoding of a branch."""
        ...

    def mask_embeddings(self, mask: FloatArray) -> FloatArray:
        """[B, 1, H, W] to [B, C, H / 16, W / 16]: the mask prompt's convolutions."""
        ...

    def select_mask_embeddings(self, embeddings: FloatArray, score: FloatArray) -> FloatArray:
        """[B, C, h, w]: score times the embeddings where the [B] score is above 0, else no-mask."""
        ...

    def update_keypoints(
        self,
        branch: Branch,
        tokens: FloatArray,
        augment: FloatArray,
        features: ImageFeatures,
        feedback: Feedback,
    ) -> KeypointUpdate:
        """The feedback of a layer alone; the last 140 tokens are the 2D and 3D keypoints."""
        ...

    def scales(self, branch: Branch, scale: FloatArray) -> FloatArray:
        """[B, 28] scale coefficients to [B, 68] MHR scales: scale_mean + scale @ scale_comps."""
        ...

    def hand_pose(self, branch: Branch, hand: FloatArray) -> FloatArray:
        """[B, 54] of one hand to its continuous pose [B, 54]: hand_pose_mean + hand @ comps."""
        ...

    def keypoints(self, branch: Branch, points: FloatArray) -> FloatArray:
        """[B, V + 127, 3] vertices | joints to [B, 308, 3] keypoints, in the points' unit."""
        ...


@dataclass(frozen=True, slots=True)
class MhrVertices:
    """The mesh of MHR, [B, V, 3] each, cm.

    Attributes:
        rest: before skinning: base, identity, expression and correctives.
        posed: after it; a vertex without influence is 0.
    """

    rest: FloatArray
    posed: FloatArray


class MhrProducts(Protocol):
    """The products of MHR with its learned tensors; centimetres. Not safe for concurrent calls."""

    def joint_parameters(self, parameters: FloatArray) -> FloatArray:
        """[B, 204] model parameters to [B, 889] joint parameters."""
        ...

    def mesh(
        self,
        identity: FloatArray,
        expression: FloatArray | None,
        features: FloatArray | None,
        matrices: FloatArray,
        *,
        taps: Taps | None = None,
    ) -> MhrVertices:
        """The mesh, at rest and posed.

        Args:
            identity: [B, 45].
            expression: [B, 72], or None for a neutral face.
            features: [B, 750] pose features, or None for no pose correctives.
            matrices: [B, J, 3, 4], of each joint, from the rest pose to the posed one.
            taps: receives what is added up: `rest_identity`, `rest_expression`,
                `corrective_hidden`, `corrective_offsets`.
        """
        ...
