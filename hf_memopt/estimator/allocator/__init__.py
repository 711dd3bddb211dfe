"""A model of CUDA's caching allocator."""
