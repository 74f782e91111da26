"""The `torch.compile` backend "moe_inductor": Inductor with our passes.

Found through the `torch_dynamo_backends` entry point, so `torch.compile(model, backend="moe_inductor")` needs no
import of this package.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inductor_passes import _compat
from inductor_passes.options import options as _options


def moe_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a Dynamo graph.

    Args:
        gm, example_inputs: from Dynamo.
        mode, options: as given to `torch.compile`; also the result of `inductor_passes.options()`.

    Returns:
        The compiled callable.

    Raises:
        ValueError: an unknown mode or option.
    """
    return _compat.compile_fx(gm, example_inputs, config_patches=_options(mode, **(options or {})))
