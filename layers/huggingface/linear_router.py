"""Routers that are one product and a `RoutingConfig`, found by trying: most of them, whatever they are called."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.huggingface import router_trial, trial
from layers.huggingface.router_trial import Tried
from layers.huggingface.routers import OURS, Known, for_experts
from layers.huggingface.settled import below, get
from layers.router import linear_in
from moe_ops import topk_routing
from moe_ops._checks import FLOATING_DTYPES
from moe_ops.arguments import Router


@dataclass(frozen=True, slots=True)
class Linear:
    """Where a router has what, and in which dtypes it computes logits.

    Attributes:
        weight: path of the [E, H] of the product, in the router.
        bias: path of what is added to it, [E], or "".
        multiplier: of the logits, as text: a compiler may take a float for an input, and one that routers share then
            cannot be read in two checkpoints (torch 2.11 to 2.13, dynamic=True).
        correction: path of the selection bias, E numbers; "" where it is an argument, None where there is none.
        product_dtype: of the product; None is that of the weight.
        logits_dtype: of the logits that are returned; None is that of the product.
        returned: "logits", "weights" and "ids" in the order returned.
        dims: how many dimensions hidden states may have; of others the router makes something else.
    """

    weight: str
    bias: str
    multiplier: str
    correction: str | None
    product_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    returned: tuple[str, ...]
    dims: tuple[int, ...]

    @property
    def module(self) -> str:
        """Path of the module that has the weight, or ""."""
        return self.weight.removesuffix(".weight") if self.weight.endswith(".weight") else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The same, if it is called."""
        return (self.module,) if self.module and self.product_dtype is None else ()


_ONE = repr(1.0)
_EVERY = (2, 3)
_LEVELS = (0.5, 0.0, -0.5)
"""Of biases, in three tries: what is filled in for groups left out shows at the last."""


def known(router: nn.Module) -> Known | None:
    """How this router is rebuilt; None where it is not one product and a `RoutingConfig`."""
    for path, weight in _tensors(router):
        is_inside_a_wrapper = path.count(".") > 1  # PEFT's, which choose between modules, and come off
        if weight.dim() == 2 and weight.is_floating_point() and not is_inside_a_wrapper:
            tried = [each for level in _LEVELS if (each := _tried(router, path, level))]
            if len(tried) == len(_LEVELS) and (found := _found(path, tried)) is not None:
                return found
    return None


def forward(self: Any, hidden_states: Tensor, *given: Tensor | None, **named: Tensor | None) -> Any:
    """The forward such routers get. `given`, `named`: the selection bias, where the caller has it."""
    how: Linear = self.moe_ops_details
    is_more = how.correction != "" and (given or named)
    if is_more or hidden_states.dim() not in how.dims:
        return type(self).forward(self, hidden_states, *given, **named)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    router_logits = logits_of(self, how, tokens)
    correction = _correction(self, how, (*given, *named.values()))
    weights, ids = topk_routing(router_logits, self.moe_ops_routing, correction)
    ids = for_experts(self, ids)
    if how.returned == _USUAL:
        return router_logits, weights, ids
    output = {"logits": router_logits, "weights": weights, "ids": ids}
    return tuple([output[name] for name in how.returned])


_USUAL = ("logits", "weights", "ids")


def arguments(router: Any, tokens: Tensor, given: Tensor | None) -> Router:
    """What `topk_routing` gets in such a forward of tokens [T, H], with the selection bias that the caller has."""
    how: Linear = router.moe_ops_details
    logits = logits_of(router, how, tokens)
    return Router(logits, _correction(router, how, (given,)), router.moe_ops_routing.spec)


def logits_of(router: Any, how: Linear, tokens: Tensor) -> Tensor:
    """[T, E], as the family computes them."""
    if how.called:
        logits = called(get(router, how.module), tokens)
    else:
        weight = get(router, how.weight)
        bias = get(router, how.bias) if how.bias else None
        if how.product_dtype is None:
            logits = F.linear(tokens.to(weight.dtype), weight, bias)
        else:
            logits = linear_in(how.product_dtype, tokens, weight, bias)
    logits = logits if how.logits_dtype is None else logits.to(how.logits_dtype)
    return logits if how.multiplier == _ONE else logits * float(how.multiplier)


def called(module: Any, tokens: Tensor) -> Tensor:
    """What a linear module gives: it may have hooks that bring its weight, or be a quantised one by now."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in FLOATING_DTYPES:
        tokens = tokens.to(weight.dtype)
    return module(tokens)


def _correction(router: Any, how: Linear, given: tuple[Tensor | None, ...]) -> Tensor | None:
    if how.correction is None:
        return None
    bias = get(router, how.correction) if how.correction else next(iter(given), None)
    return None if bias is None else bias.flatten()


def _tensors(router: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from router.named_parameters()
    yield from router.named_buffers()


def _tried(router: nn.Module, weight: str, level: float) -> Tried | None:
    """The router's twin and what it gave, if `weight` may be that of its product. Biases are around `level`."""
    generator = torch.Generator().manual_seed(0)
    twin = trial.skeleton(router, trial.random_like(generator, level)).eval()
    router_trial.steer(get(twin, weight))
    tokens = router_trial.tokens_for(get(twin, weight).detach())
    num_experts = get(twin, weight).shape[0]
    extra = [
        level + torch.randn(num_experts, generator=generator, dtype=torch.float64) / 4
        for _ in range(_num_arguments(router))
    ]
    return attempt(twin, tokens, *extra)


def attempt(twin: Any, tokens: Tensor, *extra: Tensor) -> Tried | None:
    """What a twin gives for tokens [T, H], or, if it takes none of those, [2, T / 2, H]."""
    for states in (tokens, tokens.view(2, -1, tokens.shape[1])):
        try:
            output = router_trial.run(type(twin).forward, twin, states, *extra)
        except (ValueError, RuntimeError):  # it fails, or has no gradient
            continue
        return Tried(twin, states, extra, output)
    return None


def _num_arguments(router: nn.Module) -> int:
    parameters = list(inspect.signature(type(router).forward).parameters.values())[2:]
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)


def _found(weight: str, tries: list[Tried]) -> Known | None:
    tried = tries[0]
    if set(tried.output.names) != {"logits", "weights", "ids"} or len(tried.extra) > 1:
        return None
    for bias, multiplier in _products(tried, weight):
        dtypes = _dtypes(tried, multiplier)
        for correction in _corrections(tried, bias):
            how = Linear(weight, bias, repr(multiplier), correction, *dtypes, tried.output.names, _EVERY)
            for routing in router_trial.configs(tried, _bias(tried, correction)):
                found = Known(forward, routing, how, below(tried.twin, *how.called))
                if all(_is(found, each) for each in tries):
                    return _narrowed(found, tried)
    return None


def _narrowed(found: Known, tried: Tried) -> Known | None:
    """For hidden states of as many dimensions as it is the same for in whatever numbers; None where there are none."""
    batches = router_trial.other_batches(tried.hidden_states.flatten(0, -2))
    dims = tuple(
        [dim for dim, each in batches.items() if all(_is_for(found, tried, states) for states in each)]
    )
    return found._replace(details=replace(found.details, dims=dims)) if dims else None


def _is_for(found: Known, tried: Tried, hidden_states: Tensor) -> bool:
    """Whether it gives the same for other tokens, in both modes; and the router itself without gradients."""
    twin, extra = settled(tried.twin, found), tried.extra
    for mode in (True, False):
        twin.train(mode)
        try:
            theirs = router_trial.run(type(twin).forward, twin, hidden_states, *extra)
            with torch.no_grad():
                alone = trial.run(type(twin).forward, twin, hidden_states, *extra)
            ours = router_trial.run(found.forward, twin, hidden_states, *extra)
            rows = router_trial.decided(theirs.logits, found.routing, _bias(tried, found.details.correction))
        except (ValueError, RuntimeError):
            return False
        chosen = alone[theirs.names.index("weights")].flatten(0, -2).sort(1)[0]
        is_same = router_trial.same(ours, theirs, rows) and trial.close(chosen, theirs.chosen)
        if not is_same or ours.shapes != theirs.shapes:
            return False
    return True


def _is(found: Known, tried: Tried) -> bool:
    bias = _bias(tried, found.details.correction)
    rows = router_trial.decided(tried.output.logits, found.routing, bias)
    is_same = agrees(found, tried, rows) and trains_alike(tried, rows) and _is_tied_alike(found, tried)
    return is_same and _reads_no_more(found.details, tried, rows) and _gives_as_much(found, tried, rows)


def _gives_as_much(found: Known, tried: Tried, rows: Tensor) -> bool:
    """Whether parameters get the same gradients: a router may keep some from being trained."""
    settled(tried.twin, found)
    forwards = type(tried.twin).forward, found.forward
    theirs, ours = (router_trial.parameter_gradients(tried, each, rows) for each in forwards)
    return all(map(trial.close, ours, theirs))


def _reads_no_more(how: Linear, tried: Tried, rows: Tensor) -> bool:
    """Whether nothing else of the router counts: a scale that is learned, a mask."""
    read = (how.weight, how.bias, how.correction)
    others = [each.detach() for name, each in _tensors(tried.twin) if name not in read]
    others += trial.loose_tensors(tried.twin)
    return trial.holds_whatever(others, lambda: _gives_the_same(tried, rows))


def _gives_the_same(tried: Tried, rows: Tensor) -> bool:
    try:
        output = router_trial.run(type(tried.twin).forward, tried.twin, tried.hidden_states, *tried.extra)
    except ValueError:
        return False
    return router_trial.same(output, tried.output, rows)


def _products(tried: Tried, weight: str) -> Iterator[tuple[str, float]]:
    """Which vector is added to the product, and what multiplies it, if that gives the logits."""
    logits = tried.output.logits
    plain = (
        tried.hidden_states.reshape(-1, tried.hidden_states.shape[-1]) @ get(tried.twin, weight).detach().T
    )
    if plain.shape != logits.shape:
        return
    vectors = [name for name, each in _tensors(tried.twin) if each.shape == (plain.shape[1],)]
    for bias in ("", *vectors):
        product = plain + get(tried.twin, bias).detach() if bias else plain
        multiplier = float((logits * product).sum() / product.square().sum())
        multiplier = next(
            (
                each
                for each in (1.0, *router_trial.numbers(tried.twin))
                if abs(each - multiplier) <= trial.CLOSE
            ),
            multiplier,
        )
        if trial.close(product * multiplier, logits):
            yield bias, multiplier


def _corrections(tried: Tried, bias: str) -> Iterator[str | None]:
    """What may be added for selection: an argument that is there for that; nothing, or a tensor of the router."""
    if tried.extra:
        yield ""
        return
    yield None
    for name, each in _tensors(tried.twin):
        if each.numel() == tried.output.num_experts and name != bias:
            yield name


def _bias(tried: Tried, correction: str | None) -> Tensor | None:
    if correction is None:
        return None
    return (get(tried.twin, correction) if correction else tried.extra[0]).detach().flatten()


def _dtypes(tried: Tried, multiplier: float) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Dtypes of the product and of the logits, as a twin in bfloat16 shows: rounded logits are of a product in it."""
    twin = trial.cast(tried.twin, torch.bfloat16)
    extra = [each.to(torch.bfloat16) for each in tried.extra]
    try:
        returned = type(twin).forward(twin, tried.hidden_states.detach().to(torch.bfloat16), *extra)
    except RuntimeError:  # it takes no other weights than those of float32
        return torch.float32, None
    logits = returned[tried.output.names.index("logits")].detach()
    product = logits.float() / multiplier
    logits_dtype = None if logits.dtype == torch.bfloat16 else logits.dtype
    is_rounded = torch.equal(product, product.to(torch.bfloat16).float())
    return (None, logits_dtype) if is_rounded else (torch.float32, None)


def agrees(found: Known, tried: Tried, rows: Tensor) -> bool:
    """Whether the replacement gives what the router gave, in these rows."""
    ours = settled(tried.twin, found)
    return router_trial.same(
        router_trial.run(found.forward, ours, tried.hidden_states, *tried.extra), tried.output, rows
    )


def trains_alike(tried: Tried, rows: Tensor) -> bool:
    """Whether the router does in training what it did here, in evaluation."""
    tried.twin.train()
    is_same = _gives_the_same(tried, rows)
    tried.twin.eval()
    return is_same


def _is_tied_alike(found: Known, tried: Tried) -> bool:
    """Whether tokens of zeros, as padding is, get the same weights, whichever of equal experts gets them."""
    tied, twin = torch.zeros_like(tried.hidden_states), settled(tried.twin, found)
    theirs = router_trial.run(type(twin).forward, twin, tied, *tried.extra)
    ours = router_trial.run(found.forward, twin, tied, *tried.extra)
    return trial.close(ours.chosen, theirs.chosen)


def settled(twin: Any, found: Known) -> Any:
    """The twin as `install` would leave it, beside a model whose experts are ours."""
    twin.moe_ops_routing, twin.moe_ops_details, twin.moe_ops_config = found.routing, found.details, OURS
    return twin
