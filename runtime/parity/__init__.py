"""Compare a capture with a reference under rules that were declared beforehand.

>>> from pathlib import Path
>>> from sam3d_gguf.runtime.parity import compare, load_rules
>>> report = compare(  # doctest: +SKIP
...     [Path("expected.safetensors")], Path("taps.safetensors"), load_rules(Path("rules.json"))
... )
>>> report.passed  # doctest: +SKIP
True
"""

from sam3d_gguf.runtime.parity.compare import compare, compare_arrays
from sam3d_gguf.runtime.parity.report import ParityReport, TensorVerdict
from sam3d_gguf.runtime.parity.rules import Limits, Rule, Rules, load_rules, parse_rules

__all__ = [
    "Limits",
    "ParityReport",
    "Rule",
    "Rules",
    "TensorVerdict",
    "compare",
    "compare_arrays",
    "load_rules",
    "parse_rules",
]
