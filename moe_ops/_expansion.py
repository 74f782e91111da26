"""What Dynamo sees of a layer: one call, which AOTAutograd opens into the operators of its stages.

Dynamo goes through every instruction of the Python that it traces. A layer's stages, their records and the checks in a
caller's names are 2,700 of the 3,800 of a block. An operator made of other operators ("CompositeImplicitAutograd" in
PyTorch's words) is one call there, and Python itself runs what it is made of, once when Dynamo tries it and once when
AOTAutograd traces it. The graph behind autograd is the same.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_ops import _compat, _library, errors, records

Op = Callable[[Any], Any]


def define_expansions(arguments: type, *, stages: Op, halves: Op) -> Callable[[Any, str], Any]:
    """Registers the overloads `stages` and `halves` of the operator that takes `arguments`: what these functions call.

    Returns what runs the one or the other of them for `emit`: halves where a backward follows, unless that says which.
    In `torch.vmap`, where such an overload would be a loop, and in programs that are exported, which would have to know
    it, the function itself is traced.
    """
    run_stages = _expansion(arguments, "stages", stages)
    run_halves = _expansion(arguments, "halves", halves)

    def run(args: Any, emit: str) -> Any:
        keeps_gate_up = emit == "halves" or (emit == "auto" and _library.has_backward(args))
        return run_halves(args) if keeps_gate_up else run_stages(args)

    return run


def _expansion(arguments: type, overload: str, function: Op) -> Op:
    def expand(args: Any) -> Any:
        with _compat.tracing():  # as if Dynamo traced it: a size may be guarded to be what another one is
            return function(args)

    expanded, flatten = _library.define_composite(arguments, overload, expand), records.flattener(arguments)

    def run(args: Any) -> Any:
        if not torch.compiler.is_compiling() or _compat.is_exporting() or _compat.is_in_vmap():
            return function(args)
        return errors.invoke(expanded, *flatten(args))

    return run
