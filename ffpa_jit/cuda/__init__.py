"""The CUDA backend: one kernel instantiation compiled on first use, kept in the cache, loaded and launched."""
