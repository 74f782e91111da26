"""Whole blocks in as few calls as they need, eagerly and without gradients: the router's product, then `fused_moe`.

With a shared expert these are more, but for a few tokens: then it is an argument of `fused_experts_with_shared`.

Between a block's modules lie calls, checks and operators that take the host longer than the launches do. So what a
block's own code makes of its router, its experts and what every token visits is tried on a twin of small sizes in
float64, and where it is one of a few sums a patched block computes that sum itself. It runs its own code with
gradients, in training, in autocast and compiled, where passes find more to fuse, and once anything inside has changed.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from layers._compat import has_global_hooks
from layers.config import emitted
from layers.huggingface import (
    experts,
    forwards,
    linear_router,
    quantised,
    routers,
    shared as shared_experts,
    trial,
)
from layers.huggingface.experts import ExpertsOptions, is_dispatched
from layers.huggingface.finding import Found, FoundRouter
from layers.huggingface.outside import (
    TOKENS,
    are_close,
    is_same_everywhere,
    other_batches,
    run,
    tokens_of_all_sizes,
    twin_of,
)
from layers.huggingface.recognise import form
from layers.huggingface.settled import Settings, below, has_changed, has_hooks, settings_of
from moe_ops import _library
from moe_ops.arguments import FusedMoe, Placement, SharedExpert, TopkRouting
from moe_ops.fused_experts import run as run_experts
from moe_ops.fused_moe import run as run_moe
from moe_ops.shared import run as run_with_shared

Returned = Literal["", "logits", "weights"]

_LARGE = 64.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What a block is the sum of.

    Attributes:
        experts: name of the module that has them.
        router: name of the one that routes to them.
        shared: names of the module that every token visits, and of one whose sigmoid weighs its output; each may be
            missing.
        correction: name of the block's tensor that the router is given for its selection, or "".
        returned: what a block returns beside its output.
        mlp: what the module is that every token visits, if it is one that the operators take.
    """

    experts: str
    router: str
    shared: tuple[str, ...]
    correction: str
    returned: Returned
    mlp: shared_experts.Mlp | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """What `patch` settles for a block, as its attribute `moe_ops_whole`."""

    parts: Parts
    settings: Settings
    shared: shared_experts.Settled | None


def find(model: nn.Module, found: Found, options: dict[str, ExpertsOptions]) -> dict[str, Parts]:
    """By name, the blocks that are such a sum of parts. Changes nothing."""
    tried: dict[Any, Parts | None] = {}
    wholes: dict[str, Parts] = {}
    for name, settled in options.items():
        block_name, _, own = name.rpartition(".")
        block = model.get_submodule(block_name)
        beside = {each: found.routers.get(f"{block_name}.{each}".lstrip(".")) for each in block._modules}
        router = [(each, known) for each, known in beside.items() if known is not None]
        if not router or not _are_plain(block, own, settled):
            continue
        key = form(block)
        if key not in tried:
            tried[key] = _known(block, own, *router[0], settled)
        if (parts := tried[key]) is not None:
            wholes[block_name] = parts
    return wholes


def install(block: Any, parts: Parts) -> None:
    """Replaces the forward of this one block."""
    mlp = parts.mlp and shared_experts.settled(block._modules[parts.shared[0]], parts.mlp)
    beside = below(block, parts.experts, parts.router, *parts.shared)
    block.moe_ops_whole = Whole(parts, settings_of(block, *beside), mlp)
    forwards.replace(block, forward)


def uninstall(block: nn.Module) -> None:
    """Undoes `install`; other modules are left as they are."""
    if vars(block).pop("moe_ops_whole", None) is not None:
        forwards.restore(block)


def forward(self: Any, *args: Any, **named: Any) -> Any:
    """The forward of such blocks."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.training or named or len(args) != 1:
        return type(self).forward(self, *args, **named)
    how: Whole = self.moe_ops_whole
    if _library.autocasts(args[0]) or not _is_as_found(self, how):
        return type(self).forward(self, *args)
    return total(self, how.parts, args[0], how.shared)


def total(block: Any, parts: Parts, hidden_states: Tensor, mlp: shared_experts.Settled | None = None) -> Any:
    """The block's output, and what else it returns."""
    modules = block._modules
    router, own = modules[parts.router], modules[parts.experts]
    options: ExpertsOptions = own.moe_ops_options
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    given = getattr(block, parts.correction) if parts.correction else None
    routed = linear_router.arguments(router, tokens, given)
    args = FusedMoe(tokens, routed, experts.weights(own), Placement(), options.activation or "")
    emit = emitted(options.emit, options.save_for_backward)
    shared = _shared([modules[name] for name in parts.shared], tokens, None if emit == "stages" else mlp)
    if parts.returned != "weights" and not isinstance(shared, SharedExpert):
        output = run_moe(args, shared, emit).view(hidden_states.shape)
        return (output, routed.router_logits) if parts.returned else output
    weights, ids = _library.call(TopkRouting(routed))
    if isinstance(shared, SharedExpert):
        output = run_with_shared(args.routed(weights, ids), shared)
    else:
        output = run_experts(args.routed(weights, ids)._replace(shared=shared), emit)
    returned = {"weights": weights, "logits": routed.router_logits}.get(parts.returned)
    output = output.view(hidden_states.shape)
    return output if returned is None else (output, returned)


def _shared(
    modules: list[Any], tokens: Tensor, mlp: shared_experts.Settled | None
) -> Tensor | SharedExpert | None:
    if not modules:
        return None
    if mlp is not None:
        given = shared_experts.operand(modules[0], mlp, tokens, *(modules[1:] or [None]))
        if given is not None:
            return given
    output, *gates = [each(tokens) for each in modules]
    return gates[0].sigmoid() * output if gates else output


def _is_as_found(block: Any, how: Whole) -> bool:
    if has_global_hooks():  # of modules that are not called here
        return False
    modules = block._modules
    router, own = modules.get(how.parts.router), modules.get(how.parts.experts)
    if not (_runs(router, routers.forward) and _runs(own, experts.forward)):
        return False
    has_others = has_changed(block, how.settings) or has_changed(router, router.moe_ops_settings)
    return not has_others and experts.are_plain(own)


def _runs(module: Any, function: Any) -> bool:
    """Whether a call of the module is one of its replaced forward, and nothing else."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is function and not has_hooks(module)


def _are_plain(block: Any, own: str, options: ExpertsOptions) -> bool:
    is_own = not forwards.is_replaced(block) or forwards.current(block) is forward
    experts_module = block._modules[own]
    if not is_dispatched(experts_module) or quantised.has_scales(experts_module):
        return False
    return is_own and bool(options.activation)


def _known(block: Any, own: str, name: str, router: FoundRouter, options: ExpertsOptions) -> Parts | None:
    """What the block is the sum of; None where it is no such sum."""
    if router.known.forward is not linear_router.forward:
        return None
    with trial.trial_mode():
        twin, generator = twin_of(block, experts.weights(block._modules[own]).w13.weight.shape[0])
        linear_router.settled(twin._modules[name], router.known)
        hidden_size = _settled(twin._modules[own], options)
        tokens = tokens_of_all_sizes(generator, 10, 3, TOKENS // 3, hidden_size)
        wanted = run(type(twin).forward, twin, tokens)
        sums = _sums(twin, own, name, router.known.details)
        alike = (each for each in sums if are_close(wanted, run(_summing(each), twin, tokens)))
        parts = next(alike, None)
        if parts is None or not _is_everywhere(parts, twin, tokens):
            return None
        if not parts.shared:
            return parts
        shared, *gates = (twin._modules[name] for name in parts.shared)
        rows = tokens_of_all_sizes(generator, 100, TOKENS, hidden_size)
        if any(gate(rows).shape[1] != 1 for gate in gates):  # a weight of each column, not of a token
            return parts
        return replace(parts, mlp=shared_experts.known(shared, rows, options.activation or ""))


def _settled(twin: Any, options: ExpertsOptions) -> int:
    """Leaves experts that are tried as `patch` will, but for what runs them in their block's own code. Returns H."""
    twin.moe_ops_options = options
    twin.config = copy.copy(twin.config)
    twin.config._experts_implementation_internal = "eager"  # others may not take float64
    return experts.weights(twin).w13.weight.shape[2]


def _sums(block: Any, own: str, router: str, how: linear_router.Linear) -> Iterator[Parts]:
    others = [each for each in block._modules if each not in (router, own)]
    shared = [each for length in range(3) for each in permutations(others, length)]
    tensors = [*block._parameters, *block._buffers] if how.correction == "" else [""]
    for names, correction, returned in product(shared, tensors, get_args(Returned)):
        yield Parts(own, router, names, correction, returned)


def _is_everywhere(parts: Parts, twin: Any, tokens: Tensor) -> bool:
    """Whether the block is that sum for other tokens, with large experts and whatever is in tensors beside."""
    own, ours = type(twin).forward, _summing(parts)
    read = tuple(f"{name}." for name in (parts.experts, parts.router, *parts.shared))
    tensors = [*twin.named_parameters(), *twin.named_buffers()]
    others = [
        each.detach() for name, each in tensors if not name.startswith(read) and name != parts.correction
    ]
    large = [each.data for name, each in twin.named_parameters() if name.startswith((read[0], *read[2:]))]
    with trial.scaled(large, _LARGE):
        if not are_close(run(own, twin, tokens), run(ours, twin, tokens)):
            return False

    def holds() -> bool:
        return are_close(run(own, twin, tokens), run(ours, twin, tokens))

    is_same = all(is_same_everywhere(own, ours, twin, each) for each in other_batches(tokens))
    return is_same and trial.holds_whatever([*others, *trial.loose_tensors(twin)], holds)


def _summing(parts: Parts) -> Any:
    def summed(block: Any, hidden_states: Tensor) -> Any:
        return total(block, parts, hidden_states)

    return summed
