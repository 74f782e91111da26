"""The tensors of a case: values drawn on the CPU, so that every device sees the same, then cast, moved and laid out.

What lies between the rows of a padded tensor is NaN (integers: the largest), so that a read of it shows.
"""

import torch
from torch import Tensor

from tests.fuzz.cases import Case
from tests.helpers import SCORES
from tests.ops.samples import LAYOUTS

# float32 scores and what a bias adds to them: exp, a sum and a division, a few epsilons each.
NEAR = 32 * torch.finfo(torch.float32).eps
LOGIT_STEPS = 160  # distinct logits, multiples of 1/16 within 5: exact in every dtype
REDRAWS = 100


def _hole(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    is_float = tensor.is_floating_point()
    return torch.full(
        shape,
        float("nan") if is_float else torch.iinfo(tensor.dtype).max,
        dtype=tensor.dtype,
        device=tensor.device,
    )


def _padded(tensor: Tensor, by: int) -> Tensor:
    base = _hole(tensor, (*tensor.shape[:-1], tensor.shape[-1] + by))
    base[..., : tensor.shape[-1]] = tensor
    return base[..., : tensor.shape[-1]]


def _offset(tensor: Tensor) -> Tensor:
    """Starts one element after an aligned address."""
    base = _hole(tensor, (tensor.numel() + 1,))
    base[1:] = tensor.flatten()
    return base[1:].view(tensor.shape)


def _experts_apart(weight: Tensor) -> Tensor:
    base = _hole(weight, (weight.shape[0], weight.shape[1] + 3, weight.shape[2]))
    base[:, : weight.shape[1]] = weight
    return base[:, : weight.shape[1]]


MATRIX_LAYOUTS = {**LAYOUTS, "padded": lambda t: _padded(t, 8), "offset": _offset}
WEIGHT_LAYOUTS = {
    "dense": LAYOUTS["dense"],
    "transposed": LAYOUTS["column major"],
    "padded": lambda w: _padded(w, 8),
    "padded odd": lambda w: _padded(w, 5),
    "transposed padded": lambda w: _padded(w.mT, 8).mT,
    "offset": _offset,
    "transposed offset": lambda w: _offset(w.mT).mT,
    "experts apart": _experts_apart,
    "experts inside": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "experts expanded": LAYOUTS["expanded"],
    "rows expanded": lambda w: w[:, :1].expand_as(w),
}


class Maker:
    """Makes a case's tensors, each call the next ones of its random sequence."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.index)
        self.dtype, self.logits_dtype = getattr(torch, case.dtype), getattr(torch, case.logits_dtype)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32 on the CPU."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), float32 on the CPU."""
        return torch.rand(shape, generator=self.generator)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Hidden states or the like, in the case's layout of hidden states."""
        values = self.normal(rows, columns).to(self.device, self.dtype)
        return MATRIX_LAYOUTS[self.case.hidden_layout](values)

    def weight(self, layout: str, rows: int, columns: int) -> Tensor:
        """[local experts, rows, columns], so scaled that a product is about as large as its input."""
        values = self.normal(self.case.local_experts, rows, columns) / columns**0.5
        return WEIGHT_LAYOUTS[layout](values.to(self.device, self.dtype))

    def w13(self) -> Tensor:
        """[local experts, 2I or I, H]."""
        return self.weight(self.case.w13_layout, self.case.columns, self.case.hidden)

    def w2(self) -> Tensor:
        """[local experts, H, I]."""
        return self.weight(self.case.w2_layout, self.case.hidden, self.case.intermediate)

    def bias(self, features: int) -> Tensor | None:
        """[local experts, features] if the case has biases."""
        if not self.case.bias:
            return None
        return self.small(self.normal(self.case.local_experts, features).to(self.dtype))

    def shared(self) -> Tensor | None:
        """[T, H] if the case has a shared output."""
        return self.matrix(self.case.tokens, self.case.hidden) if self.case.shared else None

    def small(self, values: Tensor) -> Tensor:
        """Onto the device, in the layout of small tensors."""
        return MATRIX_LAYOUTS[self.case.small_layout](values.to(self.device))

    def expert_map(self) -> Tensor | None:
        """[E] int32 if some experts live elsewhere: the local ones in any order, -1 for the rest."""
        case = self.case
        if case.local_experts == case.experts:
            return None
        places = torch.full((case.experts,), -1, dtype=torch.int32)
        held = torch.randperm(case.experts, generator=self.generator)[: case.local_experts]
        places[held] = torch.arange(case.local_experts, dtype=torch.int32)
        return places.to(self.device)

    def topk_weights(self) -> Tensor:
        """[T, K] as a caller might make them."""
        return self.small(self.uniform(self.case.tokens, self.case.top_k).to(self.logits_dtype))

    def topk_ids(self) -> Tensor:
        """[T, K] as a caller might make them: skewed, some out of range or all. One hot expert takes every slot."""
        case = self.case
        keys = self.popularity() + -torch.log(-torch.log(self.uniform(case.tokens, case.experts)))
        ids = keys.argsort(1, descending=True)[:, : case.top_k]
        if case.skew == "one":
            ids = ids[:1, :1].expand_as(ids).clone()
        if case.dropped or case.skew == "nobody":
            far = 2**40 + 1 if case.ids_dtype == "int64" else 2**30
            strange = torch.tensor([-1, -7, case.experts, far])
            which = torch.randint(4, ids.shape, generator=self.generator)
            share = 1.0 if case.skew == "nobody" else 0.2
            ids = torch.where(self.uniform(*ids.shape) < share, strange[which], ids)
        return self.small(ids.to(getattr(torch, case.ids_dtype)))

    def popularity(self) -> Tensor:
        """[E], added to logits; multiples of a half."""
        order = torch.arange(self.case.experts)
        if self.case.skew == "one":
            return 6.0 * (order == self.case.experts // 2)
        if self.case.skew == "few":
            return 5.0 * (order < max(self.case.top_k, self.case.experts // 4))
        return -order.add(1).log2().floor() / 2 if self.case.skew == "zipf" else torch.zeros(len(order))

    def correction_bias(self) -> Tensor | None:
        """[E] float32."""
        if self.case.correction == "none":
            return None
        bias = 2 * self.uniform(self.case.experts) - 1
        if self.case.correction == "not finite":
            bias[self.uniform(len(bias)) < 0.3] = float("-inf")
            bias[self.uniform(len(bias)) < 0.1] = float("nan")
        is_strided = self.case.small_layout == "column major"
        return LAYOUTS["column major" if is_strided else "dense"](bias.to(self.device))

    def logits(self, correction_bias: Tensor | None) -> Tensor:
        """[T, E] whose choice of experts does not hang on rounding: rows where it does are drawn again."""
        bias = None if correction_bias is None else correction_bias.double().cpu()
        logits = self._draw_logits(self.case.tokens)
        for _ in range(REDRAWS):
            near = hangs_on_rounding(logits.double(), bias, self.case)
            if not near.any():
                break
            logits[near] = self._draw_logits(int(near.sum()))
        if near.any():  # no luck: take the place of a row that is clear, if there is one
            logits[near] = logits[~near][:1] if not near.all() else logits[near]
        return self.small(logits.to(self.logits_dtype))

    def _draw_logits(self, rows: int) -> Tensor:
        steps = self.uniform(rows, LOGIT_STEPS).argsort(1)[:, : self.case.experts]
        logits = (steps - LOGIT_STEPS // 2) / 16
        if self.case.logits == "ties":
            logits = logits.round()
        logits = logits + self.popularity()
        if self.case.logits == "not finite":
            strange = torch.tensor([float("nan"), float("inf"), float("-inf"), float("-inf")])
            which = torch.randint(4, logits.shape, generator=self.generator)
            spoilt = (self.uniform(*logits.shape) < 0.2) & (self.uniform(rows, 1) < 0.3)
            logits = torch.where(spoilt, strange[which], logits)
        return logits

    def grad(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """What comes down from behind an output."""
        return self.normal(*shape).to(self.device, dtype)


def hangs_on_rounding(logits: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    """[T] whether a float32 router could rank experts or groups of a row otherwise. Equal logits tie in both."""
    routing = case.routing
    scores = logits
    if routing.order == "score_then_topk":
        scores = SCORES[routing.score_fn](logits)
    selection = scores if bias is None else scores + bias
    reach = 0.0 if bias is None else bias.nan_to_num(neginf=0.0).abs().max().item()
    unusable = ~selection.isfinite()
    selection = selection.masked_fill(unusable, float("-inf"))
    near = torch.zeros(len(logits), dtype=torch.bool)
    if routing.num_groups > 1:
        grouped = selection.unflatten(1, (routing.num_groups, -1))
        is_sum = routing.group_score == "top2_sum"
        best = grouped.topk(2, dim=2).values.sum(2) if is_sum else grouped.amax(2)
        near = _is_near(best, routing.topk_groups, reach, allow_equal=not is_sum)
        kept = torch.zeros_like(best, dtype=torch.bool)
        order = best.sort(dim=1, descending=True, stable=True).indices
        kept.scatter_(1, order[:, : routing.topk_groups], True)
        filled = grouped.masked_fill(~kept.unsqueeze(2), routing.group_fill).flatten(1)
        selection = filled.masked_fill(unusable, float("-inf"))
    for rank in range(1, routing.top_k + 1):
        near |= _is_near(selection, rank, reach)
    return near


def _is_near(values: Tensor, rank: int, reach: float, allow_equal: bool = True) -> Tensor:
    """[T] whether the values that rank `rank` and next lie closer together than float32 can tell."""
    if rank >= values.shape[1]:
        return torch.zeros(len(values), dtype=torch.bool)
    ranked = values.sort(dim=1, descending=True).values
    above, below = ranked[:, rank - 1], ranked[:, rank]
    gap = above - below  # NaN for two that are -inf
    return (gap <= NEAR * (above.abs() + reach)) & (~gap.eq(0) if allow_equal else gap.eq(gap))
