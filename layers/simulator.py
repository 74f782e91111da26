"""Routing that is drawn, not computed: loads of a chosen shape for load tests, whatever the logits say.

T tokens, E experts, K experts per token. A strategy is a plain function

    (hidden_states, router_logits [T, E], top_k, seed [] int64) -> (topk_weights [T, K], topk_ids [T, K] int32)

that a compiler traces like any code. Its randomness comes from `seed`, a tensor on the device: the same seed draws the
same experts, eager or compiled, on every rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from layers._checks import expect_positive, expect_type
from layers.given_tensors import GivenTensors
from moe_ops._checks import compute_dtype, expect_index, expect_int, expect_shape
from moe_ops.errors import value_error
from moe_ops.placement import mix_bits, token_hash

Strategy = Callable[[Tensor | None, Tensor, int, Tensor], tuple[Tensor, Tensor]]

_STRATEGIES: dict[str, Strategy] = {}


def register_routing_strategy(name: str, strategy: Strategy) -> None:
    """Makes `SimulatedRouting(name, ...)` route by `strategy`.

    Raises:
        TypeError: `name` is no string, or `strategy` is not callable.
        ValueError: the name is taken.

    Example:
        >>> def first(hidden_states, router_logits, top_k, seed):
        ...     return sample_experts(-torch.arange(router_logits.shape[1]), router_logits, top_k, seed)
        >>> register_routing_strategy("first", first)
    """
    expect_type("name", name, str)
    if not callable(strategy):
        raise TypeError(f"strategy={strategy!r}: expected a function")
    if name in _STRATEGIES:
        raise ValueError(f"name={name!r}: expected one that is free, unlike {', '.join(_STRATEGIES)}")
    _STRATEGIES[name] = strategy


class SimulatedRouting(GivenTensors):
    """Routes by a strategy: `experts.routing_override = SimulatedRouting("uniform", top_k)`, None to stop.

    Args:
        strategy: "uniform" draws every expert as often; "normal" draws those in the middle more often, by a bell curve
            with a standard deviation of E / 6; or a registered name.
        top_k: K.
        seed: of the draws. It becomes the buffer `seed`, [] int64; `routing.seed.add_(1)` between forwards draws anew.

    Raises:
        TypeError, ValueError: the strategy is not registered, `top_k` is no positive int, or `seed` no int.
    """

    seed: Tensor

    def __init__(
        self, strategy: str, top_k: int, seed: int = 0, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        expect_type("strategy", strategy, str)
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy={strategy!r}: expected one of {', '.join(map(repr, _STRATEGIES))}")
        expect_positive("top_k", top_k)
        expect_int("seed", seed)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed={seed}: expected an int of 64 bits")
        self.strategy, self.top_k = _STRATEGIES[strategy], top_k
        self.register_buffer("seed", torch.tensor(seed, device=device), persistent=False)

    def forward(self, hidden_states: Tensor | None, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """(topk_weights [T, K], topk_ids [T, K] int32) for logits [T, E]."""
        expect_shape("router_logits", router_logits, ("T", "E"))
        return self.strategy(hidden_states, router_logits, self.top_k, self.seed)


def sample_experts(
    log_popularity: Tensor, router_logits: Tensor, top_k: int, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws K distinct experts per token, without replacement, in proportion to `log_popularity.exp()`; equal weights.

    By the Gumbel top-k trick (arXiv 1903.06059).

    Args:
        log_popularity: [E], any real numbers.
        router_logits: [T, E]; only its shape, device and dtype count.
        seed: [] int32 or int64.

    Returns:
        topk_weights [T, K] float32 (float64 for float64 logits), 1 / K each, and topk_ids [T, K] int32.

    Raises:
        TypeError, ValueError: an argument is not as described, or there are fewer than K experts.
    """
    expect_shape("router_logits", router_logits, ("T", "E"))
    expect_positive("top_k", top_k)
    num_tokens, num_experts = router_logits.shape
    expect_shape("log_popularity", log_popularity, (num_experts,))
    expect_index("seed", seed)
    expect_shape("seed", seed, ())
    if top_k > num_experts:
        value_error("top_k={}: expected at most {}, the experts that have logits", top_k, num_experts)
    of_token = token_hash(num_tokens, seed, router_logits.device).unsqueeze(1)
    of_expert = token_hash(num_experts, None, router_logits.device)
    uniform = (mix_bits(of_token ^ of_expert).double() + 0.5) / 2**32
    keys = log_popularity.double() - (-uniform.log()).log()
    topk_ids = keys.topk(top_k, dim=1).indices.to(torch.int32)
    return torch.full_like(topk_ids, 1 / top_k, dtype=compute_dtype(router_logits.dtype)), topk_ids


def _uniform(
    hidden_states: Tensor | None, router_logits: Tensor, top_k: int, seed: Tensor
) -> tuple[Tensor, Tensor]:
    popularity = torch.zeros(router_logits.shape[1], device=router_logits.device)
    return sample_experts(popularity, router_logits, top_k, seed)


def _normal(
    hidden_states: Tensor | None, router_logits: Tensor, top_k: int, seed: Tensor
) -> tuple[Tensor, Tensor]:
    num_experts = router_logits.shape[1]
    experts = torch.arange(num_experts, device=router_logits.device)
    deviation = (experts - (num_experts - 1) / 2) * (6 / num_experts)
    return sample_experts(-deviation.square() / 2, router_logits, top_k, seed)


register_routing_strategy("uniform", _uniform)
register_routing_strategy("normal", _normal)
