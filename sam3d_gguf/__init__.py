"""Turn SAM 3D Body, SAM 3D Objects and MHR releases into GGUF files that can be verified."""

__version__ = "0.1.0"
