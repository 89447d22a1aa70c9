"""Judge a candidate capture against reference captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.extraction import display_name
from sam3d_gguf.extractors.files import OpenedFile, open_source
from sam3d_gguf.extractors.hashing import hash_file
from sam3d_gguf.runtime.parity.measure import Difference, measure
from sam3d_gguf.runtime.parity.report import FileIdentity, ParityReport, TensorVerdict
from sam3d_gguf.runtime.parity.rules import Limits, Rule, Rules
from sam3d_gguf.runtime.tensor_files import TensorEntry, TensorFile
from sam3d_gguf.schemas.errors import InputError

Array = NDArray[Any]


def compare(
    references: Sequence[Path],
    candidate: Path,
    rules: Rules,
    *,
    limits: Limits = "plain",
    rules_path: Path | None = None,
) -> ParityReport:
    """Compare every tensor of the references with the candidate's tensor of the same name.

    A tensor passes only if it exists on both sides with the same shape and type, is not empty,
    holds finite numbers, has a rule and meets it. Memory stays bounded: tensors are read in
    blocks and compared in float64.

    Args:
        references: safetensors files whose names do not collide.
        candidate: the safetensors file under test.
        rules: the declared limits.
        limits: which limits of the rules apply.
        rules_path: the file of the rules, to record its hash.

    Raises:
        InputError: a file is malformed, or two references hold the same name.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in references]
        other = stack.enter_context(TensorFile(candidate))
        owners = _owners(files)
        present = {path.name for path in references}
        verdicts: list[tuple[int, TensorVerdict]] = []
        for name, owner in owners.items():
            position, rule = rules.find(name) or (len(rules.rules), None)
            verdicts.append((position, _judge_files(name, owner, other, rule, limits)))
        verdicts += _absent(rules, owners, present)
        for name in sorted(set(other.tensors) - set(owners)):
            position, _ = rules.find(name) or (len(rules.rules), None)
            verdicts.append((position, TensorVerdict(name, False, "not in any reference")))
        identified = tuple(_identity(file.opened) for file in (*files, other))
    verdicts.sort(key=lambda item: (item[0], item[1].name))
    return ParityReport(
        limits=limits,
        references=identified[:-1],
        candidate=identified[-1],
        rules=_identify(rules_path) if rules_path else None,
        tensors=tuple(verdict for _, verdict in verdicts),
    )


def compare_arrays(
    references: Mapping[str, Array],
    candidates: Mapping[str, Array],
    rules: Rules,
    *,
    limits: Limits = "plain",
) -> list[TensorVerdict]:
    """Judge arrays in memory; only the names of `references`, in the order of the rules."""
    verdicts: list[tuple[int, TensorVerdict]] = []
    for name, reference in references.items():
        position, rule = rules.find(name) or (len(rules.rules), None)
        found = candidates.get(name)
        if found is None:
            verdict = TensorVerdict(name, False, "missing in the candidate")
        else:
            left = TensorEntry(name, str(reference.dtype), reference.shape, 0, reference.nbytes)
            right = TensorEntry(name, str(found.dtype), found.shape, 0, found.nbytes)
            difference = None
            if left.shape == right.shape and left.dtype == right.dtype:
                pair = (reference.reshape(-1), found.reshape(-1))
                difference = measure([pair], euler=rule is not None and rule.mode == "euler")
            verdict = _judge(left, right, difference, rule, limits)
        verdicts.append((position, verdict))
    verdicts.sort(key=lambda item: (item[0], item[1].name))
    return [verdict for _, verdict in verdicts]


def _owners(files: Sequence[TensorFile]) -> dict[str, TensorFile]:
    owners: dict[str, TensorFile] = {}
    for file in files:
        for name in file.tensors:
            if name in owners:
                raise InputError(
                    f"tensor {name!r} is also in {owners[name].path.name}", where=str(file.path)
                )
            owners[name] = file
    return owners


def _absent(
    rules: Rules, owners: Mapping[str, TensorFile], present: set[str]
) -> list[tuple[int, TensorVerdict]]:
    return [
        (position, TensorVerdict(rule.name, False, "missing in the reference"))
        for position, rule in enumerate(rules.rules)
        if not rule.is_pattern
        and rule.name not in owners
        and (rule.file is None or rule.file in present)
    ]


def _judge_files(
    name: str, owner: TensorFile, other: TensorFile, rule: Rule | None, limits: Limits
) -> TensorVerdict:
    left, right = owner.tensors[name], other.tensors.get(name)
    if right is None:
        return TensorVerdict(name, False, "missing in the candidate")
    difference = None
    if (left.shape, left.dtype) == (right.shape, right.dtype):
        pairs = zip(owner.blocks(name), other.blocks(name), strict=True)
        difference = measure(pairs, euler=rule is not None and rule.mode == "euler")
    return _judge(left, right, difference, rule, limits)


def _judge(
    left: TensorEntry,
    right: TensorEntry,
    difference: Difference | None,
    rule: Rule | None,
    limits: Limits,
) -> TensorVerdict:
    reason = _structure_fault(left, right, rule)
    if reason or difference is None or rule is None:
        return TensorVerdict(
            left.name, False, reason, rule.mode if rule else "", left.dtype, left.shape
        )
    max_abs, relative = rule.bounds(limits)
    reason = _number_fault(difference, rule, max_abs, relative, left.shape)
    index = tuple(int(i) for i in np.unravel_index(difference.worst, left.shape))
    measured = difference.bad_reference is None and difference.bad_candidate is None
    return TensorVerdict(
        name=left.name,
        passed=not reason,
        reason=reason,
        mode=rule.mode,
        dtype=left.dtype,
        shape=left.shape,
        max_abs=difference.max_abs if measured else None,
        max_abs_limit=max_abs,
        relative_l2=difference.relative_l2 if measured else None,
        relative_l2_limit=relative,
        worst=(index, *difference.worst_values) if measured else None,
    )


def _structure_fault(left: TensorEntry, right: TensorEntry, rule: Rule | None) -> str:
    if rule is None:
        return "no rule"
    if left.shape != right.shape:
        return f"shape {list(right.shape)} instead of {list(left.shape)}"
    if left.dtype != right.dtype:
        return f"type {right.dtype} instead of {left.dtype}"
    if left.size == 0:
        return "empty"
    return ""


def _number_fault(
    difference: Difference, rule: Rule, max_abs: float, relative: float, shape: tuple[int, ...]
) -> str:
    for side, index in (
        ("reference", difference.bad_reference),
        ("candidate", difference.bad_candidate),
    ):
        if index is not None:
            where = [int(i) for i in np.unravel_index(index, shape)]
            return f"not finite in the {side} at {where}"
    if rule.mode == "exact" and max_abs == 0.0:
        return "" if difference.equal else f"differs in bytes, by up to {difference.max_abs:.6g}"
    if not difference.max_abs <= max_abs:
        return f"largest difference {difference.max_abs:.6g} exceeds {max_abs:.6g}"
    judged = difference.reference_norm > rule.zero_reference_floor
    if judged and not difference.relative_l2 <= relative:
        return f"relative L2 {difference.relative_l2:.6g} exceeds {relative:.6g}"
    return ""


def _identify(path: Path) -> FileIdentity:
    with open_source(path) as opened:
        return _identity(opened)


def _identity(opened: OpenedFile) -> FileIdentity:
    """The identity of a file that was read through this descriptor."""
    sha256 = hash_file(opened.source).sha256
    opened.assert_unchanged()
    return FileIdentity(display_name(opened.path), opened.size, sha256)
