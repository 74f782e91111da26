"""What a user hands to a layer by mistake is named: the argument, what it is, and what was expected."""

import re
import traceback

import numpy
import pytest
import torch

from layers import FusedMoE, MoEBlock, MoEConfig, Router, SharedExpertConfig, SharedExperts

H, I, E, K = 16, 24, 8, 2
SHARED = SharedExpertConfig(40)
CONFIG = MoEConfig(E, K, H, I, shared_experts=SHARED)

EXPERTS = FusedMoE(CONFIG)
TAKES_HIDDEN_STATES = {
    "block": MoEBlock(CONFIG),
    "block_with_routing": MoEBlock(CONFIG).forward_with_routing,
    "router": Router(CONFIG),
    "shared_experts": SharedExperts(CONFIG, SHARED),
    "experts": lambda hidden: EXPERTS(hidden, torch.randn(5, E)),
}
MISTAKES = {
    "width": (torch.randn(5, H + 1), ValueError, r"^hidden_states has last dimension 17: expected 16$"),
    "scalar": (torch.tensor(1.0), ValueError, r"^hidden_states has shape \[\]: expected \[\.\.\., 16\]$"),
    "integers": (
        torch.ones(5, H, dtype=torch.int64),
        TypeError,
        r"^hidden_states has dtype torch\.int64: expected",
    ),
    "numpy": (numpy.ones((5, H)), TypeError, r"^hidden_states=<ndarray>: expected a torch\.Tensor$"),
    "list": ([[1.0] * H], TypeError, r"^hidden_states=<list>: expected a torch\.Tensor$"),
    "sparse": (
        torch.ones(5, H).to_sparse(),
        TypeError,
        r"^hidden_states is torch\.sparse_coo: expected a dense tensor$",
    ),
    "nested": (
        torch.nested.nested_tensor([torch.ones(2, H), torch.ones(3, H)]),
        TypeError,
        r"^hidden_states is nested: expected a dense tensor$",
    ),
    "none": (None, TypeError, r"^hidden_states=None: expected a torch\.Tensor$"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("layer", TAKES_HIDDEN_STATES)
def test_hidden_states(layer, mistake):
    hidden_states, error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        TAKES_HIDDEN_STATES[layer](hidden_states)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [(n, m) for n in ("router_logits", "shared") for m in MISTAKES if (n, m) != ("shared", "none")],
)
def test_other_tensors_of_the_experts(name, mistake):
    value, error, text = MISTAKES[mistake]
    arguments = {"router_logits": torch.randn(5, E), "shared": torch.randn(5, H)}
    size = arguments[name].shape[-1]
    with pytest.raises(error, match=text.replace("hidden_states", name).replace("16", str(size))):
        FusedMoE(CONFIG)(torch.randn(5, H), **{**arguments, name: value})


def test_token_counts_that_do_not_fit():
    experts = FusedMoE(CONFIG)
    hidden, logits = torch.randn(5, H), torch.randn(5, E)
    with pytest.raises(ValueError, match=r"router_logits has shape \[4, 8\]: expected \[5, 8\]"):
        experts(hidden, logits[:4])
    with pytest.raises(ValueError, match=r"shared has shape \[1, 16\]: expected \[5, 16\]"):
        experts(hidden, logits, torch.randn(1, H))
    with pytest.raises(ValueError, match=r"topk_ids has shape \[4, 2\]: expected \[5, K\]"):
        experts(hidden, experts.route(logits[:4]))


def test_a_numpy_array_for_routing():
    with pytest.raises(TypeError, match=r"^router_logits=<ndarray>: expected a torch\.Tensor$"):
        FusedMoE(CONFIG).route(numpy.ones((5, E)))


@pytest.mark.parametrize("layer", [FusedMoE, MoEBlock, Router, lambda config: SharedExperts(config, SHARED)])
def test_configs(layer):
    with pytest.raises(TypeError, match=r"^config=\{'num_experts': 8\}: expected MoEConfig, got dict$"):
        layer({"num_experts": 8})


def test_the_config_of_shared_experts():
    with pytest.raises(TypeError, match=r"^shared=40: expected SharedExpertConfig, got int$"):
        SharedExperts(CONFIG, 40)


@pytest.mark.parametrize("mistake", ["width", "integers"])
@pytest.mark.parametrize("layer", TAKES_HIDDEN_STATES)
def test_the_text_ends_a_compile_error(layer, mistake):
    """In the last ten lines, below however many frames of the user's and of ours."""
    hidden_states, _, text = MISTAKES[mistake]
    compiled = torch.compile(TAKES_HIDDEN_STATES[layer], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="expected") as raised:
        compiled(hidden_states)
    lines = "".join(traceback.format_exception(raised.value)).rstrip().split("\n")
    assert re.search(text.strip("^$"), "\n".join(lines[-10:]))
