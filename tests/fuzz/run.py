"""Runs a fuzz target under atheris: python tests/fuzz/run.py TARGET [libFuzzer's arguments].

The kept inputs of tests/fuzz/corpus/TARGET are the seeds; give another folder first to collect new
ones there.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def main() -> None:
    """Fuzzes until an input fails or an argument ends it."""
    target, arguments = sys.argv[1], sys.argv[2:]
    sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent), str(_HERE)]
    # By name, since the fuzzer is in no environment that type checkers see.
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["sam3d_gguf"]):
        module = importlib.import_module(f"fuzz_{target}")
    atheris.Setup([sys.argv[0], *arguments, str(_HERE / "corpus" / target)], module.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
