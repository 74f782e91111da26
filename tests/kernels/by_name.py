"""Launch plans and launches of operators by name, their arguments flat as in the schema or by name."""

from typing import Any

import moe_ops  # noqa: F401  # registers the operators
from moe_ops import records
from moe_ops.kernels import plans
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Filled, Launch, Program, Ref


def record(operator: str, *leaves: Any, **named: Any) -> Any:
    """The arguments of `operator`; what is not given is None."""
    kind = records.RECORDS[operator]
    given = dict(zip(records.names(kind), leaves, strict=False)) | named
    values = [given.pop(name, None) for name in records.names(kind)]
    assert not given, f"{operator} takes no {list(given)}"
    return records.builder(kind)(*(getattr(value, "spec", value) for value in values))


def launch(operator: str, *leaves: Any, **named: Any) -> Any:
    """What the kernels of `operator` return."""
    return plans.launch(record(operator, *leaves, **named))


def launches_of(filled: Filled) -> list[Launch]:
    """What is launched, as a `Program` says it."""
    launches = []
    for step in filled.steps:
        args = list(step.template)
        for place, name in step.refs:
            args[place] = Ref(name)
        for place, descriptor in step.descriptors:
            args[place] = descriptor
        named = dict(zip(step.kernel.arg_names, args, strict=True))
        launches.append(Launch(step.kernel, step.grid, named, step.num_warps, step.num_stages))
    return launches


def program_of(operator: str, *leaves: Any, gpu: Gpu | None = None, **named: Any) -> Program:
    """The launch plan of `operator`."""
    return plans.program(record(operator, *leaves, **named), gpu)
