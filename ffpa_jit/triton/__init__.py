"""The Triton backend: `backend` has its verbs, `dense` runs a call, the rest are kernels and their arithmetic."""
