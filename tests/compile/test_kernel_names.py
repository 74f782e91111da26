"""Kernels may be named after what was called: what our operators were written out to keeps names that are Python's."""

import re

import pytest
import torch
import torch._inductor.config as inductor_config

import inductor_passes
from tests.generated import codes_of
from tests.helpers import assert_matches_oracle, fresh_graphs, mixed
from tests.passes.stacks import block, exact, tokens, weights


@pytest.mark.parametrize(
    ("after", "trains"), mixed(("torch", "original_aten", "inductor_node", False), (True, False))
)
def test_kernels_named_after_what_was_called(after, trains):
    torch._dynamo.reset()
    x, layers = tokens().requires_grad_(trains), weights(1)
    compiled = torch.compile(block, options=inductor_passes.options(), fullgraph=True)

    def run():
        out = compiled(x, layers[0])
        return torch.autograd.grad(out.sum(), x) if trains else out

    names = {"cpp.descriptive_names": after}
    with torch.set_grad_enabled(trains), inductor_config.patch(names):
        codes = codes_of(run)
    kernels = [re.findall(r"^(\S+) = async_compile\.cpp_pybinding\(", code, re.MULTILINE) for code in codes]
    assert len(kernels) == 1 + trains and all(kernels)
    assert all(name.isidentifier() for names in kernels for name in names)
    named = [word for word in ("fused_moe", "combine") if any(word in name for name in kernels[0])]
    assert named == {"torch": ["fused_moe"], "original_aten": ["combine"]}.get(
        after, []
    )  # Dynamo's, AOTAutograd's


@torch.no_grad()
def test_kernels_of_any_name_compute_the_same():
    torch._dynamo.reset()
    x, layers = tokens(), weights(1)
    with fresh_graphs(), inductor_config.patch({"cpp.descriptive_names": "torch"}):
        out = torch.compile(block, options=inductor_passes.options(), fullgraph=True)(x, layers[0])
    assert_matches_oracle(out, exact(x, layers))
