"""Variable-length attention on the two-phase kernels: packed documents, one after another, in [T, H, D] tensors.

``plan`` bounds every table from what the host knows, ``tables`` fills them on the device from ``cu_seqlens``,
``kernels`` are the score and value phases that read them, ``run`` launches a call.
"""

from .plan import DoesNotFitError
from .run import backward, forward

__all__ = ["DoesNotFitError", "backward", "forward"]
