"""What a public function looks at before its operator does: the messages are the same, and nothing is broadcast."""

import pytest
import torch

import moe_ops
from moe_ops import RoutingConfig
from tests.bad_inputs import E, H, T, good


def weighed_on_input(**changes):
    """A right call of `fused_experts` that weighs the input, but for `changes`."""
    layer = {name: good()[name] for name in ("hidden_states", "w13", "w2")}
    routed = {"topk_weights": torch.rand(T, 1), "topk_ids": torch.zeros(T, 1, dtype=torch.int32)}
    return moe_ops.fused_experts(**{**layer, **routed, **changes}, apply_router_weight_on_input=True)


def stages(**changes):
    return moe_ops.fused_moe(**{**good(), **changes}, emit="stages")


SCALAR = torch.tensor(1.0)
CALLS = {
    "vector weighed": (lambda: weighed_on_input(hidden_states=torch.randn(H)), ValueError,
        r"hidden_states has shape \[8\]: expected \[T, H\]"),
    "one row weighed": (lambda: weighed_on_input(hidden_states=torch.randn(1, H)), ValueError,
        r"topk_ids has shape \[4, 1\]: expected \[1, K\]"),
    "three dimensions weighed": (lambda: weighed_on_input(hidden_states=torch.randn(2, T, H)), ValueError,
        r"hidden_states has shape \[2, 4, 8\]: expected \[T, H\]"),
    "list weighed": (lambda: weighed_on_input(hidden_states=[1.0]), TypeError,
        "hidden_states=<list>: expected a torch.Tensor"),
    "one weight for all": (lambda: weighed_on_input(topk_weights=torch.rand(1, 1)), ValueError,
        r"topk_weights has shape \[1, 1\]: expected \[4, 1\]"),
    "no weights": (lambda: weighed_on_input(topk_weights=None), TypeError,
        "topk_weights=None: expected a torch.Tensor"),
    "complex weights": (lambda: weighed_on_input(topk_weights=torch.rand(T, 1) + 0j), TypeError,
        "topk_weights has dtype torch.complex64: expected a floating point dtype"),
    "no ids": (lambda: weighed_on_input(topk_ids=None), TypeError, "topk_ids=None: expected a torch.Tensor"),
    "no w13": (lambda: stages(w13=None), TypeError, "w13=None: expected a torch.Tensor"),
    "scalar for w13": (lambda: stages(w13=SCALAR), ValueError, r"w13 has shape \[\]: expected \[E, 2I, H\]"),
    "number for a map": (lambda: stages(expert_map=3), TypeError, "expert_map=3: expected a torch.Tensor"),
    "scalar for a map": (lambda: stages(expert_map=SCALAR.int()), ValueError,
        r"expert_map has shape \[\]: expected \[E_global\]"),
    "logits beside shared": (lambda: stages(shared=torch.randn(T, H), router_logits=torch.randn(T + 1, E)), ValueError,
        r"router_logits has shape \[5, 6\]: expected \[4, 6\]"),
    "number per expert": (lambda: stages(per_expert=3), TypeError,
        "per_expert=3: expected a tuple or list of tensors"),
    "tensor per expert": (lambda: stages(per_expert=torch.rand(E)), TypeError,
        "per_expert=<Tensor>: expected a tuple or list"),
    "scalar logits": (lambda: moe_ops.routing_dispatch(SCALAR, RoutingConfig(1)), ValueError,
        r"router_logits has shape \[\]: expected \[T, E_global\]"),
    "slots of no tokens": (lambda: moe_ops.permute(torch.randn(0, 3), torch.arange(4).int()), ValueError,
        "sorted_slots has 4 rows: expected a multiple of the 0 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, compiled):
    call, error, message = CALLS[name]
    run = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
    with pytest.raises(Exception if compiled else error, match=message):
        run()


@pytest.mark.parametrize("emit", ["auto", "stages", "fused"])
def test_one_row_is_not_the_input_of_all(emit):
    with pytest.raises(ValueError, match="topk_ids has shape"):
        weighed_on_input(hidden_states=torch.randn(1, H), emit=emit)
