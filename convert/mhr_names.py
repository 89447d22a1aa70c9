"""The names and the schedule that an MHR archive keeps as plain list attributes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sam3d_gguf.convert.binding import BoundContract
from sam3d_gguf.convert.products import Products, small_array
from sam3d_gguf.convert.rules import Parents, make_checkers, prefix_schedule
from sam3d_gguf.extractors.object_tree import Json
from sam3d_gguf.schemas.errors import ContractError

# Where pymomentum's classes keep them (pymomentum/torch/character.py).
PARENTS = "character_torch.skeleton.joint_parents"
JOINT_NAMES = "character_torch.skeleton.joint_names"
PARAMETER_NAMES = "character_torch.parameter_transform.parameter_names"
PREFIX_SIZES = "character_torch.skeleton._pmi_buffer_sizes"
_NAME = re.compile(r"[!-+\--~]{1,128}")  # printable ASCII without space and comma


@dataclass(frozen=True, slots=True)
class MhrNames:
    """Names of joints [J] and model parameters [PARAMETERS], and the prefix schedule's group sizes.

    `numbered` says for which of them the archive has no names, so that they are numbers.
    """

    joints: tuple[str, ...]
    parameters: tuple[str, ...]
    prefix_sizes: tuple[int, ...]
    numbered: tuple[str, ...]


def read_names(products: Products, bound: BoundContract) -> MhrNames:
    """Take names from the archive's list attributes, or number them where it has none.

    Raises:
        ContractError: a pinned archive has none; or they are of another count, repeat, or have
            characters that names don't have; or the prefix sizes are not those of the hierarchy.
    """
    extraction = products.extraction
    pinned = extraction.source.origin == "pinned"
    names: dict[str, tuple[str, ...]] = {}
    numbered: list[str] = []
    for what, path, count in (
        ("joint", JOINT_NAMES, bound.dims["J"]),
        ("parameter", PARAMETER_NAMES, bound.dims["PARAMETERS"]),
    ):
        found = _find(extraction.attributes, path)
        if found is not None:
            names[what] = _checked(found, count, f"{what}_names")
            continue
        if pinned:
            raise ContractError(f"the archive has no {what}_names", where=extraction.source.name)
        numbered.append(f"{what}_names")
        names[what] = numbers(f"{what}_names", count)
    return MhrNames(names["joint"], names["parameter"], _prefix_sizes(products), tuple(numbered))


def numbers(what: str, count: int) -> tuple[str, ...]:
    """The names that stand for a list, "joint_names" or "parameter_names", that there is not."""
    return tuple(f"{what.removesuffix('_names')}_{number:03}" for number in range(count))


def absent_lists(attributes: Mapping[str, Json]) -> tuple[str, ...]:
    """The lists of names that an archive does not have: "joint_names", "parameter_names"."""
    paths = {"joint_names": JOINT_NAMES, "parameter_names": PARAMETER_NAMES}
    return tuple(what for what, path in paths.items() if _find(attributes, path) is None)


def numbered_lists(joints: tuple[str, ...], parameters: tuple[str, ...]) -> tuple[str, ...]:
    """Which of two lists of names are mere numbers: "joint_names", "parameter_names"."""
    lists = {"joint_names": joints, "parameter_names": parameters}
    return tuple(what for what, found in lists.items() if found == numbers(what, len(found)))


def _find(attributes: Mapping[str, Json], path: str) -> Json:
    """The value of an attribute; where its path has none, of all those of its last name."""
    if path in attributes:
        return attributes[path]
    name = path.split(".")[-1]
    found = [value for other, value in attributes.items() if other.split(".")[-1] == name]
    if any(value != found[0] for value in found):
        raise ContractError(f"the archive has different attributes {name}", expected=path)
    return found[0] if found else None


def _checked(value: Json, count: int, what: str) -> tuple[str, ...]:
    names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
    good = all(_NAME.fullmatch(name) for name in names) and len(set(names)) == len(names)
    if len(names) != count or not isinstance(value, list) or len(value) != count or not good:
        raise ContractError(
            f"the attribute {what} does not name {count} things",
            expected=f"{count} different names of printable ASCII without spaces and commas",
        )
    return tuple(names)


def _prefix_sizes(products: Products) -> tuple[int, ...]:
    parents = small_array(products, products.extraction.by_name[PARENTS])
    (checker,) = make_checkers([Parents()], parents.shape, PARENTS)
    checker.feed(parents)
    checker.finish()
    stated = _find(products.extraction.attributes, PREFIX_SIZES)
    _, sizes = prefix_schedule(parents)
    if stated is not None and stated != list(sizes):
        raise ContractError(
            "the attribute _pmi_buffer_sizes is not what the joint parents give",
            expected=",".join(map(str, sizes)),
        )
    return sizes
