"""The two CUDA platforms."""
