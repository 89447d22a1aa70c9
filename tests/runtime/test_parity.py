"""The parity checker finds every kind of difference, and only those."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from typer.testing import CliRunner

from sam3d_gguf.cli.parity import app
from sam3d_gguf.runtime.parity import ParityReport, compare, parse_rules
from sam3d_gguf.runtime.parity.html import error_ratio, render
from sam3d_gguf.runtime.tensor_files import TensorFile, write_tensors
from sam3d_gguf.schemas.documents import validate
from sam3d_gguf.schemas.errors import InputError, OutputError
from sam3d_gguf.schemas.strict_json import loads

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-body-a"
Arrays = dict[str, NDArray[Any]]


def rules_text(*rules: dict[str, Any]) -> bytes:
    return json.dumps({"schema_version": 1, "tensors": list(rules)}).encode()


def float_rule(name: str, max_abs: float = 0.1, relative: float = 0.1, **more: Any) -> Any:
    return {"name": name, "mode": "float", "max_abs": max_abs, "relative_l2": relative, **more}


def judge(
    tmp_path: Path, reference: Arrays, candidate: Arrays, *rules: dict[str, Any], **more: Any
) -> ParityReport:
    save_file(reference, tmp_path / "reference.safetensors")
    save_file(candidate, tmp_path / "candidate.safetensors")
    return compare(
        [tmp_path / "reference.safetensors"],
        tmp_path / "candidate.safetensors",
        parse_rules(rules_text(*rules), where="rules"),
        **more,
    )


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("reference", "candidate", "reason"),
    [
        (f32(1, 2), f32(1, 2.05), ""),
        (f32(1, 2), f32(1, 2.2), "largest difference 0.2 exceeds 0.1"),
        (f32(0.1, 0.1), f32(0.1, 0.15), "relative L2 0.353553 exceeds 0.1"),
        (f32(1, 2), f32(1, 2).reshape(1, 2), "shape [1, 2] instead of [2]"),
        (f32(1, 2), f32(1, 2).astype(np.float16), "type F16 instead of F32"),
        (f32(1, 2), f32(1, np.nan), "not finite in the candidate at [1]"),
        (f32(np.inf, 2), f32(np.inf, 2), "not finite in the reference at [0]"),
        (f32(), f32(), "empty"),
    ],
)
def test_float_mode(
    tmp_path: Path, reference: NDArray[Any], candidate: NDArray[Any], reason: str
) -> None:
    report = judge(tmp_path, {"a": reference}, {"a": candidate}, float_rule("a"))
    assert report.tensors[0].reason == reason
    assert report.passed == (not reason)


def test_zero_reference_is_judged_by_max_abs_alone(tmp_path: Path) -> None:
    rule = float_rule("a", zero_reference_floor=1e-6)
    assert judge(tmp_path, {"a": f32(1e-7, 0)}, {"a": f32(0, 0.05)}, rule).passed
    assert not judge(tmp_path, {"a": f32(1e-7, 0)}, {"a": f32(0, 0.05)}, float_rule("a")).passed


def test_exact_mode_compares_bytes(tmp_path: Path) -> None:
    rule = {"name": "a", "mode": "exact"}
    assert judge(tmp_path, {"a": f32(1)}, {"a": f32(1)}, rule).passed
    assert not judge(tmp_path, {"a": f32(0.0)}, {"a": f32(-0.0)}, rule).passed
    huge = np.array([2**62], np.int64)
    assert not judge(tmp_path, {"a": huge}, {"a": huge + 1}, rule).passed


def test_euler_mode_measures_sines_and_cosines(tmp_path: Path) -> None:
    turn = {"name": "a", "mode": "euler", "max_abs": 7.0, "relative_l2": 1e-5}
    full_turn = f32(0.5 + 2 * np.pi)
    assert judge(tmp_path, {"a": f32(0.5)}, {"a": full_turn}, turn).passed
    assert not judge(tmp_path, {"a": f32(0.5)}, {"a": full_turn}, {**turn, "max_abs": 1.0}).passed
    assert not judge(tmp_path, {"a": f32(0.5)}, {"a": f32(0.6)}, turn).passed


def test_missing_unexpected_and_unruled_tensors_fail(tmp_path: Path) -> None:
    report = judge(
        tmp_path,
        {"a": f32(1), "b": f32(1)},
        {"b": f32(1), "d": f32(1)},
        float_rule("a"),
        float_rule("c"),
    )
    reasons = {verdict.name: verdict.reason for verdict in report.tensors}
    assert reasons == {
        "a": "missing in the candidate",
        "b": "no rule",
        "c": "missing in the reference",
        "d": "not in any reference",
    }


def test_a_rule_of_another_reference_file_is_not_missed(tmp_path: Path) -> None:
    rules = (float_rule("a"), float_rule("z", file="other.safetensors"))
    assert judge(tmp_path, {"a": f32(1)}, {"a": f32(1)}, *rules).passed


def test_first_matching_rule_decides_and_orders_the_report(tmp_path: Path) -> None:
    arrays: Arrays = {"a.x": f32(1), "b.x": f32(1)}
    moved: Arrays = {"a.x": f32(1.05), "b.x": f32(1.05)}
    report = judge(tmp_path, arrays, moved, float_rule("b.*", 0.01), float_rule("*.x"))
    assert [verdict.name for verdict in report.tensors] == ["b.x", "a.x"]
    assert [verdict.passed for verdict in report.tensors] == [False, True]


def test_free_running_limits(tmp_path: Path) -> None:
    rules = (
        float_rule("a", 0.01, 0.01, free_running_max_abs=1.0, free_running_relative_l2=1.0),
        {"name": "b", "mode": "exact", "free_running_max_abs": 4.0},
    )
    pixels = np.array([10, 20], np.uint8)
    reference: Arrays = {"a": f32(1), "b": pixels}
    candidate: Arrays = {"a": f32(1.5), "b": pixels + 4}
    assert len(judge(tmp_path, reference, candidate, *rules).failed) == 2
    assert judge(tmp_path, reference, candidate, *rules, limits="free-running").passed
    candidate["b"] = pixels + 5
    failed = judge(tmp_path, reference, candidate, *rules, limits="free-running").failed
    assert [verdict.name for verdict in failed] == ["b"]


def test_worst_element_beyond_the_first_block(tmp_path: Path) -> None:
    large = np.zeros((3, 1 << 20), np.float32)
    moved = large.copy()
    moved[2, 5] = 3
    report = judge(tmp_path, {"a": large}, {"a": moved}, float_rule("a"))
    assert report.tensors[0].worst == ((2, 5), 0.0, 3.0)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"schema_version": 2, "tensors": []}',
        rules_text({"name": "a", "mode": "close"}),
        rules_text({"name": "a", "mode": "float", "max_abs": 1}),
        rules_text(float_rule("a", -1.0)),
        rules_text(float_rule("a", limit=1)),
        rules_text(float_rule("a"), float_rule("a")),
        b'{"schema_version": 1, "tensors": [{"name": "a", "mode": "float", "max_abs": NaN}]}',
        b'{"schema_version": 1, "schema_version": 1, "tensors": []}',
    ],
)
def test_bad_rules_are_refused(text: bytes) -> None:
    with pytest.raises(InputError):
        parse_rules(text, where="rules")


def test_command_reports_and_exits(tmp_path: Path) -> None:
    reference = TINY / "expected.safetensors"
    arguments = ["--reference", str(reference), "--rules", str(TINY / "rules.json")]
    good = [*arguments, "--candidate", str(reference), "--report", str(tmp_path / "report.json")]
    assert CliRunner().invoke(app, good).exit_code == 0
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert (report["verdict"], report["passed"], report["failed"]) == ("pass", 140, 0)
    assert len(report["files"]["candidate"]["sha256"]) == 64
    assert CliRunner().invoke(app, good).exit_code == 2
    with TensorFile(reference) as file:
        arrays = {name: file.read(name) for name in file.tensors}
    arrays["01.body.064.head.layer00.pred_cam_t"][0, 2] += 1
    write_tensors(tmp_path / "moved.safetensors", arrays)
    moved = [*arguments, "--candidate", str(tmp_path / "moved.safetensors"), "--json"]
    result = CliRunner().invoke(app, moved)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["first_failing"] == "01.body.064.head.layer00.pred_cam_t"
    assert CliRunner().invoke(app, [*arguments, "--candidate", "absent"]).exit_code == 2


def test_report_meets_its_schema_and_page_escapes_names(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    arrays: Arrays = {name: f32(1, 2), "b": f32(3), "c": f32(0)}
    moved: Arrays = {name: f32(1, 9), "b": f32(3), "c": f32(1)}
    rules = (float_rule(name), float_rule("b"), {"name": "c", "mode": "exact"})
    report = judge(tmp_path, arrays, moved, *rules)
    validate(loads(report.dumps(), where="report"), "parity-report", where="report")
    page = render(report).decode()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<circle") == 3
    assert [error_ratio(verdict) for verdict in report.tensors] == [
        pytest.approx(70.0),
        0.0,
        float("inf"),
    ]


def test_command_writes_a_page_and_a_table(tmp_path: Path) -> None:
    reference = str(TINY / "mhr-cases.safetensors")
    page = tmp_path / "report.html"
    arguments = ["--reference", reference, "--candidate", reference]
    arguments += ["--rules", str(TINY / "rules.json"), "--html", str(page)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0
    assert "70 passed, 0 failed" in found.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_written_tensors_are_what_safetensors_reads(tmp_path: Path) -> None:
    arrays: Arrays = {"b": f32(1, 2), "a": np.array([[1], [2]], np.int64), "c": f32()}
    path = tmp_path / "out.safetensors"
    write_tensors(path, arrays, {"units": "metre"})
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, arrays[name])
    with TensorFile(path) as file:
        assert file.metadata == {"units": "metre"}
        assert file.read("c").shape == (0,)
    with pytest.raises(OutputError):
        write_tensors(path, arrays)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_cut_files_are_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes((TINY / "mhr-cases.safetensors").read_bytes()[:cut])
    with pytest.raises(InputError):
        TensorFile(path)


def test_sums_that_overflow_fail(tmp_path: Path) -> None:
    """inf / inf is no small relative error."""
    far = {"a": np.array([1e200, 0.0])}
    other = {"a": np.array([0.0, 1e200])}
    verdict = judge(tmp_path, far, other, float_rule("a", 1e300, 0.5)).tensors[0]
    assert not verdict.passed
    validate(
        loads(judge(tmp_path, far, other, float_rule("a")).dumps(), where="report"),
        "parity-report",
        where="report",
    )


def test_large_integers_differ_by_one(tmp_path: Path) -> None:
    large = np.array([2**62, -(2**62)], np.int64)
    report = judge(
        tmp_path, {"a": large}, {"a": large + np.array([1, 0])}, float_rule("a", 0.5, 1.0)
    )
    assert report.tensors[0].reason == "largest difference 1 exceeds 0.5"
    low, high = np.array([-(2**63)], np.int64), np.array([2**63 - 1], np.int64)
    wide = judge(tmp_path, {"a": low}, {"a": high}, float_rule("a", 0.5, 9.0))
    assert wide.tensors[0].max_abs == 2.0**64


def test_rules_decide_in_their_order_whether_names_or_patterns() -> None:
    rules = parse_rules(
        rules_text(*(float_rule(name) for name in ("a.b", "a.*", "a.c", "*", "z"))), where="rules"
    )
    found = {name: rules.find(name) for name in ("a.b", "a.c", "z", "q")}
    assert {name: rule and rule[0] for name, rule in found.items()} == {
        "a.b": 0,
        "a.c": 1,
        "z": 3,
        "q": 3,
    }
    assert parse_rules(rules_text(float_rule("a")), where="rules").find("b") is None


def test_patterns_that_backtrack_end_soon(tmp_path: Path) -> None:
    arrays: Arrays = {"a" * 4000: f32(1)}
    rules = [float_rule("*a" * 300 + f"b{n}") for n in range(20)]
    started = time.monotonic()
    assert judge(tmp_path, arrays, arrays, *rules).tensors[0].reason == "no rule"
    assert time.monotonic() - started < 20


def test_names_that_no_report_can_hold(tmp_path: Path) -> None:
    save_file({"a" * 4097: f32(1)}, tmp_path / "long.safetensors")
    with pytest.raises(InputError, match="4097 characters"):
        TensorFile(tmp_path / "long.safetensors")
    odd = tmp_path / os.fsdecode(b"\xff.safetensors")
    save_file({"a": f32(1)}, odd)
    rules = parse_rules(rules_text(float_rule("a")), where="rules")
    report = compare([odd], odd, rules)
    assert report.candidate.name == "\ufffd.safetensors"
    assert b"\\ufffd" in report.dumps()
    assert "\ufffd.safetensors" in render(report).decode()


def test_reports_are_not_written_over_anything(tmp_path: Path) -> None:
    reference = str(TINY / "mhr-cases.safetensors")
    arguments = ["--reference", reference, "--candidate", reference]
    arguments += ["--rules", str(TINY / "rules.json"), "--report", str(tmp_path / "r")]
    same = CliRunner().invoke(app, [*arguments, "--html", f"{tmp_path}/./r"])
    assert "two outputs have the same path" in same.stderr
    missing = CliRunner().invoke(app, [*arguments, "--html", str(tmp_path / "no" / "page")])
    assert "the folder doesn't exist" in missing.stderr
    assert (same.exit_code, missing.exit_code) == (2, 2)
    assert list(tmp_path.iterdir()) == []


def test_several_references_are_judged_together(tmp_path: Path) -> None:
    names = ("mhr-cases.safetensors", "head-cases.safetensors", "expected.safetensors")
    arrays: Arrays = {}
    arguments = ["--rules", str(TINY / "rules.json"), "--json"]
    for name in names:
        arguments += ["--reference", str(TINY / name)]
        arrays |= load_file(TINY / name)
    save_file(arrays, tmp_path / "all.safetensors")
    arguments += ["--candidate", str(tmp_path / "all.safetensors")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.stdout[-500:]
    report = json.loads(found.stdout)
    assert report["passed"] == len(arrays)
    hashes = [hashlib.sha256((TINY / name).read_bytes()).hexdigest() for name in names]
    assert [file["sha256"] for file in report["files"]["references"]] == hashes
    rules_hash = hashlib.sha256((TINY / "rules.json").read_bytes()).hexdigest()
    assert report["files"]["rules"]["sha256"] == rules_hash
