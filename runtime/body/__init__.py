"""SAM 3D Body: from a photo to posed meshes.

>>> from sam3d_gguf.runtime.body import BodyModel
>>> with BodyModel.load("body.gguf", mhr="mhr.gguf") as model:  # doctest: +SKIP
...     result = model("photo.jpg", [[52, 8, 141, 139]])
...     result["pred_vertices"].shape
(1, 18439, 3)
"""

from sam3d_gguf.runtime.body.mhr_model import MhrModel
from sam3d_gguf.runtime.body.model import BodyModel
from sam3d_gguf.runtime.body.result import BodyResult, FeatureResult

__all__ = ["BodyModel", "BodyResult", "FeatureResult", "MhrModel"]
