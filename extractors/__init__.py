"""Static readers of legacy PyTorch files, the sandbox they run in, and the host's re-check."""
