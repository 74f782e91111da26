"""`load_state_dict` of stacked experts, against the list of modules that they were: nn.Module's own loading."""

import copy

import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import nn

from layers import huggingface
from tests.coverage.cases import stock_model
from tests.huggingface.loops import EXPERTS, HIDDEN, INTER, Loop, block
from tests.huggingface.test_stacking import hidden, stacked

NAME = "experts.3.w1.weight"
CHANGES = {
    "nothing": lambda state: None,
    "transposed": lambda state: state.update({NAME: state[NAME].t().contiguous()}),
    "other shape": lambda state: state.update({NAME: torch.zeros(3, HIDDEN)}),
    "no tensor": lambda state: state.update({NAME: 3}),
    "one missing": lambda state: state.pop(NAME),
    "all missing": lambda state: [state.pop(name) for name in list(state) if "experts" in name],
    "unexpected expert": lambda state: state.update({"experts.9.w1.weight": torch.zeros(1)}),
    "unexpected weight": lambda state: state.update({"experts.3.w1.weights": torch.zeros(1)}),
    "names of ours": lambda state: state.update({"experts.down_proj": torch.zeros(EXPERTS, HIDDEN, INTER)}),
}


def other_state():
    module = block(Loop)
    return {name: value * 2 for name, value in module.state_dict().items()}


def loaded(module, state, **options):
    """What it answers, or its error."""
    try:
        return module.load_state_dict(dict(state), **options)
    except RuntimeError as error:
        return str(error)


def equal_states(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_as_modules_do(change, strict, assign):
    own, ours, state = block(Loop), stacked(Loop), other_state()
    CHANGES[change](state)
    options = {"strict": strict, "assign": assign}
    assert loaded(ours, state, **options) == loaded(own, state, **options)
    assert equal_states(ours.state_dict(), own.state_dict())
    torch.testing.assert_close(ours(hidden())[0], own(hidden())[0], rtol=1e-4, atol=1e-4)
    assert {each.numel() for each in ours.experts.moe_ops_before[0].parameters()} == {0}


def test_what_is_loaded_goes_into_the_parameters():
    """An optimiser has them."""
    ours = stacked(Loop)
    before = dict(ours.named_parameters())
    ours.load_state_dict(other_state())
    assert all(before[name] is each for name, each in ours.named_parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_assigned_weights_keep_dtype_and_device(device):
    ours = stacked(Loop).requires_grad_(False).to(device)
    state = {name: nn.Parameter(value.double()) for name, value in other_state().items()}
    given = copy.deepcopy(state)
    ours.load_state_dict(state, assign=True)
    kinds = {(each.dtype, each.device.type, each.requires_grad) for each in ours.parameters()}
    assert kinds == {(torch.float64, "cpu", False)}
    assert equal_states(ours.state_dict(), given)
    ours.load_state_dict({name: torch.zeros_like(value) for name, value in given.items()})
    assert all(torch.equal(state[name], given[name]) for name in given if "experts" in name)


@pytest.mark.parametrize(
    ("device", "dtype", "kinds"),
    [
        ("meta", torch.float32, "torch.float32 on cpu and torch.float32 on meta"),
        ("cpu", torch.float64, "torch.float32 on cpu and torch.float64 on cpu"),
    ],
)
def test_some_weights_of_another_kind_cannot_be_assigned(device, dtype, kinds):
    """The others are in the same tensor."""
    ours = stacked(Loop).to(device)
    before = ours.experts.gate_up_proj
    error = f"experts.gate_up_proj has parts in {kinds}: expected one dtype and device"
    with pytest.raises(RuntimeError, match=error):
        ours.load_state_dict({NAME: torch.zeros(INTER, HIDDEN, dtype=dtype)}, strict=False, assign=True)
    ours.load_state_dict({"gate.weight": ours.gate.weight}, strict=False, assign=True)
    assert ours.experts.gate_up_proj is before


def test_adapters_are_loaded_beside_the_experts():
    ours = stacked(Loop)
    adapters = huggingface.add_adapters(ours, 1, 4, torch.zeros(18, dtype=torch.int32))
    state = {name: torch.full_like(value, 0.5) for name, value in ours.state_dict().items()}
    assert str(ours.load_state_dict(state)) == "<All keys matched successfully>"
    assert all(each.eq(0.5).all() for each in adapters["experts"].parameters())
    assert all(each.eq(0.5).all() for each in ours.parameters())


@pytest.mark.parametrize("name", ["dbrx", "switch_transformers"])
def test_families_with_separate_weights(name):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours, stack_experts=True)
    state = {key: (value * 2).double() for key, value in stock.state_dict().items()}
    ours.load_state_dict(state)
    assert equal_states(ours.state_dict(), {key: value.float() for key, value in state.items()})
    ours.to("meta").load_state_dict(state, assign=True)
    assert equal_states(ours.state_dict(), state)
    wrong = next(key for key in state if "experts" in key)
    state[wrong] = state[wrong].t()
    assert loaded(ours, state) == loaded(stock, state)
    assert f"size mismatch for {wrong}:" in loaded(ours, state)


def test_safetensors_saves_and_loads_them(tmp_path):
    """`save_model` takes no tensor that is a part of a storage, and asks that of what it loads into as well."""
    ours, path = stacked(Loop), tmp_path / "model.safetensors"
    ours.load_state_dict(other_state())
    for save in (save_model, lambda model, path: save_file(model.state_dict(), path)):
        save(ours, path)
        for into in (block(Loop), stacked(Loop)):
            assert load_model(into, path) == (set(), [])
            assert equal_states(into.state_dict(), other_state())


def test_a_state_dict_is_the_memory_of_the_parameters():
    ours = stacked(Loop)
    saved = ours.state_dict()[NAME]
    saved.fill_(3)
    assert ours.experts.gate_up_proj[3, :INTER].eq(3).all()
    assert saved.untyped_storage().nbytes() == saved.nbytes
    shared = stacked(Loop).share_memory()
    assert shared.state_dict()[NAME].is_shared()
    assert stacked(Loop).to("meta").state_dict()[NAME].is_meta
    assert ours.state_dict(keep_vars=True)[NAME].requires_grad


def test_a_state_dict_in_a_transform():
    ours = stacked(Loop)

    def total(weight):
        state = torch.func.functional_call(_States(ours), {"module.experts.down_proj": weight}, ())
        return state["module.experts.0.w2.weight"].numel() * weight.sum()

    gradient = torch.func.grad(total)(ours.experts.down_proj.detach())
    assert gradient.eq(HIDDEN * INTER).all()


class _States(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self):
        return self.state_dict()
