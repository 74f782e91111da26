"""What is private of the options of a compile, beside `_compat.py`. Tested on torch 2.11 to 2.14."""

from typing import Any, get_origin

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.guards import CheckFunctionManager


def mode_table() -> dict[str, dict[str, Any]]:
    """`torch.compile` modes and the Inductor options each stands for."""
    return torch._inductor.list_mode_options()  # type: ignore[return-value]


def inductor_option_names() -> frozenset[str]:
    """Names that `torch.compile(options=...)` takes."""
    return frozenset(torch._inductor.list_options())


def inductor_option_type(name: str) -> type:
    """What the value of an option has to be, as far as `torch.compile` checks it."""
    wanted = inductor_config.get_type(name)  # type: ignore[attr-defined]
    return wanted if get_origin(wanted) is None else object


def times_products() -> bool:
    """Whether the compile that is running is asked to choose products by time, as mode "max-autotune" does."""
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


def can_be_written(guard: Any) -> bool:
    """Whether a guard may be in a file, as `aot_compile` decides where it is given no filter."""
    return (
        not guard.is_global
        and guard.guard_type not in CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
    )
