"""What a block that is to be rebuilt does in 16 bits, as twins in them show: its gate may be in, or give, float32."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import loops, trial
from layers.huggingface.loops import StackedBlock


def settled(how: StackedBlock, twin: Any, ours: Any, tokens: Tensor) -> StackedBlock | None:
    """How a block computes in all dtypes; None where ours would not run in those that its own code runs in."""
    gate = getattr(twin, how.gate)
    widens = tuple(_widening(twin, tokens))
    ours.moe_ops_stacked = replace(how, widens=widens, product_dtype=_product_dtype(gate, twin, tokens))
    kinds = zip(_twins(twin, gate), _twins(ours, getattr(ours, how.gate)), strict=True)
    runs = all(_output(own, tokens) is None or _output(our, tokens) is not None for own, our in kinds)
    return ours.moe_ops_stacked if runs else None


def _widening(twin: Any, tokens: Tensor) -> Iterator[bool]:
    """Modes in which 16 bits give float32: weights of a router may be, and sums are often meant to be."""
    for is_training in (False, True):
        output = _output(trial.cast(twin, torch.bfloat16).train(is_training), tokens)
        if output is not None and output.dtype == torch.float32:
            yield is_training


def _product_dtype(gate: Any, twin: Any, tokens: Tensor) -> torch.dtype | None:
    """In which a block multiplies with the weight of a linear gate; None is that of the weight.

    Called, such a gate takes tokens of its weight's dtype alone: a block that runs with a weight of either has cast it.
    """
    if type(gate).forward is not nn.Linear.forward:
        return None
    outputs = [_output(each, tokens) for each in _twins(twin, gate)]
    return None if any(each is None for each in outputs) else torch.float32


def _twins(twin: Any, gate: Any) -> tuple[Any, Any]:
    """In bfloat16, and beside a gate in float32."""
    all_16, but_gate = trial.cast(twin, torch.bfloat16), trial.cast(twin, torch.bfloat16)
    (name,) = (name for name, each in twin.named_children() if each is gate)
    setattr(but_gate, name, trial.cast(gate, torch.float32))
    return all_16.eval(), but_gate.eval()


def _output(twin: Any, tokens: Tensor) -> Tensor | None:
    """Of its own code, or ours; None where it does not run, and need not be like anything."""
    forward = loops.forward if hasattr(twin, "moe_ops_stacked") else type(twin).forward
    try:
        returned = forward(twin, tokens.bfloat16())
    except Exception:
        return None
    return returned[0] if isinstance(returned, tuple) else returned
