"""Arguments of operators are declared once: what schemas, gradients and vmap make of a declaration."""

from typing import Annotated, NamedTuple

import expecttest
import pytest
import torch

from moe_ops import arguments, records
from moe_ops._library import OPERATORS
from tests.counting import Calls
from tests.ops.samples import samples

RECORDS = list(OPERATORS)
of_every_operator = pytest.mark.parametrize("record", RECORDS, ids=records.operator_name)


class TestSchemas(expecttest.TestCase):
    def test_fusion_targets(self):
        names = ("FusedMoe", "FusedExperts", "GatherGemm", "ActGemmCombine", "GatherGemmAct", "GemmCombine")
        fused = [getattr(arguments, name) for name in names]
        self.assertExpectedInline(
            "\n".join(map(_short_schema, fused)),
            """\
fused_moe: hidden_states router_logits w13 w2 correction_bias? w13_bias? w13_up? w13_up_bias? w2_bias? expert_map? routing activation
fused_experts: hidden_states w13 w2 topk_weights topk_ids w13_bias? w13_up? w13_up_bias? w2_bias? expert_map? shared? shared_gate? residual? activation
gather_gemm: hidden_states w13 sorted_slots expert_offsets w13_bias? w13_up? w13_up_bias?
act_gemm_combine: gate_up w2 expert_offsets topk_weights sorted_slots inverse w2_bias? shared? shared_gate? residual? activation
gather_gemm_act: hidden_states w13 sorted_slots expert_offsets w13_bias? w13_up? w13_up_bias? activation
gemm_combine: x w2 expert_offsets topk_weights inverse w2_bias? shared? shared_gate? residual?""",  # noqa: E501
        )


def _short_schema(record):
    schema = OPERATORS[record].overload._schema
    names = (f"{each.name}{'?' * ('Optional' in str(each.type))}" for each in schema.arguments)
    return f"{schema.name.removeprefix('moe::')}: {' '.join(names)}"


@of_every_operator
def test_a_record_comes_apart_and_together(record):
    leaves = tuple(range(len(records.leaves(record))))
    whole = records.builder(record)(*leaves)
    assert type(whole) is record and records.flatten(whole) == leaves
    names = [argument.name for argument in OPERATORS[record].overload._schema.arguments]
    assert list(records.named(whole).items()) == list(zip(names, leaves, strict=True))
    tens = records.transform(lambda leaf: 10 * leaf, whole)
    assert records.flatten(records.transform(lambda a, b: a - b, tens, whole)) == tuple(
        9 * leaf for leaf in leaves
    )


@of_every_operator
def test_what_is_declared_differentiable_has_a_gradient_and_nothing_else(record):
    name = records.operator_name(record)
    for sample in samples()[name]:
        given = [leaf.clone().double().requires_grad_() if _floats(leaf) else leaf for leaf in sample]
        given = [torch.float64 if leaf is torch.float32 else leaf for leaf in given]
        outputs = OPERATORS[record].overload(*given)
        outputs = [
            out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.requires_grad
        ]
        declared = {leaf.name for leaf in records.leaves(record) if leaf.is_differentiable}
        tensors = {
            leaf.name: value
            for leaf, value in zip(records.leaves(record), given, strict=True)
            if _floats(value)
        }
        if not outputs:
            assert not declared
            continue
        grads = torch.autograd.grad([out.sum() for out in outputs], list(tensors.values()), allow_unused=True)
        assert {
            name for name, grad in zip(tensors, grads, strict=True) if grad is not None
        } == declared & set(tensors)


def test_a_role_belongs_to_a_leaf():
    class Misplaced(NamedTuple):
        experts: Annotated[arguments.ExpertWeights, records.Role.CONSTANT]

    with pytest.raises(TypeError, match=r"Misplaced.experts has roles .*CONSTANT"):
        records.leaves(Misplaced)


def _floats(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def test_a_value_names_its_leaves_after_the_field_that_holds_it():
    assert records.names(arguments.ExpertWeights) == (
        *("w13", "w2"),
        *("w13_bias", "w13_up", "w13_up_bias", "w2_bias"),
    )
    assert records.names(arguments.GroupedGemm) == ("x", "weight", "expert_offsets", "bias", "up", "up_bias")


OVER_TOKENS = {
    "topk_routing": ["router_logits"],
    "topk_routing_backward": ["grad_weights", "router_logits", "topk_weights", "topk_ids"],
    "gated_activation": ["gate_up"],
    "gated_activation_backward": ["grad", "gate_up"],
    "weighted_activation_backward": ["grad", "gate_up", "scale"],
    "fused_experts": ["hidden_states", "topk_weights", "topk_ids", "shared"],
    "fused_experts_formula": ["hidden_states", "topk_weights", "topk_ids", "shared"],
    "fused_moe": ["hidden_states", "router_logits"],
    "fused_moe_formula": ["hidden_states", "router_logits"],
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, each) for name in OVER_TOKENS for each in OVER_TOKENS[name]]
)
def test_arguments_per_token_join_the_tokens_of_a_batch(name, argument):
    """Whichever of them is batched: one call, and what a call for each element gives."""
    operator = getattr(torch.ops.moe, name).default
    given = [leaf.detach() if _floats(leaf) else leaf for leaf in samples()[name][0]]
    index = records.names(records.RECORDS[name]).index(argument)
    batch = torch.stack([given[index], given[index].flip(0)])

    def call(element):
        return operator(*given[:index], element, *given[index + 1 :])

    with Calls(f"moe.{name}") as calls:
        together = torch.func.vmap(call)(batch)
    assert calls.total == 1
    for ours, each in zip(
        _tuple(together), zip(*(_tuple(call(element)) for element in batch), strict=True), strict=True
    ):
        torch.testing.assert_close(ours, torch.stack(each))


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)
