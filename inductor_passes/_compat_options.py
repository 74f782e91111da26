"""What is private of Inductor's options, beside `_compat.py`. Tested on torch 2.11 to 2.14."""

from typing import Any

import torch
import torch._inductor.config as inductor_config


def mode_table() -> dict[str, dict[str, Any]]:
    """`torch.compile` modes and the Inductor options each stands for."""
    return torch._inductor.list_mode_options()  # type: ignore[return-value]


def inductor_option_names() -> frozenset[str]:
    """Names that `torch.compile(options=...)` takes."""
    return frozenset(torch._inductor.list_options())


def times_products() -> bool:
    """Whether the compile that is running is asked to choose products by time, as mode "max-autotune" does."""
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)
