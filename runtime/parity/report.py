"""What a comparison found, as data and as a JSON document."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sam3d_gguf.runtime.parity.rules import Limits
from sam3d_gguf.schemas.strict_json import dumps

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file by base name, size and SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """The verdict on one tensor; `reason` is empty when it passed.

    Attributes:
        worst: index of the largest difference, with the reference's and the candidate's value.
    """

    name: str
    passed: bool
    reason: str
    mode: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    max_abs: float | None = None
    max_abs_limit: float | None = None
    relative_l2: float | None = None
    relative_l2_limit: float | None = None
    worst: tuple[tuple[int, ...], float, float] | None = None

    def as_json(self) -> JsonObject:
        """The JSON object of the report."""
        found: JsonObject = {"name": self.name, "verdict": "pass" if self.passed else "fail"}
        if self.reason:
            found["reason"] = self.reason
        if self.mode:
            found |= {"mode": self.mode, "dtype": self.dtype, "shape": list(self.shape)}
        for key in ("max_abs", "max_abs_limit", "relative_l2", "relative_l2_limit"):
            value: float | None = getattr(self, key)
            if value is not None:
                found[key] = value if math.isfinite(value) else None
        if self.worst is not None:
            index, reference, candidate = self.worst
            found["worst"] = {
                "index": list(index),
                "reference": reference,
                "candidate": candidate,
            }
        return found


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The whole comparison, tensors in the order of the rules."""

    limits: Limits
    references: tuple[FileIdentity, ...]
    candidate: FileIdentity
    rules: FileIdentity | None
    tensors: tuple[TensorVerdict, ...]

    @property
    def failed(self) -> tuple[TensorVerdict, ...]:
        """Verdicts that did not pass, first failing stage first."""
        return tuple(verdict for verdict in self.tensors if not verdict.passed)

    @property
    def passed(self) -> bool:
        """Whether every tensor passed and there was at least one."""
        return bool(self.tensors) and not self.failed

    def as_json(self) -> JsonObject:
        """The report document."""
        failed = self.failed
        return {
            "schema_version": 1,
            "verdict": "pass" if self.passed else "fail",
            "limits": self.limits,
            "passed": len(self.tensors) - len(failed),
            "failed": len(failed),
            "first_failing": failed[0].name if failed else None,
            "files": {
                "references": [_identity(item) for item in self.references],
                "candidate": _identity(self.candidate),
                "rules": _identity(self.rules) if self.rules else None,
            },
            "tensors": [verdict.as_json() for verdict in self.tensors],
        }

    def dumps(self) -> bytes:
        """The report as the JSON text of a document of the schema `parity-report`."""
        return dumps(self.as_json())


def _identity(item: FileIdentity) -> JsonObject:
    return {"name": item.name, "bytes": item.nbytes, "sha256": item.sha256}
