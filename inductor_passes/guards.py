"""Guards that compiled code need not check at every call.

Dynamo guards each name that it looked up while tracing, those of this library's own modules too: a patched layer has
266 guards where a stock one has 107. All are checked before every call, in memory that the call before has pushed out
of the cache.
"""

import re
from collections.abc import Sequence
from typing import Any

from inductor_passes import _compat, _compat_options

_OF_OURS = re.compile(r"__import_(moe_ops|layers_dot_huggingface)(_dot_|')")


def trust_library(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards to keep: all but those on names in `moe_ops` and `layers.huggingface`.

    What these modules hold is set when they are imported and does not change, unless somebody replaces their functions,
    as a test would. Guards on tensors, sizes, modules and the user's own globals stay.

        torch.compile(model, options=inductor_passes.options() | {"guard_filter_fn": inductor_passes.trust_library})

    Args:
        guards: from Dynamo.

    Returns:
        One boolean for each.

    Example:
        >>> options = {"guard_filter_fn": inductor_passes.trust_library}
    """
    return [_OF_OURS.search(guard.name) is None for guard in guards]


def kept_guards(guards: Sequence[Any]) -> list[bool]:
    """What `options()` keeps: as `trust_library`, and as torch of what `aot_compile` writes to a file."""
    if _compat.compile_id() is None:  # torch asks behind the compile
        return [_compat_options.can_be_written(guard) for guard in guards]
    return trust_library(guards)
