"""The tensors that a conversion starts from: hashed, then read in blocks from the same descriptor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.convert.contract_types import TensorSpec
from sam3d_gguf.extractors.extract import Extracted, Located, extract, locate, reread
from sam3d_gguf.extractors.extraction import REPORT, ExtractedTensor, Extraction
from sam3d_gguf.extractors.files import OpenedFile, open_source
from sam3d_gguf.extractors.hashing import BLOCK_BYTES, hash_file
from sam3d_gguf.extractors.materialize import NUMPY_DTYPE
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.extractors.products import SourceTensor, plan_products, product_files
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.publication import PublicationSet
from sam3d_gguf.extractors.recheck import BlockRing, source_blocks
from sam3d_gguf.extractors.safetensors_format import SafetensorsFile, read_header
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.tensor_ref import TensorRef
from sam3d_gguf.schemas.documents import encode_document
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import load_file

# A block stays untouched while GgufWriter holds it (4 blocks) and two more are being made.
_BLOCKS_ALIVE = 6
_MAX_REPORT_BYTES = 64 << 20


class BlockReader(Protocol):
    """Reads tensors in blocks that stay untouched while five more are read."""

    def dtype(self, file: str, target: str) -> str:
        """The dtype, by its safetensors name, in which `blocks` yields a tensor."""
        ...

    def blocks(self, file: str, target: str) -> Iterator[NDArray[Any]]:
        """Yields the elements of a tensor, 1-D in C order.

        Args:
            file, target: the safetensors file and the tensor's name there.
        """
        ...

    def finish(self) -> None:
        """Checks that what was read is what was hashed.

        Raises:
            InputError: a file was changed meanwhile.
        """
        ...


class Products(Protocol):
    """An extraction, and the way to its tensors."""

    @property
    def extraction(self) -> Extraction:
        """The report."""
        ...

    def reader(self) -> BlockReader:
        """A reader of its tensors."""
        ...


def specs(products: Products) -> dict[str, TensorSpec]:
    """Source dtype and shape of every tensor, by its name in the source."""
    return {t.name: TensorSpec(t.source_dtype, t.shape) for t in products.extraction.tensors}


def small_array(products: Products, tensor: ExtractedTensor) -> NDArray[Any]:
    """Returns a small tensor whole, in the dtype that its reader yields."""
    reader = products.reader()
    blocks = [block.copy() for block in reader.blocks(tensor.file, tensor.target)]
    empty = np.empty(0, NUMPY_DTYPE[reader.dtype(tensor.file, tensor.target)])
    return np.concatenate([empty, *blocks]).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class FileProducts:
    """Safetensors files that lie on disk, open; `headers` are their checked headers."""

    extraction: Extraction
    files: Mapping[str, OpenedFile]
    headers: Mapping[str, SafetensorsFile]

    def reader(self) -> BlockReader:
        """See `Products.reader`."""
        return _FileReader(self)


@dataclass(frozen=True, slots=True)
class SourceProducts:
    """An extraction whose tensors are read from the legacy file itself.

    `files` are the safetensors, if they were written.
    """

    extraction: Extraction
    source: OpenedFile
    refs: Mapping[tuple[str, str], TensorRef]
    files: Mapping[str, OpenedFile]

    @classmethod
    def of(cls, found: Located | Extracted) -> SourceProducts:
        """Returns them, by the tensors' names in the safetensors."""
        tensors = found.extraction.tensors
        refs = {(t.file, t.target): found.refs[t.name] for t in tensors}
        if isinstance(found, Extracted):
            return cls(found.extraction, found.source, refs, found.files)
        return cls(found.extraction, found.source, refs, {})

    def publish(self, publications: PublicationSet, folder: Path) -> None:
        """Adds the safetensors and the report to what will appear; they were extracted to be kept."""
        for product in self.extraction.products:
            publications.adopt(self.files[product.file], folder / product.file, product.sha256)
        report = publications.create(folder / REPORT)
        report.write(encode_document(self.extraction.to_document(), "extraction"))
        report.seal()

    def reader(self) -> BlockReader:
        """See `Products.reader`."""
        return _SourceReader(self)


class _FileReader:
    def __init__(self, products: FileProducts) -> None:
        self._products = products
        self._ring = BlockRing(_BLOCKS_ALIVE)

    def dtype(self, file: str, target: str) -> str:
        """See `BlockReader.dtype`."""
        return self._products.headers[file].entries[target].dtype

    def blocks(self, file: str, target: str) -> Iterator[NDArray[Any]]:
        """See `BlockReader.blocks`."""
        header = self._products.headers[file]
        entry = header.entries[target]
        source = self._products.files[file].source
        for start in range(entry.begin, entry.end, BLOCK_BYTES):
            block = self._ring.take()[: min(BLOCK_BYTES, entry.end - start)]
            source.pread_into(header.data_start + start, block)
            yield np.frombuffer(block, NUMPY_DTYPE[entry.dtype])

    def finish(self) -> None:
        """See `BlockReader.finish`."""
        for file in self._products.files.values():
            file.assert_untouched()


class _SourceReader:
    def __init__(self, products: SourceProducts) -> None:
        self._products = products
        self._ring = BlockRing(_BLOCKS_ALIVE)
        self._added = {(t.file, t.target): t for t in products.extraction.added}

    def dtype(self, file: str, target: str) -> str:
        """See `BlockReader.dtype`."""
        added = self._added.get((file, target))
        return self._products.refs[file, target].dtype if added is None else added.dtype

    def blocks(self, file: str, target: str) -> Iterator[NDArray[Any]]:
        """See `BlockReader.blocks`."""
        added = self._added.get((file, target))
        if added is not None:
            yield np.zeros(math.prod(added.shape), NUMPY_DTYPE[added.dtype])
            return
        yield from source_blocks(
            self._products.source.source, self._products.refs[file, target], self._ring
        )

    def finish(self) -> None:
        """See `BlockReader.finish`."""
        self._products.source.assert_untouched()


@contextlib.contextmanager
def products_from_source(
    model: Model,
    path: Path,
    scratch: Path,
    *,
    sandbox: SandboxChoice | None = None,
    allow_unpinned: bool = False,
    progress: Progress = QUIET,
) -> Generator[SourceProducts]:
    """Locate the tensors of a legacy file; see `extractors.extract.locate`."""
    with locate(
        model,
        path,
        scratch,
        sandbox=sandbox,
        allow_unpinned=allow_unpinned,
        progress=progress,
    ) as found:
        yield SourceProducts.of(found)


@contextlib.contextmanager
def kept_products_from_source(
    model: Model,
    path: Path,
    scratch: Path,
    *,
    sandbox: SandboxChoice | None = None,
    allow_unpinned: bool = False,
    progress: Progress = QUIET,
) -> Generator[SourceProducts]:
    """Extract a legacy file to safetensors that `publish` takes; see `extractors.extract.extract`."""
    with extract(
        model,
        path,
        scratch,
        sandbox=sandbox,
        allow_unpinned=allow_unpinned,
        keep=True,
        progress=progress,
    ) as done:
        yield SourceProducts.of(done)


def read_report(model: Model, folder: Path) -> Extraction:
    """Read the report of an earlier extraction; the files that it names are not looked at.

    Raises:
        InputError: there is none, it is malformed, or of another model.
    """
    if not folder.is_dir():
        raise InputError(
            "this is no folder",
            where=str(folder),
            expected=f"a folder with {REPORT}, as sam3d-extract makes it",
        )
    document = load_file(folder / REPORT, schema="extraction", max_bytes=_MAX_REPORT_BYTES)
    stated = Extraction.from_document(document)
    if stated.model != model:
        raise InputError(
            f"this is an extraction of {stated.model}", where=str(folder / REPORT), expected=model
        )
    return stated


@contextlib.contextmanager
def products_from_folder(
    model: Model,
    folder: Path,
    *,
    source: Path | None = None,
    scratch: Path | None = None,
    sandbox: SandboxChoice | None = None,
    allow_unpinned: bool = False,
    progress: Progress = QUIET,
) -> Generator[FileProducts]:
    """Open what an earlier extraction left in a folder.

    It counts as pinned if every file is a published one, or if `source`, the pinned legacy file,
    is given: then it is read again in the sandbox and every byte is compared.

    Args:
        model: what the extraction must be of.
        folder: holds `extraction.json` and the files that it names.
        source: the legacy file.
        scratch: an empty private folder, needed with `source`.

    Raises:
        InputError: the report or a file is malformed, they don't belong together, or the extraction
            is not pinned and `allow_unpinned` is not set.
    """
    stated = read_report(model, folder)
    where = str(folder / REPORT)
    with contextlib.ExitStack() as stack:
        files = {n: stack.enter_context(open_source(folder / n)) for n in product_files(model)}
        headers = _headers(stated, files, where)
        _require_stated_files(stated, files, progress)
        if source is not None and scratch is not None:
            checked = reread(stated, source, scratch, files, sandbox=sandbox, progress=progress)
        else:
            checked = stated.with_origin_of_products()
        if checked.source.origin == "unpinned" and not allow_unpinned:
            raise InputError(
                "this extraction's files are not published ones",
                where=where,
                action="Give the official legacy file too, so that it is checked against that, "
                "or accept it with --allow-unpinned",
            )
        yield FileProducts(checked, files, headers)


def _headers(
    stated: Extraction, files: Mapping[str, OpenedFile], where: str
) -> dict[str, SafetensorsFile]:
    """The headers, which must be exactly those that the report's tensors give."""
    listed_files = [product.file for product in stated.products]
    if sorted(listed_files) != sorted(files):
        raise InputError(
            f"the report is of the files {', '.join(listed_files)}",
            where=where,
            expected=", ".join(files),
        )
    headers = {name: read_header(file.source) for name, file in files.items()}
    for product in stated.products:
        if product.tensors != len(headers[product.file].entries):
            raise InputError(f"the report miscounts the tensors of {product.file}", where=where)
    found = {
        (name, entry.name, entry.dtype, entry.shape)
        for name, header in headers.items()
        for entry in header.entries.values()
    }
    sources = [SourceTensor(t.name, t.source_dtype, t.shape) for t in stated.tensors]
    planned = {
        (product.file, t.name, t.dtype, t.shape)
        for product in plan_products(stated.model, sources)
        for t in product.tensors
    }
    listed = {(t.file, t.target, t.dtype, t.shape) for t in stated.tensors}
    listed |= {(t.file, t.target, t.dtype, t.shape) for t in stated.added}
    if not found == planned == listed or len(sources) + len(stated.added) != len(found):
        names = ", ".join(sorted(f"{row[0]}: {row[1]}" for row in found ^ planned ^ listed)[:8])
        raise InputError(f"the report and the files hold different tensors: {names}", where=where)
    if not all(header.is_canonical for header in headers.values()):
        raise InputError("a safetensors file is not in its canonical form", where=where)
    return headers


def _require_stated_files(
    stated: Extraction, files: Mapping[str, OpenedFile], progress: Progress
) -> None:
    progress.stage("Check the safetensors files", sum(file.size for file in files.values()))
    for product in stated.products:
        file = files[product.file]
        found = (file.size, hash_file(file.source, progress=progress.advance).sha256)
        if found != (product.bytes, product.sha256):
            raise InputError(
                f"the file has {found[0]} bytes and SHA-256 {found[1]}",
                where=str(file.path),
                expected=f"{product.bytes} bytes and {product.sha256}, as {REPORT} says",
            )
