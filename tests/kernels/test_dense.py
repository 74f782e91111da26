"""Products of every token, for a few: routers, and a shared expert as one that everybody chose, against float64."""

import pytest
import torch

from moe_ops.arguments import DenseGemm, SharedExpert
from moe_ops.kernels import dense, plans
from moe_ops.kernels.common import compute_dtype
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.program import describe
from moe_ops.types import Activation
from moe_ops.values import SharedAlone
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close

ACTIVATIONS = [
    Activation("silu"),
    Activation("relu2"),
    Activation("swiglu_oai", interleaved=True),
    Activation("situ", beta=1.5, linear_beta=2.0),
]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("sizes", "dtype", "activation"),
    mixed(
        [(1, 72, 40), (2, 513, 37), (2, 64, 136)],
        DTYPES,
        ACTIVATIONS,
        rounds=2,
    ),
    ids=str,
)
def test_matches_the_oracle(
    sizes: tuple[int, int, int], dtype: torch.dtype, activation: Activation, device: str
) -> None:
    """Strided tokens and weights, with a weight per token and without."""
    tokens, hidden, features = sizes
    rows = 2 * features if activation.is_gated else features
    x = torch.randn(hidden, tokens).to(dtype).T
    w13 = (torch.randn(rows, hidden + 5) / hidden**0.5).to(dtype)[:, 3:-2]
    w2 = (torch.randn(hidden, features) / features**0.5).to(dtype)
    none = torch.zeros(tokens, 1, dtype=torch.int32)
    for weights in (None, torch.rand(1, tokens).T):
        given = [t if t is None else t.to(device) for t in (x, w13, w2, weights)]
        out = plans.launch(SharedAlone(given[0], SharedExpert(*given[1:], activation.spec)))
        weight = torch.ones(tokens, 1) if weights is None else weights
        one = w13.unsqueeze(0), w2.unsqueeze(0), weight, none
        assert out.shape == x.shape and out.is_contiguous()
        assert_close(out, oracles.experts(x, *one, None, None, None, None, activation))


def _takes(tokens: int, w13: torch.Tensor, w2: torch.Tensor) -> bool:
    shared = SharedExpert(describe(w13), describe(w2), None, "silu")
    return dense.takes(SharedAlone(describe(meta(tokens, w13.shape[1])), shared), H200)


def test_what_it_takes() -> None:
    """Two tokens at most, rows that lie together, and no longer than registers hold."""
    deep = meta(4096, 7168), meta(7168, 2048)
    assert _takes(1, *deep) and _takes(2, *deep) and not _takes(3, *deep)
    for turned in (0, 1):
        assert not _takes(1, *(w.T.contiguous().T if i == turned else w for i, w in enumerate(deep)))
    assert not _takes(1, meta(4096, 40000), meta(40000, 2048))
    assert not _takes(1, meta(80000, 2048), meta(2048, 40000))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    mixed([(1, 72, 13), (1, 64, 600), (7, 513, 8), (8, 600, 3)], DTYPES),
    ids=str,
)
def test_router_matches_the_oracle(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Strided tokens, weights and biases; in the dtype of the tokens and in that of sums."""
    tokens, hidden, experts = sizes
    x = torch.randn(hidden, tokens).to(dtype).T
    weight = (torch.randn(experts, hidden + 5) / hidden**0.5).to(dtype)[:, 3:-2]
    bias = torch.randn(experts, 2).to(dtype)[:, 1]
    for given, result in ((None, dtype), (bias, dtype), (bias, compute_dtype(dtype))):
        tensors = [t if t is None else t.to(device) for t in (x, weight, given)]
        out = plans.launch(DenseGemm(*tensors, result))
        expected = x.double() @ weight.double().T
        assert out.dtype == result and out.is_contiguous()
        assert_close(out, expected if given is None else expected + given.double())


def test_long_rows(device: str) -> None:
    x, weight = torch.randn(3, 5000).bfloat16(), (torch.randn(5, 5000) / 70).bfloat16()
    out = plans.launch(DenseGemm(x.to(device), weight.to(device), None, torch.float32))
    assert_close(out, x.double() @ weight.double().T)


def _takes_product(tokens: int, weight: torch.Tensor) -> bool:
    return dense.takes_product(
        DenseGemm(describe(meta(tokens, weight.shape[1])), describe(weight), None, torch.float32), H200
    )


def test_which_products_it_takes() -> None:
    """Few tokens, fewer with many features; rows that lie together and that registers hold."""
    router, wide = meta(256, 7168), meta(513, 7168)
    assert _takes_product(8, router) and not _takes_product(9, router)
    assert _takes_product(1, wide) and not _takes_product(2, wide)
    assert not _takes_product(1, router.T.contiguous().T) and not _takes_product(1, meta(8, 40000))
