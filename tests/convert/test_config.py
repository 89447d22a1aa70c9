"""The configuration reader takes the official file and the tiny one, and nothing ambiguous."""

from __future__ import annotations

import re
from pathlib import Path

import facts
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.convert.config import load_config, parse_yaml
from sam3d_gguf.schemas.errors import ContractError, InputError, Sam3dError

_TINY = (facts.TINY / "model_config.yaml").read_bytes()


def test_tiny_configuration() -> None:
    config = load_config(_TINY, "body-config", where="c")
    paths = ("IMAGE_SIZE.0", "IMAGE_SIZE.1", "DECODER.DIM", "DECODER.DEPTH", "DECODER.HEADS",
             "DECODER.DIM_HEAD", "DECODER.MLP_DIM")  # fmt: skip
    assert [config.integer(f"MODEL.{path}") for path in paths] == [128, 128, 48, 3, 4, 8, 56]
    assert config.values == yaml.safe_load(_TINY)
    for path in ("MODEL.NOTHING", "MODEL.IMAGE_SIZE.2", "MODEL.ENABLE_BODY", "MODEL.IMAGE_SIZE.x"):
        with pytest.raises(KeyError):
            config.integer(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TYPE: sam", "TYPE: other", "MODEL.DECODER.TYPE: .*other.*expected const sam"),
        ("dinov3_vith16plus", "dinov3_vitl16", "MODEL.BACKBONE.TYPE.*const dinov3_vith16plus"),
        ("REPEAT_PE: true", "REPEAT_PE: false", "MODEL.DECODER.REPEAT_PE.*const true"),
        ("REPEAT_PE: true", "REPEAT_PE: 1", "MODEL.DECODER.REPEAT_PE"),
        ("REPEAT_PE: true", "NEW_KEY: 1\n    REPEAT_PE: true", "MODEL.DECODER.NEW_KEY.*unknown"),
        ("    REPEAT_PE: true\n", "", "MODEL.DECODER.REPEAT_PE: the property is missing"),
        ("DIM: 48", "DIM: 0", "MODEL.DECODER.DIM: .*expected minimum 1"),
        ("DIM: 48", "DIM: 16385", "MODEL.DECODER.DIM: .*expected maximum 16384"),
        ("DIM: 48", "DIM: 48.0", "MODEL.DECODER.DIM: .*type integer"),
        ("DIM: 48", "DIM: '48'", "MODEL.DECODER.DIM: .*type integer"),
        ("DIM: 48", "DIM: true", "MODEL.DECODER.DIM: .*type integer"),
        ("DIM: 48", "DIM: .inf", "MODEL.DECODER.DIM"),
        ("DIM: 48", "DIM: 2024-01-01", "MODEL.DECODER.DIM"),
        ("- 0.485", "- 0.486", "MODEL.IMAGE_MEAN.0: .*const 0.485"),
        ("- 0.406", "- 0.406\n  - 0.5", "MODEL.IMAGE_MEAN"),
        ("- 128\n  - 128", "- 128", "MODEL.IMAGE_SIZE"),
        ("HAND: 10", "HAND: 9", "MODEL.CAMERA_HEAD.DEFAULT_SCALE_FACTOR_HAND.*const 10"),
        ("FP16_TYPE: bfloat16", "FP16_TYPE: float16", "TRAIN.FP16_TYPE.*const bfloat16"),
        ("ENABLE_HAND: true", "ENABLE_HAND: false", "MODEL.ENABLE_HAND.*const true"),
    ],
)
def test_unsupported_values_are_named(old: str, new: str, message: str) -> None:
    text = _TINY.decode()
    assert old in text
    with pytest.raises(ContractError, match=message):
        load_config(text.replace(old, new, 1).encode(), "body-config", where="c")


def test_every_fixed_value_is_fixed() -> None:
    """Changing any scalar of the file is either a dimension or a refusal."""
    lines = _TINY.decode().splitlines()
    free = ("  - 128", "    DIM: 48", "    DEPTH:", "    HEADS:", "    MLP_DIM:", "    DIM_HEAD:")
    for i, line in enumerate(lines):
        value = re.search(r"(?:: |- )(\S+)$", line)
        if value is None or line.startswith(free):
            continue
        changed = line[: value.start(1)] + {"true": "false", "false": "true"}.get(value[1], "7")
        text = "\n".join([*lines[:i], changed, *lines[i + 1 :]])
        with pytest.raises(ContractError):
            load_config(text.encode(), "body-config", where="c")


def test_all_faults_are_listed() -> None:
    text = _TINY.decode().replace("TYPE: sam", "TYPE: x").replace("FP16: true", "FP16: false")
    with pytest.raises(ContractError) as caught:
        load_config(text.encode(), "body-config", where="c")
    assert "MODEL.DECODER.TYPE" in str(caught.value) and "TRAIN.USE_FP16" in str(caught.value)


def test_keys_are_escaped() -> None:
    with pytest.raises(ContractError) as caught:
        load_config(b'"a\\n\\nmanifest: good\\e[2J": 1', "body-config", where="c")
    assert r"a\n\nmanifest: good\x1b[2J: the property is unknown" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x 1\nb: *x", "anchors"),
        ("a: &x 1", "anchors"),
        ("a: !!python/object/apply:os.system ['true']", "tags"),
        ("a: !!str 1", "tags"),
        ("!x a: 1", "tags"),
        ("a: 1\na: 2", "twice"),
        ("x: {b: 1, b: 2}", "twice"),
        ("<<: {a: 1}", "not a plain string"),
        ("1: a", "not a plain string"),
        ("true: a", "not a plain string"),
        ("[a]: b", "not a plain string"),
        ("? {a: 1}\n: b", "not a plain string"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: [", "plain YAML"),
        ("a: \x00", "plain YAML"),
        ("a: 2024-99-99", "plain YAML"),
        ("[" * 17 + "]" * 17, "nesting"),
        ("x: " + "9" * 5000, "plain YAML"),
        ("x: " + "9" * 4000, "too large"),
        ("x: -0x" + "f" * 60000, "too large"),
        ("x: 0b" + "1" * 65, "too large"),
    ],
)
def test_ambiguous_yaml_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_yaml(text.encode(), where="c")


def test_size_and_encoding() -> None:
    with pytest.raises(InputError, match="too long"):
        parse_yaml(b" " * 65537, where="c")
    with pytest.raises(InputError, match="plain YAML"):
        parse_yaml(b"a: \xff", where="c")
    with pytest.raises(ContractError, match="document"):
        load_config(b"", "body-config", where="c")


def test_no_code_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for text in (
        f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{mark}]]",
        f"!!python/object/new:os.system ['touch {mark}']",
        f"!!python/name:os.system\n- touch {mark}",
    ):
        with pytest.raises(InputError):
            parse_yaml(text.encode(), where="c")
    assert not mark.exists()


@given(st.text(alphabet="ab: -[]{}&*!<>|?,\n'\"#%0.", max_size=40) | st.text(max_size=30))
def test_any_text_is_a_value_or_a_refusal(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    try:
        value = parse_yaml(data, where="c")
    except Sam3dError:
        return
    assert repr(value) == repr(yaml.safe_load(data))
