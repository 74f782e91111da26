"""AOTInductor: what an exported model becomes with our passes loads where this library is not."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import inductor_passes
from inductor_passes import _compat
from layers import FusedMoE, HashRouting, MoEConfig
from tests.forked import run_python
from tests.helpers import assert_matches_oracle
from tests.huggingface.blocks import block
from tests.passes import stock

HIDDEN, EXPERTS = 64, 8
CONFIG = MoEConfig(EXPERTS, 2, HIDDEN, 32, has_bias=True)
TOKENS = torch.export.Dim("tokens", min=2, max=4096)

# A process that knows nothing of us: `ours` is what it is told to import.
RUN = """
import sys, torch, {ours}
run = torch._inductor.aoti_load_package({package!r})
results = [run(*given) for given in torch.load({inputs!r})]
assert {strangers!r} or not {{"moe_ops", "inductor_passes", "layers", "transformers"}} & {{*sys.modules}}
torch.save(results, {outputs!r})
"""


class Ours(nn.Module):
    """Our layer, then whatever follows."""

    def __init__(self, dtype: torch.dtype, *others: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=dtype)
        self.experts = FusedMoE(CONFIG, dtype=dtype)
        nn.init.normal_(self.experts.w13_bias)
        nn.init.normal_(self.experts.w2_bias)
        self.others = nn.ModuleList(others)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.experts(hidden, self.gate(hidden))
        for other in self.others:
            hidden = other(hidden[None])[0]
        return hidden


class Stock(nn.Module):
    """A layer written by somebody who knows nothing of us."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(stock.layer(4, torch.float32)[1:])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return stock.batched(hidden[0], *self.weights)[None]


class Branch(nn.Module):
    """A layer that runs if there is something to do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cond(hidden.norm() > 0, self.layer, torch.neg, (hidden,))


def packaged(model, given, path, dynamic, export=torch.export.export):
    """The model as a package at `path`."""
    shapes = ({0: TOKENS},) if dynamic else None
    with torch.no_grad():
        program = export(model, (given,), dynamic_shapes=shapes)
        return torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=inductor_passes.options()
        )


def run_elsewhere(package, calls, tmp_path, ours="os"):
    """What each call of a package gives in another process."""
    inputs, outputs = tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    torch.save([(each,) for each in calls], inputs)
    code = RUN.format(
        ours=ours, package=str(package), inputs=str(inputs), outputs=str(outputs), strangers=ours != "os"
    )
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])} if ours != "os" else {}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_python(code, cwd=tmp_path, env=kept | paths)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr}")
    return torch.load(outputs)


def check(model, calls, results):
    exact = model.double()
    for module in exact.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):  # grouped_mm takes no float64
            module.config._experts_implementation = "eager"
    for given, result in zip(calls, results, strict=True):
        with torch.no_grad():
            assert_matches_oracle(result, exact(given.double()))


def tokens(number, dtype):
    """Whose experts no rounding changes."""
    return stock.layer(number, dtype).hidden_states


@pytest.mark.slow
def test_few_slots_call_nothing_of_ours(tmp_path):
    model, given = Ours(torch.float32, Stock()), tokens(4, torch.float32)
    package = packaged(model, given, tmp_path / "model.pt2", dynamic=False)
    check(model, [given], run_elsewhere(package, [given], tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not _compat.packages_grouped_mm(), reason="torch 2.12 and later pack grouped products")
def test_any_number_of_tokens_calls_nothing_of_ours(tmp_path):
    model = Ours(torch.float32, block("flex_olmo", "grouped_mm"), Branch(Stock()))
    calls = [tokens(number, torch.float32) for number in (40, 3, 300)]
    package = packaged(model, calls[0], tmp_path / "model.pt2", dynamic=True)
    check(model, calls, run_elsewhere(package, calls, tmp_path))


@pytest.mark.slow
def test_operators_that_stay_are_named_and_come_with_moe_ops(tmp_path, caplog):
    model, calls = Ours(torch.float64), [tokens(number, torch.float64) for number in (40, 3)]
    path, draft = tmp_path / "model.pt2", torch.export.draft_export  # real tensors go with a draft's
    package = packaged(model, calls[0], path, dynamic=True, export=draft)
    assert "the package calls moe::grouped_gemm: import moe_ops before it is loaded" in caplog.messages
    with pytest.raises(RuntimeError, match="Could not find schema for moe::grouped_gemm"):
        run_elsewhere(package, calls, tmp_path)
    check(model, calls, run_elsewhere(package, calls, tmp_path, ours="moe_ops"))


@pytest.mark.slow
def test_what_a_layer_holds_is_a_copy_until_the_package_is_given_it(tmp_path):
    model, given = Ours(torch.float32), tokens(4, torch.float32)
    table = torch.randint(EXPERTS, (64, 2), dtype=torch.int32)
    token_ids = torch.arange(16)  # Inductor writes fewer than nine into its code
    model.experts.routing_override = HashRouting(table, token_ids, CONFIG.routing)
    package = packaged(model, given, tmp_path / "model.pt2", dynamic=False)
    run = torch._inductor.aoti_load_package(package)
    before = run(given)
    token_ids.add_(9)
    assert torch.equal(run(given), before)
    name = "experts.routing_override.token_ids"
    assert name in run.get_constant_fqns()
    run.load_constants({name: token_ids}, check_full_update=False, user_managed=True)
    for shift in (0, 1, 2):
        token_ids.add_(shift)
        check(model, [given], [run(given)])


@pytest.fixture(scope="module")
def packages_load(tmp_path_factory):
    """Skips where torch cannot load a package of its own: on an H200 with torch 2.11 for CUDA 13.0 it crashes."""
    folder, given = tmp_path_factory.mktemp("plain"), torch.randn(2, HIDDEN, device="cuda")
    program = torch.export.export(nn.Linear(HIDDEN, HIDDEN).cuda(), (given,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    try:
        run_elsewhere(package, [given], folder)
    except RuntimeError as error:
        pytest.skip(f"torch does not load its own package of a linear layer here: {error}")


@pytest.mark.gpu
@pytest.mark.usefixtures("packages_load")
@pytest.mark.parametrize("number", [1, 4, 256])
def test_static_sizes_on_a_gpu_call_nothing_of_ours(number, tmp_path):
    model, given = Ours(torch.bfloat16).cuda(), tokens(number, torch.bfloat16).cuda()
    package = packaged(model, given, tmp_path / "model.pt2", dynamic=False)
    check(model, [given], run_elsewhere(package, [given], tmp_path))


@pytest.mark.gpu
@pytest.mark.usefixtures("packages_load")
def test_a_symbolic_count_on_a_gpu_comes_with_moe_ops(tmp_path, caplog):
    model, calls = Ours(torch.bfloat16).cuda(), [tokens(number, torch.bfloat16).cuda() for number in (40, 3)]
    package = packaged(model, calls[0], tmp_path / "model.pt2", dynamic=True)
    assert any(message.startswith("the package calls moe::fused") for message in caplog.messages)
    check(model, calls, run_elsewhere(package, calls, tmp_path, ours="moe_ops"))
