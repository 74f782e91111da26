"""Kernels may be named after what was called: what our operators were written out to keeps names that are Python's."""

import re

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

import inductor_passes
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
        return out, torch.autograd.grad(out.sum(), x) if trains else ()

    names = {"cpp.descriptive_names": after}
    with torch.set_grad_enabled(trains), fresh_graphs(), inductor_config.patch(names):
        (out, _), codes = run_and_get_code(run)
    assert_matches_oracle(out, exact(x, layers))
    kernels = [re.findall(r"^(\S+) = async_compile\.cpp_pybinding\(", code, re.MULTILINE) for code in codes]
    assert len(kernels) == 1 + trains and all(kernels)
    assert all(name.isidentifier() for names in kernels for name in names)
    named = [word for word in ("fused_moe", "combine") if any(word in name for name in kernels[0])]
    assert named == {"torch": ["fused_moe"], "original_aten": ["combine"]}.get(
        after, []
    )  # Dynamo's, AOTAutograd's
