"""A parity report as one HTML page without scripts: the error of every stage against its limit."""

from __future__ import annotations

import math
from html import escape

from sam3d_gguf.runtime.parity.report import ParityReport, TensorVerdict

_WIDTH, _HEIGHT, _MARGIN = 1100, 320, 60
_DECADES = (-7, 2)
"""Shown range of error / limit, powers of ten."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1150px; color: #222;
  background: #fff; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left; }
.fail { color: #b00020; font-weight: 600; }
.pass { color: #1b6e3c; }
svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: #444; }
code { overflow-wrap: anywhere; }
"""


def render(report: ParityReport) -> bytes:
    """The page, UTF-8."""
    failed = report.failed
    verdict = "pass" if report.passed else "fail"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>Parity: {verdict}</title><style>{_STYLE}</style>",
        f"<h1>Parity: <span class='{verdict}'>{verdict}</span></h1>",
        f"<p>{len(report.tensors) - len(failed)} tensors passed, {len(failed)} failed.</p>",
        f"<p>Limits: {escape(report.limits)}.</p>",
    ]
    if failed:
        parts.append(
            f"<p>First failing stage: <code>{escape(failed[0].name)}</code>, "
            f"{escape(failed[0].reason)}.</p>"
        )
    parts += [_plot(report), _files(report), _table(report)]
    return "\n".join(parts).encode()


def error_ratio(verdict: TensorVerdict) -> float | None:
    """The larger of error / limit over the two measures; None where nothing was measured."""
    pairs = (
        (verdict.max_abs, verdict.max_abs_limit),
        (verdict.relative_l2, verdict.relative_l2_limit),
    )
    if verdict.max_abs is None:
        return None
    ratios = [
        0.0 if error == 0 else math.inf if limit == 0 else error / limit
        for error, limit in pairs
        if error is not None and limit is not None
    ]
    if verdict.passed:
        ratios = [min(ratio, 1.0) for ratio in ratios]
    return max(ratios, default=0.0)


def _height(ratio: float) -> float:
    low, high = _DECADES
    power = low if ratio <= 0 else min(max(math.log10(ratio), low), high)
    return _HEIGHT - _MARGIN / 2 - (power - low) / (high - low) * (_HEIGHT - _MARGIN)


def _plot(report: ParityReport) -> str:
    step = (_WIDTH - 2 * _MARGIN) / max(1, len(report.tensors))
    marks: list[str] = []
    for power in range(_DECADES[0], _DECADES[1] + 1):
        y = _height(10.0**power)
        color = "#b00020" if power == 0 else "#e4e4e4"
        marks.append(
            f"<line x1='{_MARGIN}' x2='{_WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='{color}'/>"
        )
        label = {0: "limit", _DECADES[0]: f"≤ 1e{power}"}.get(power, f"1e{power}")
        marks.append(f"<text x='{_MARGIN - 8}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>")
    for index, verdict in enumerate(report.tensors):
        ratio = error_ratio(verdict)
        x, y = _MARGIN + (index + 0.5) * step, _height(math.inf if ratio is None else ratio)
        color = "#1b6e3c" if verdict.passed else "#b00020"
        title = escape(f"{verdict.name}: {verdict.reason or 'pass'}")
        marks.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{color}'><title>{title}</title>"
            "</circle>"
        )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' "
        "aria-label='error over limit by stage, in the order of execution'>"
        f"{''.join(marks)}</svg><p>Error over limit by stage, in the order of the rules; above the "
        "red line a tensor fails.</p>"
    )


def _files(report: ParityReport) -> str:
    rows = [("reference", item) for item in report.references]
    rows.append(("candidate", report.candidate))
    if report.rules is not None:
        rows.append(("rules", report.rules))
    lines = [
        f"<tr><td>{role}</td><td>{escape(item.name)}</td><td>{item.nbytes:,}</td>"
        f"<td><code>{item.sha256}</code></td></tr>"
        for role, item in rows
    ]
    head = "<tr><th>file</th><th>name</th><th>bytes</th><th>SHA-256</th></tr>"
    return f"<h2>Files</h2><table>{head}{''.join(lines)}</table>"


def _table(report: ParityReport) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("tensor", "max abs", "limit", "relative L2", "limit", "verdict")
    )
    rows = "".join(_row(verdict) for verdict in report.tensors)
    return f"<h2>Tensors</h2><table><tr>{head}</tr>{rows}</table>"


def _row(verdict: TensorVerdict) -> str:
    numbers = (
        verdict.max_abs,
        verdict.max_abs_limit,
        verdict.relative_l2,
        verdict.relative_l2_limit,
    )
    cells = "".join(f"<td>{'' if value is None else f'{value:.3g}'}</td>" for value in numbers)
    kind = "pass" if verdict.passed else "fail"
    text = verdict.reason or "pass"
    if verdict.reason and verdict.worst is not None:
        index, reference, candidate = verdict.worst
        text += f" at {list(index)}: {candidate:.8g} instead of {reference:.8g}"
    return (
        f"<tr><td><code>{escape(verdict.name)}</code></td>{cells}"
        f"<td class='{kind}'>{escape(text)}</td></tr>"
    )
