"""Triton kernels and the launch plans ("programs") around them. Needs triton; imported only by CUDA code paths.

One module per stage: its `@triton.jit` kernels and a function `<op>_program(args, gpu)`, which turns the operator's
record of arguments, with metadata in the place of tensors, into a `program.Program`. `plans` finds, caches and runs
them. Nothing here queries a GPU at import time, and every kernel also runs on CPU tensors under TRITON_INTERPRET=1.
"""
