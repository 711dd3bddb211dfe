"""Models of torch's allocators: CUDA's, which ROCm and XPU share, and MPS's."""
