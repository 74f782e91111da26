"""Experts in a list, each a module, as models with remote code have them: stacked into our layout.

What their block computes is tried first (`loop_trial.py`). Weights are stacked only then.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import forwards, loop_trial, loops, trial
from layers.huggingface.blocks import Dbrx, known_block
from layers.huggingface.expert_modules import Mlp, known_mlp
from layers.huggingface.loops import StackedBlock
from layers.huggingface.outside import TOKENS, are_close, run, tokens_of_all_sizes, twin_of
from layers.huggingface.recognise import form
from layers.huggingface.settled import below, is_watched, settings_of
from layers.huggingface.stacked import MaskedExperts, StackedExperts, of_modules, of_rows
from moe_ops import RoutingConfig

_UNLIKE = "its experts are not alike"
_NO_MLP = "an expert is no MLP of two or three weights without biases, or does something else in training"
_NO_MASK = "its experts are called neither with ids and weights nor with a mask and weights"
_NOT_HERE = (
    "its experts have hooks of accelerate, or weights on the meta device: expected weights that can be copied"
)
"""Why experts that are modules stay modules."""
_OWN_GATE = "it chooses experts itself, by its own code"


def stack(model: nn.Module) -> dict[str, str]:
    """Stacks the experts of every block that we can rebuild; the others stay as they are.

    Returns:
        By name of the block, why experts stay apart: its code computes something else, or something would be lost that
        is no weight.
    """
    known: dict[Any, Any] = {}
    apart: dict[str, str] = {}
    uses = _uses(model)
    for name, block in list(model.named_modules()):
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module) or isinstance(experts, StackedExperts) or not _is_plain(block):
            continue
        if why := _why_not_together(experts):
            apart[name] = why
            continue
        key = form(block)
        if key not in known:
            known[key] = _found(block)
        if why := _why_not(known[key], block, uses):
            apart[name] = why
        elif known[key] is not None:
            _stack(block, *known[key])
    return apart


def resume(model: nn.Module) -> None:
    """Blocks that were stacked before, and come out of a pickle, get their forward again."""
    for block in model.modules():
        if "moe_ops_stacked" in vars(block) and not forwards.is_replaced(block):
            forwards.replace(block, loops.forward)


def gates(model: nn.Module) -> dict[str, str]:
    """What blocks around stacked experts make of their logits, by the name of the module that gives them."""
    return {name: how.routing.spec for name, how in _gates(model) if isinstance(how.routing, RoutingConfig)}


def own_gates(model: nn.Module) -> dict[str, str]:
    """Gates of such blocks that choose experts themselves, by name, with the reason why they stay."""
    chosen = {name: how for name, how in _gates(model) if not isinstance(how.routing, RoutingConfig)}
    return dict.fromkeys(chosen, _OWN_GATE)


def _gates(model: nn.Module) -> Iterator[tuple[str, StackedBlock]]:
    for name, block in model.named_modules():
        how: StackedBlock | None = vars(block).get("moe_ops_stacked")
        if how is not None:
            yield f"{name}.{how.gate}".lstrip("."), how


def expect_bare(model: nn.Module) -> None:
    """Raises ValueError where a wrapper (PEFT's) is around stacked experts: modules could not come back behind it."""
    bare = {id(block._modules.get("experts")) for block in model.modules()}
    for name, module in model.named_modules():
        if name and isinstance(module, StackedExperts) and id(module) not in bare:
            raise ValueError(
                f"{name} is stacked, and inside a wrapper: expected it without, as after PEFT's merge_and_unload"
            )


def unstack(block: Any) -> None:
    """Undoes `stack` for one block; others are left as they are."""
    experts = getattr(block, "experts", None)
    if isinstance(experts, StackedExperts):
        block.experts = experts.unstacked()
        if vars(block).pop("moe_ops_stacked", None) is not None:
            del block.moe_ops_settings
            forwards.restore(block)


def _is_plain(block: Any) -> bool:
    """Whether its weights are plain tensors, and its forward its own."""
    parameters = list(block.experts.parameters())
    plain = all(type(each) is nn.Parameter for each in parameters)
    return plain and len(parameters) > 1 and not forwards.is_replaced(block)


def _why_not_together(experts: nn.Module) -> str | None:
    """Why weights cannot be in one tensor, whatever is computed with them."""
    parameters = list(experts.parameters())
    has_hooks = any("_hf_hook" in vars(each) for each in experts.modules())
    if has_hooks or any(each.is_meta for each in parameters):
        return _NOT_HERE
    kinds = sorted({f"{each.dtype} on {each.device} ({_trains(each)})" for each in parameters})
    return None if len(kinds) == 1 else f"its experts' weights are {' and '.join(kinds)}: expected one kind"


def _trains(parameter: Tensor) -> str:
    return "trained" if parameter.requires_grad else "frozen"


def _uses(model: nn.Module) -> Counter[int]:
    """In how many places of the model each module and each parameter is, by id."""
    held = (kind for module in model.modules() for kind in (module._modules, module._parameters))
    return Counter(id(each) for kind in held for each in kind.values())


def _why_not(found: Any, block: Any, uses: Counter[int]) -> str | None:
    """Why experts of which `found` says how they are rebuilt stay as they are."""
    if found is None or isinstance(found, str):
        return found
    how: StackedBlock | None = found[0]
    for name in () if how is None else _not_called(block, how):
        if is_watched(block.get_submodule(name)):
            return f"{name} has hooks or a forward of its own, and would not be called"
    return _why_apart(block.experts, uses)


def _not_called(block: nn.Module, how: StackedBlock) -> tuple[str, ...]:
    """Paths of modules of a block that are not called when its experts are stacked."""
    return below(block, *filter(None, ("experts", how.gate, how.shared, how.shared_gate)))


def _why_apart(experts: Any, uses: Counter[int]) -> str | None:
    """What is known of experts beside the numbers in their weights, and would be lost."""
    modules = dict(experts.named_modules(prefix="experts"))
    weights = dict(experts.named_parameters(prefix="experts"))
    for name, module in modules.items():
        if forwards.is_replaced(module):
            return f"the forward of {name} has been replaced on the instance"
    for name, each in (modules | weights).items():
        if _has_hooks(each):
            return f"{name} has hooks, which stacked experts would not run"
        has_weights = isinstance(each, Tensor) or next(each.parameters(), None) is not None
        if has_weights and uses[id(each)] > 1:
            return f"{name} is in more than one place of the model"
    return None


def _has_hooks(each: nn.Module | Tensor) -> bool:
    if isinstance(each, nn.Module):
        return any(kept and "_hooks" in name for name, kept in vars(each).items())
    return bool(each._backward_hooks or each._post_accumulate_grad_hooks)


_Found = tuple[StackedBlock | None, Mlp | None, type[StackedExperts]]


def _found(block: Any) -> _Found | str | None:
    """How the block is rebuilt around stacked experts; no `StackedBlock` where only its experts are replaced.

    Where it is not, why; None where it has no experts that are modules.
    """
    dense = known_block(block)
    if dense is not None and dense.kind is Dbrx:
        return StackedBlock("router", dense.routing), None, StackedExperts
    experts = block.experts
    if not isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return None
    if len(set(map(form, experts.children()))) != 1:
        return _UNLIKE
    mlp = known_mlp(next(experts.children()))
    if mlp is None:
        return _NO_MLP
    if loop_trial.calls_with_ids(block, mlp):
        return None, mlp, StackedExperts
    if isinstance(experts, nn.ModuleDict):
        return (None, mlp, MaskedExperts) if _is_masked(experts, mlp) else _NO_MASK
    how = loop_trial.known_loop(block, mlp)
    return how if isinstance(how, str) else (how, mlp, StackedExperts)


def _is_masked(experts: Any, mlp: Mlp) -> bool:
    """Whether it is called with a mask [T, 1, E] and weights [T, 1]."""
    num_experts = len(experts)
    with trial.trial_mode():
        twin, generator = twin_of(experts, num_experts)
        hidden_size = next(twin.children()).get_parameter(mlp.down).shape[0]
        chosen = torch.randint(0, num_experts + 1, (TOKENS, 1), generator=generator)
        mask = torch.nn.functional.one_hot(chosen, num_experts + 1)[..., :-1]
        weights = torch.rand(TOKENS, 1, generator=generator, dtype=torch.float64)
        tokens = tokens_of_all_sizes(generator, 100, TOKENS, hidden_size)
        own = run(type(twin).forward, twin.train(), tokens, mask, weights)
        ours = run(MaskedExperts.forward, of_modules(twin, mlp, MaskedExperts), tokens, mask, weights)
        return are_close(own[:3], ours[:3])  # weights are others' gradients


def _stack(block: Any, how: StackedBlock | None, mlp: Mlp | None, kind: type[StackedExperts]) -> None:
    own = block.experts
    with torch.inference_mode(False):  # of which tensors neither train nor load weights later
        block.experts = of_rows(own) if mlp is None else of_modules(own, mlp, kind)
    if how is not None:
        block.moe_ops_stacked, block.moe_ops_settings = how, settings_of(block, *_not_called(block, how))
        forwards.replace(block, loops.forward)
