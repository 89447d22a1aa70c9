"""Model graphs on GGML, the geometry around them, exporters and parity."""
