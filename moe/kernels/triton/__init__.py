"""Grouped-GEMM kernels in Triton: `backend.py` is the way in, the other modules are its parts."""
