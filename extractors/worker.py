"""The reader that runs in the sandbox: a legacy file in, safetensors and a report out.

Arguments: `inspect`, `check` (the checksums of all storages too), or `extract MODEL`. It writes
`report.json`, and `error.json` when it refuses the file; with `extract` also the product files of
the model. These files, see `output_files`, must be there already: it can make none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.checkpoint import check_storages, read_archive
from sam3d_gguf.extractors.direct_io import StreamWriter, open_direct
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.materialize import iter_blocks, upcast
from sam3d_gguf.extractors.products import (
    Product,
    ProductTensor,
    SourceTensor,
    plan_products,
    product_files,
)
from sam3d_gguf.extractors.safetensors_format import SafetensorsSpec, canonical_header
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE
from sam3d_gguf.extractors.worker_report import ERROR, REPORT, encode
from sam3d_gguf.schemas.errors import Sam3dError
from sam3d_gguf.schemas.strict_json import dumps

REFUSED = 3
_BLOCK_BYTES = 16 << 20
_NAME = "the file"


def main(source_fd: int, output: str, arguments: list[str]) -> int:
    """Read the file behind `source_fd`; what is written is named in the module's docstring.

    Returns:
        0, or `REFUSED` with `error.json` written.
    """
    folder = Path(output)
    task, *models = arguments
    try:
        source = ByteSource(source_fd, _NAME)
        archive = read_archive(source, _limits(source))
        # Before the products: where these find no space, the report says how much they need.
        overwrite(folder / REPORT, dumps(encode(archive)))
        if task == "check":
            check_storages(source, archive)
        elif task == "extract":
            _extract(source, archive, models[0], folder)
    except Sam3dError as error:
        fields = {name: getattr(error, name) for name in ("what", "where", "expected", "action")}
        overwrite(folder / ERROR, dumps(fields))
        return REFUSED
    return 0


def output_files(arguments: Sequence[str]) -> tuple[str, ...]:
    """The names of the files that a worker with these arguments may write."""
    task, *models = arguments
    return (REPORT, ERROR, *(product_files(models[0]) if task == "extract" else ()))


def overwrite(path: Path, data: bytes) -> None:
    """Replace the content of a file that is there."""
    fd = _open(path)
    try:
        _write_all(fd, memoryview(data))
    finally:
        os.close(fd)


def largest_product(source_bytes: int) -> int:
    """Upper bound on the bytes of the product files of a source of that size.

    BF16 doubles, and storages may be shared by a few tensors; what needs more is no model.
    """
    return 4 * source_bytes + (64 << 20)


def _limits(source: ByteSource) -> Limits:
    return Limits(tensor_bytes=largest_product(source.size))


def _extract(source: ByteSource, archive: Archive, model: str, folder: Path) -> None:
    tensors = [SourceTensor(t.name, t.dtype, t.shape) for t in archive.tensors.values()]
    with _Beside(lambda: check_storages(source, archive)):
        for product in plan_products(model, tensors):
            _write(source, archive, product, folder)


def _write(source: ByteSource, archive: Archive, product: Product, folder: Path) -> None:
    specs = [SafetensorsSpec(t.name, t.dtype, t.shape) for t in product.tensors]
    header, _ = canonical_header(specs)
    blocks = _Blocks(source, archive)
    path = folder / product.file
    fd = _open(path)
    try:
        with StreamWriter(fd, open_direct(str(path), os.O_WRONLY)) as writer:
            writer.write_at(0, memoryview(header))
            position = len(header)
            for data in (data for tensor in product.tensors for data in blocks.of(tensor)):
                writer.write_at(position, data)
                position += len(data)
            writer.flush()
    finally:
        os.close(fd)


class _Blocks:
    """Widens blocks into memory that is used again for the next one."""

    def __init__(self, source: ByteSource, archive: Archive) -> None:
        self._source = source
        self._archive = archive
        self._read = [memoryview(bytearray(_BLOCK_BYTES))]
        self._wide = np.empty(_BLOCK_BYTES // 2, np.float32)

    def of(self, tensor: ProductTensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes in its product."""
        if tensor.source is None:
            yield memoryview(bytes(tensor.elements * ITEMSIZE[tensor.dtype]))
            return
        ref = self._archive.tensors[tensor.source.name]
        for block in iter_blocks(self._source, ref, _BLOCK_BYTES, self._read):
            if tensor.dtype != ref.dtype:
                block = upcast(block, ref.dtype, self._wide)
            yield block.view(np.uint8).data


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_TRUNC)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


@dataclass(slots=True)
class _Beside:
    """Runs a check on a thread; its refusal is raised at the end of the `with` block."""

    check: Callable[[], None]
    error: Exception | None = None
    thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.check()
        except Exception as error:  # noqa: BLE001 - raised again by the main thread
            self.error = error
