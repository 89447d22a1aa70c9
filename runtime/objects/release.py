"""The model files of one release of SAM 3D Objects in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.stream import CONTENT_KEY, SEMANTICS_KEY
from sam3d_gguf.extractors.models import MOGE, OBJECTS, ObjectsModel, part
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import ContractError, InputError


class ObjectsRelease(Closing):
    """Opened parts that belong together. The files stay open until it is closed.

    Attributes:
        parts: by model.
    """

    @classmethod
    def open(cls, folder: Path, models: Iterable[ObjectsModel], *, verify: bool = False) -> Self:
        """The files of those models, after every check of their headers and of each other.

        Args:
            folder: holds `ss_generator.gguf` and so on, as `sam3d-convert objects` writes them.
            models: those that the run needs.
            verify: also hash all tensors' data, which takes as long as reading the files.

        Raises:
            InputError: the folder or a file is missing, or is no GGUF of the accepted form.
            ContractError: a file is another model, breaks its contract or its digests, or is of
                another release than the others.
        """
        needed = set(models)
        paths: dict[ObjectsModel, Path] = {
            model: folder / f"{part(model)}.gguf" for model in OBJECTS if model in needed
        }
        missing = [path.name for path in paths.values() if not path.exists()]
        if missing:
            what = f"there is no {', '.join(missing)}" if folder.is_dir() else "there is no folder"
            raise InputError(
                what,
                where=str(folder),
                expected=", ".join(path.name for path in paths.values()),
                action="Convert all parts of one release into one folder.",
            )
        with contextlib.ExitStack() as stack:
            parts: dict[ObjectsModel, Weights] = {
                model: stack.enter_context(load_weights(path, model, verify=verify))
                for model, path in paths.items()
            }
            _check_together(parts)
            stack.pop_all()
        return cls(parts)

    def __init__(self, parts: Mapping[ObjectsModel, Weights]) -> None:
        self.parts = dict(parts)

    def __getitem__(self, model: ObjectsModel) -> Weights:
        return self.parts[model]

    @property
    def metadata(self) -> Mapping[str, Mapping[str, Any]]:
        """The metadata of the files, by model."""
        return {model: weights.metadata for model, weights in self.parts.items()}

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for weights in self.parts.values():
            weights.close()


def _check_together(parts: Mapping[ObjectsModel, Weights]) -> None:
    """Refuse parts whose digests differ from what another says of them, or that no other names."""
    for model, weights in parts.items():
        for companion in load_model_contract(model).companions:
            key = _companion_key(CONTENT_KEY, companion.role)
            # The depth model is of no release: it may be converted alone.
            if companion.role in parts and model != MOGE and key not in weights.metadata:
                raise ContractError(
                    f"the parts are of two releases: {weights.path.name} does not name "
                    f"{part(companion.role)}, which lies beside it",
                    where=str(weights.path.parent),
                    action="Convert all parts at once.",
                )
    for key in (CONTENT_KEY, SEMANTICS_KEY):
        known = {
            str(model): (weights.metadata.get(key), weights.path.name)
            for model, weights in parts.items()
        }
        for weights in parts.values():
            for role in OBJECTS:
                stated = weights.metadata.get(_companion_key(key, role))
                if stated is None:
                    continue
                found, other = known.setdefault(role, (stated, weights.path.name))
                if found != stated:
                    raise ContractError(
                        f"the parts are of two releases: the {key} of {part(role)} is "
                        f"{str(stated)[:12]}... in {weights.path.name}, "
                        f"{str(found)[:12]}... in {other}",
                        where=str(weights.path.parent),
                        action="Take all parts from one conversion.",
                    )


def _companion_key(key: str, role: str) -> str:
    """Where a file says of a companion what that says of itself under `key`."""
    return key.replace("sam3d.", f"sam3d.companion.{role}.", 1)
