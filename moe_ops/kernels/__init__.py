"""Triton kernels and the launch plans ("programs") around them. Needs triton; imported only by CUDA code paths.

One module per stage: its `@triton.jit` kernels, a cached `<op>_program(...)` that turns tensor metadata into a
`program.Program`, and `launch(...)`, which runs it. Nothing here queries a GPU at import time, and every kernel
also runs on CPU tensors under TRITON_INTERPRET=1.
"""
