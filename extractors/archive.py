"""What the readers of legacy checkpoints return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sam3d_gguf.extractors.kinds import FileKind
from sam3d_gguf.extractors.object_tree import Content, Json, ObjectTree, Sparse
from sam3d_gguf.extractors.pickle_machine import Pickle
from sam3d_gguf.extractors.printable import printable
from sam3d_gguf.extractors.survey import Excluded, Inert, Survey
from sam3d_gguf.extractors.tensor_ref import TensorRef
from sam3d_gguf.extractors.zip_directory import ZipMember


@dataclass(frozen=True, slots=True)
class Archive:
    """A legacy checkpoint as data: its tensors by reference, and a report of all else in it.

    Attributes:
        kind: its form.
        wrapper: where its tensors hang: "flat", "state_dict", "model", or "module" (TorchScript).
        root: the root folder of its zip members; empty in the legacy form.
        version: torch's number of the form.
        tensors: by name, in file order.
        constants: tensors that a TorchScript archive's code refers to, named `CONSTANTS.c0` on.
        sparse: the COO tensors among `tensors`.
        shared: names of the tensors that view one storage, for each such storage.
        attributes: plain values of a TorchScript module, by attribute path; of a checkpoint, the
            `model_config` beside its state dict.
        content: what else the state dict, its wrapper or the module hold.
        excluded: tensors that are not part of the state dict or module.
        inert: calls that the pickles ask for and that have no meaning here; never made.
        globals: every global that the pickles name; never resolved.
        code: SHA-256 of each code member's bytes; never interpreted.
        ignored: other members, or storages that no tensor views.
        members: the zip directory; empty in the legacy form.
    """

    kind: FileKind
    wrapper: str
    root: str
    version: str
    tensors: Mapping[str, TensorRef]
    constants: Mapping[str, TensorRef]
    sparse: tuple[Sparse, ...]
    shared: tuple[tuple[str, ...], ...]
    attributes: Mapping[str, Json]
    content: tuple[Content, ...]
    excluded: tuple[Excluded, ...]
    inert: tuple[Inert, ...]
    globals: tuple[str, ...]
    code: Mapping[str, str]
    ignored: tuple[str, ...]
    members: Mapping[str, ZipMember]


def build_archive(
    kind: FileKind,
    wrapper: str,
    tree: ObjectTree,
    survey: Survey,
    pickles: tuple[Pickle, ...],
    *,
    version: str,
    ignored: tuple[str, ...],
    root: str = "",
    code: Mapping[str, str] | None = None,
    members: Mapping[str, ZipMember] | None = None,
) -> Archive:
    """Put the findings of the walks together; the arguments are as in `Archive`."""
    return Archive(
        kind=kind,
        wrapper=wrapper,
        root=root,
        version=version,
        tensors=tree.tensors,
        constants=tree.constants,
        sparse=tuple(tree.sparse),
        shared=tree.shared(),
        attributes=tree.attributes,
        content=tuple(tree.content),
        excluded=(*tree.excluded, *survey.excluded),
        inert=tuple(survey.inert.values()),
        globals=tuple(
            dict.fromkeys(printable(str(name)) for one in pickles for name in one.globals)
        ),
        code=code or {},
        ignored=ignored,
        members=members or {},
    )
