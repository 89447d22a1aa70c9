"""Refusals of the GGML layer."""

from __future__ import annotations

from sam3d_gguf.schemas.errors import Sam3dError


class BackendError(Sam3dError):
    """A library, device, operation or amount of memory that is not there."""


class CancelledError(Sam3dError):
    """The caller cancelled the run between two stages."""
