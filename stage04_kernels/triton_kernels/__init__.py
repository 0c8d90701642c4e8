"""The kernels in Triton: one source each, which runs on a GPU and, number by number, under Triton's interpreter on any machine.

Triton decides between the two when a kernel is decorated, so `TRITON_INTERPRET=1` must be set in the environment before a module
of this package is imported; `stage04_kernels.attention.resolve_backend("triton-interpret")` takes care of it.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import stage04_kernels.triton_kernels.quick_interpreter  # noqa: F401 - for its effect
