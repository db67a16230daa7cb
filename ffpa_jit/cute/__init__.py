"""The CuTe-DSL backend: a Hopper forward, compiled on first use, kept in the cache, loaded and launched."""
