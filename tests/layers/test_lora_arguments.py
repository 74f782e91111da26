"""Adapters that are none, or do not fit: what is wrong is named before anything is written."""

import pytest
import torch

from layers import ExpertLora, FusedMoE, LowRank, MoEConfig, join_gate_up

E, H, I, R = 4, 6, 5, 2


def matrices(rows, columns, rank=R) -> LowRank:
    return LowRank(torch.randn(E, rank, columns), torch.randn(E, rows, rank))


GATE_UP, DOWN, UP = matrices(2 * I, H), matrices(H, I), matrices(I, H)
LOADED = {
    "adapter='first': expected an int, got str": {"adapter": "first"},
    "adapter=True: expected an int, got bool": {"adapter": True},
    "adapter=-1: expected at least 0": {"adapter": -1},
    "scaling='half': expected a number, got str": {"scaling": "half"},
    r"scaling has shape \[3\] on cpu: expected one number": {"scaling": torch.ones(3)},
    r"scaling has shape \[\] on meta: expected one number": {"scaling": torch.ones((), device="meta")},
    "gate_up=None: expected LowRank": {"gate_up": None},
    "down=<tuple>: expected LowRank, got tuple": {"down": tuple(DOWN)},
    r"gate_up.a has shape \[4\]: expected \[E, r, A\]": {"gate_up": GATE_UP._replace(a=torch.ones(E))},
    "down.b=None: expected a torch.Tensor": {"down": DOWN._replace(b=None)},
    "down.a has dtype torch.int8: expected a floating": {"down": DOWN._replace(a=DOWN.a.to(torch.int8))},
    "gate_up is on the meta device: expected": {"gate_up": GATE_UP._replace(b=GATE_UP.b.to("meta"))},
}


@pytest.mark.parametrize("message", LOADED)
def test_an_adapter_that_cannot_be_loaded(message):
    layer = FusedMoE(MoEConfig(E, 2, H, I))
    lora = ExpertLora(layer, 2, R, torch.zeros(3, dtype=torch.int32))
    before = {name: each.clone() for name, each in lora.state_dict().items()}
    given = {"adapter": 0, "gate_up": GATE_UP, "down": DOWN, "scaling": 2.0, **LOADED[message]}
    with pytest.raises((TypeError, ValueError), match=message):
        lora.load_adapter(**given)
    for name, each in lora.state_dict().items():
        assert torch.equal(each, before[name])


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (None, UP, "gate=None: expected LowRank"),
        (UP, None, "up=None: expected LowRank"),
        (UP, UP._replace(a=UP.a[0]), r"up.a has shape \[2, 6\]"),
        (UP._replace(b=matrices(I, H, 1).b), matrices(I, H, 3), r"gate.b has shape \[4, 5, 1\]: expected"),
        (UP, UP._replace(a=UP.a[1:]), r"up.a has shape \[3, 2, 6\]: expected \[4, 2, 6\]"),
        (UP, matrices(I, H + 1), r"up.a has shape \[4, 2, 7\]: expected \[4, 2, 6\]"),
        (UP, matrices(I + 1, H), r"up.b has shape \[4, 6, 2\]: expected \[4, 5, 2\]"),
    ],
)
def test_gate_and_up_that_do_not_fit(gate, up, message):
    """Of ranks that differ between `a` and `b` of both, sums may be equal."""
    with pytest.raises((TypeError, ValueError), match=message):
        join_gate_up(gate, up)


@pytest.mark.parametrize("num_adapters", [1, 2])
def test_adapters_of_another_dtype_than_tokens(num_adapters):
    layer = FusedMoE(MoEConfig(E, 2, H, I), dtype=torch.bfloat16)
    ids = torch.zeros(3, dtype=torch.int32)
    layer.lora = ExpertLora(layer, num_adapters, R, ids, dtype=torch.float32)
    hidden, logits = torch.randn(3, H, dtype=torch.bfloat16), torch.randn(3, E)
    expected = "lora has dtype torch.float32: expected torch.bfloat16, the dtype of hidden_states"
    with pytest.raises(TypeError, match=expected):
        layer(hidden, logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(hidden, logits).sum().backward()
    assert layer.lora.b2.grad.dtype == torch.float32
    assert layer.lora.b2.grad.any()
