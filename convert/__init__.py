"""Contracts to plans to GGUF, and the proof of the result."""
