"""Parameters of quantised experts: what loaders ask of them, and what is refused before anything runs."""

from functools import partial

import pytest
import torch

from layers import (
    ExpertLora,
    FusedMoE,
    MoEBlock,
    MoEConfig,
    MoERunner,
    WeightScale,
    add_weight_scales,
    quantise_experts,
)
from layers.config import SharedExpertConfig

H, I, E = 16, 12, 4


def _experts():
    return FusedMoE(MoEConfig(E, 2, H, I))


def test_quantised_parameters_keep_what_loaders_ask_of_them():
    """As vLLM's loops over the parameters of a model do, which ask scales too."""
    experts, given = _experts(), _experts()
    quantise_experts(given, WeightScale.CHANNEL)
    for parameter in experts.parameters():
        parameter.weight_loader = experts.weight_loader
    experts.w2_weight.tag = "kept"
    quantise_experts(experts, WeightScale.CHANNEL)
    assert experts.w2_weight.tag == "kept" and not hasattr(experts.w13_weight, "tag")
    for name, parameter in experts.named_parameters():
        tensor = getattr(given, name)
        for expert in range(E):
            each = tensor[expert]
            if name.startswith("w13"):
                for shard, rows in (("w1", slice(0, I)), ("w3", slice(I, 2 * I))):
                    parameter.weight_loader(parameter, each[rows], name, shard, expert)
            else:
                parameter.weight_loader(parameter, each, name, "w2", expert)
    assert all(
        torch.equal(each.float(), getattr(given, name).float()) for name, each in experts.named_parameters()
    )
    assert experts.w13_weight_scale.quant_method == "channel"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, None, "float32"], ids=str)
def test_scales_of_other_dtypes_are_refused_at_once(dtype):
    experts = _experts()
    with pytest.raises(TypeError, match=r"dtype=.*: expected a floating point dtype of 16 bits or more"):
        add_weight_scales(experts, WeightScale.CHANNEL, dtype=dtype)
    assert experts.quantisation is None and not hasattr(experts, "w13_weight_scale")


def test_a_block_that_overlaps_is_not_quantised():
    """It was refused by the first forward."""
    block = MoEBlock(MoEConfig(E, 2, H, I, shared_experts=SharedExpertConfig(8, overlap=True)))
    for quantise in (quantise_experts, add_weight_scales):
        with pytest.raises(
            ValueError, match=r"shared_experts.overlap=True with quantised experts: expected False"
        ):
            quantise(block.experts, WeightScale.CHANNEL)
    assert block.experts.quantisation is None and block(torch.randn(3, H)).isfinite().all()


def with_adapters(experts: FusedMoE) -> None:
    experts.lora = ExpertLora(experts, 1, 2, torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("change", [partial(quantise_experts, kind=WeightScale.CHANNEL), with_adapters])
def test_nothing_runs_beside_experts_that_are_not_one_operator(change):
    block = MoEBlock(MoEConfig(E, 2, H, I, shared_experts=SharedExpertConfig(8)))
    change(block.experts)
    with pytest.raises(
        ValueError, match="shared_order='beside' lora or quantised experts: expected 'before' or 'after'"
    ):
        MoERunner(block.experts, shared_experts=block.shared_experts, shared_order="beside")
    assert MoERunner(block.experts, shared_experts=block.shared_experts).experts is block.experts
