"""Blocks that loop over a list of experts, each a module, as models with remote code do: stacked into our layout.

What a block computes is tried, on a twin of small sizes: experts that only say which they are show how it routes, and
then its own forward and ours have to give the same, with gradients, in training as well. Weights are stacked only then.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import forwards, router_trial, trial
from layers.huggingface.blocks import Dbrx, known_block
from layers.huggingface.expert_modules import Mlp, activation_of, known_mlp
from layers.huggingface.outside import TOKENS, are_close, run, twin_of
from layers.huggingface.recognise import form
from layers.huggingface.router_trial import Output, Tried
from layers.huggingface.settled import expect_options, settings_of
from layers.huggingface.stacked import MaskedExperts, Part, StackedExperts
from moe_ops import RoutingConfig, topk_routing

_GATES = ("gate", "router")

_UNLIKE = "its experts are not alike"
_NO_MLP = "an expert is no MLP of two or three weights without biases, or does something else in training"
_NO_MASK = "its experts are not called with a mask and weights"
_NO_LOGITS = "no gate or router gives logits [T, E] by which every token gets as many experts"
_NO_SUM = (
    "its output is not the sum over experts by a RoutingConfig of its logits, alone or beside a shared expert, "
    "the same in training"
)
"""Why experts that are modules stay modules."""


@dataclass(frozen=True, slots=True)
class StackedBlock:
    """How a block around stacked experts computes, as its attribute `moe_ops_stacked`.

    Attributes:
        gate: name of the module that gives logits.
        routing: what is made of them.
        shared: name of the shared expert, or "".
        shared_gate: name of what a sigmoid of weighs it by, or "".
        returns_logits: beside the output.
    """

    gate: str
    routing: RoutingConfig
    shared: str = ""
    shared_gate: str = ""
    returns_logits: bool = False


def forward(self: Any, hidden_states: Tensor) -> Any:
    """The forward that blocks around stacked experts get."""
    how: StackedBlock = self.moe_ops_stacked
    expect_options(self, self.moe_ops_settings)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    router_logits = self.get_submodule(how.gate)(tokens)
    weights, ids = topk_routing(router_logits, how.routing)
    output = self.experts(tokens, ids, weights)
    if how.shared:
        shared = self.get_submodule(how.shared)(tokens)
        output = output + (
            shared * self.get_submodule(how.shared_gate)(tokens).sigmoid() if how.shared_gate else shared
        )
    output = output.view(hidden_states.shape)
    return (output, router_logits) if how.returns_logits else output


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
        if isinstance(experts, nn.Module) and not isinstance(experts, StackedExperts) and _is_plain(block):
            key = form(block)
            if key not in known:
                known[key] = _found(block)
            if why := _why_not(known[key], block.experts, uses):
                apart[name] = why
            elif known[key] is not None:
                _stack(block, *known[key])
    return apart


def resume(model: nn.Module) -> None:
    """Blocks that were stacked before, and come out of a pickle, get their forward again."""
    for block in model.modules():
        if "moe_ops_stacked" in vars(block) and not forwards.is_replaced(block):
            forwards.replace(block, forward)


def gates(model: nn.Module) -> dict[str, str]:
    """What blocks around stacked experts make of their logits, by the name of the module that gives them."""
    found: dict[str, str] = {}
    for name, block in model.named_modules():
        how: StackedBlock | None = vars(block).get("moe_ops_stacked")
        if how is not None:
            found[f"{name}.{how.gate}".lstrip(".")] = how.routing.spec
    return found


def unstack(block: Any) -> None:
    """Undoes `stack` for one block; others are left as they are."""
    experts = getattr(block, "experts", None)
    if isinstance(experts, StackedExperts):
        block.experts = experts.unstacked()
        if vars(block).pop("moe_ops_stacked", None) is not None:
            del block.moe_ops_settings
            forwards.restore(block)


def _is_plain(block: Any) -> bool:
    """Whether its weights are here, as plain tensors, and its forward its own."""
    inside = [each for each in block.experts.modules() if "_hf_hook" in vars(each)]
    parameters = list(block.experts.parameters())
    plain = all(type(each) is nn.Parameter and not each.is_meta for each in parameters)
    plain = plain and len({(each.dtype, each.device, each.requires_grad) for each in parameters}) == 1
    return plain and not inside and len(parameters) > 1 and not forwards.is_replaced(block)


def _uses(model: nn.Module) -> Counter[int]:
    """In how many places of the model each module and each parameter is, by id."""
    held = (kind for module in model.modules() for kind in (module._modules, module._parameters))
    return Counter(id(each) for kind in held for each in kind.values())


def _why_not(found: Any, experts: Any, uses: Counter[int]) -> str | None:
    """Why experts of which `found` says how they are rebuilt stay as they are."""
    if found is None or isinstance(found, str):
        return found
    return _why_apart(experts, uses)


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


def _found(block: Any) -> tuple[StackedBlock | None, Mlp | None] | str | None:
    """How the block is rebuilt around stacked experts; no `StackedBlock` where only its experts are replaced.

    Where it is not, why; None where it has no experts that are modules.
    """
    dense = known_block(block)
    if dense is not None and dense.kind is Dbrx:
        return StackedBlock("router", dense.routing), None
    experts = block.experts
    if not isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return None
    if len(set(map(form, experts.children()))) != 1:
        return _UNLIKE
    mlp = known_mlp(next(experts.children()))
    if mlp is None:
        return _NO_MLP
    if isinstance(experts, nn.ModuleDict):
        return (None, mlp) if _is_masked(experts, mlp) else _NO_MASK
    how = _known_loop(block, mlp)
    return how if isinstance(how, str) else (how, mlp)


def _is_masked(experts: Any, mlp: Mlp) -> bool:
    """Whether it is called with a mask [T, 1, E] and weights [T, 1]."""
    num_experts = len(experts)
    with trial.trial_mode():
        twin, generator = twin_of(experts, num_experts)
        hidden_size = next(twin.children()).get_parameter(mlp.down).shape[0]
        chosen = torch.randint(0, num_experts + 1, (TOKENS, 1), generator=generator)
        mask = torch.nn.functional.one_hot(chosen, num_experts + 1)[..., :-1]
        weights = torch.rand(TOKENS, 1, generator=generator, dtype=torch.float64)
        tokens = torch.randn(TOKENS, hidden_size, generator=generator, dtype=torch.float64)
        own = run(type(twin).forward, twin.train(), tokens, mask, weights)
        ours = run(MaskedExperts.forward, _stacked(twin, mlp, MaskedExperts), tokens, mask, weights)
        return are_close(own, ours)


def _known_loop(block: Any, mlp: Mlp) -> StackedBlock | str:
    """How the block computes, or why it is not rebuilt."""
    num_experts = len(block.experts)
    gate = next((name for name in _GATES if isinstance(getattr(block, name, None), nn.Module)), "")
    with trial.trial_mode():
        tried = _probed(block, gate, mlp, num_experts) if gate else None
        if tried is None:
            return _NO_LOGITS
        for how in _ways(block, gate, tried):
            twin, generator = twin_of(block, num_experts)
            hidden_size = next(twin.experts.children()).get_parameter(mlp.down).shape[0]
            tokens = torch.randn(3, TOKENS // 3, hidden_size, generator=generator, dtype=torch.float64)
            own = run(type(twin).forward, twin, tokens)
            if not _reads_no_more(how, twin, tokens, own):
                continue
            trained = run(type(twin).forward, twin.train(), tokens)
            twin.experts = _stacked(twin.experts, mlp, StackedExperts)
            twin.moe_ops_stacked, twin.moe_ops_settings = how, settings_of(twin)
            if are_close(own, run(forward, twin, tokens)) and are_close(own, trained):
                return how
    return _NO_SUM


def _reads_no_more(how: StackedBlock, twin: Any, tokens: Tensor, own: list[Tensor]) -> bool:
    read = tuple(f"{name}." for name in ("experts", how.gate, how.shared, how.shared_gate) if name)
    tensors = [*twin.named_parameters(), *twin.named_buffers()]
    others = [each.detach() for name, each in tensors if not name.startswith(read)]
    return trial.holds_whatever(others, lambda: are_close(own, run(type(twin).forward, twin, tokens)))


def _ways(block: Any, gate: str, tried: Tried) -> Iterator[StackedBlock]:
    """Ways to route that give a token the experts that the block gives it, with what else it may have."""
    shared = [name for name, _ in block.named_children() if "shared" in name]
    shared_gates = ["", *(name for name in shared if "gate" in name)]
    for routing in router_trial.configs(tried, None):
        for name in ["", *(name for name in shared if "gate" not in name)]:
            for shared_gate in shared_gates if name else [""]:
                for returns_logits in (False, True):
                    yield StackedBlock(gate, routing, name, shared_gate, returns_logits)


class _Probe(nn.Module):
    """An expert that says which it is."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, hidden_states: Tensor) -> Tensor:
        said = torch.zeros_like(hidden_states)
        if 0 <= self.place < hidden_states.shape[-1]:
            said[..., self.place] = 1
        return said


def _probed(block: Any, gate: str, mlp: Mlp, num_experts: int) -> Tried | None:
    """The weight of every expert for every token, as the block's own forward applies it."""
    twin, generator = twin_of(block, num_experts)
    hidden_size = next(twin.experts.children()).get_parameter(mlp.down).shape[0]
    tokens = torch.randn(1, 3 * TOKENS, hidden_size, generator=generator, dtype=torch.float64)
    tokens = tokens * torch.logspace(-1, 1, tokens.shape[1], dtype=torch.float64)[:, None]
    starts = range(0, num_experts, hidden_size)
    try:
        logits = trial.in_float64(getattr(twin, gate), tokens[0]).detach()
        silent = _output(twin, tokens, [-1] * num_experts)
        said = [
            _output(twin, tokens, [expert - start for expert in range(num_experts)]) - silent
            for start in starts
        ]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None
    weights = torch.cat(said, -1)[:, :num_experts]
    counts = (weights != 0).sum(-1)
    if logits.shape != weights.shape or int(counts.min()) != int(counts.max()) or not int(counts[0]):
        return None
    chosen = weights[weights != 0].view(len(weights), -1)
    output = Output(logits, weights, chosen, (), torch.empty(0), (), chosen.shape[1])
    return Tried(twin, tokens, (), output)


def _output(twin: Any, tokens: Tensor, places: list[int]) -> Tensor:
    twin.experts = nn.ModuleList(map(_Probe, places))
    returned = trial.in_float64(type(twin).forward, twin, tokens)
    output = returned[0] if isinstance(returned, tuple) else returned
    return output.detach().reshape(tokens.shape[1], -1)


def _stack(block: Any, how: StackedBlock | None, mlp: Mlp | None) -> None:
    if mlp is None:
        block.experts = _joined(block.experts)
    else:
        kind = MaskedExperts if how is None else StackedExperts
        block.experts = _stacked(block.experts, mlp, kind)
    if how is not None:
        block.moe_ops_stacked, block.moe_ops_settings = how, settings_of(block)
        forwards.replace(block, forward)


def _stacked(experts: Any, mlp: Mlp, kind: type[StackedExperts]) -> StackedExperts:
    """The experts in two tensors; each one's weights are freed when they have been copied."""
    children = dict(experts.named_children())
    first = next(iter(children.values()))
    act = activation_of(first, mlp)
    size = first.get_parameter(mlp.up).shape[0]
    upper = (
        [(mlp.gate, slice(0, size)), (mlp.up, slice(size, 2 * size))] if mlp.gate else [(mlp.up, slice(size))]
    )
    name = "gate_up_proj" if mlp.gate else "up_proj"
    parts = [
        Part(f"{child}.{weight}", parameter, (place, rows))
        for place, child in enumerate(children)
        for weight, parameter, rows in [
            *((weight, name, rows) for weight, rows in upper),
            (mlp.down, "down_proj", slice(None)),
        ]
    ]
    down = first.get_parameter(mlp.down)
    shapes = {name: (len(upper) * size, down.shape[0]), "down_proj": tuple(down.shape)}
    tensors = {key: down.new_empty(len(children), *shape) for key, shape in shapes.items()}
    for part in parts:
        weight = experts.get_parameter(part.name)
        part.of(tensors[part.parameter]).copy_(weight.data)
        weight.data = weight.data.new_empty(0)
    up, down = (nn.Parameter(tensor, down.requires_grad) for tensor in tensors.values())
    return kind(up, down, act, parts, experts)


def _joined(experts: Any) -> StackedExperts:
    """dbrx's, of three tensors [E * I, H]."""
    mlp, num_experts = experts.mlp, experts.num_experts
    size = mlp.w1.shape[0] // num_experts
    every = slice(None)
    parts = (
        Part("mlp.w1", "gate_up_proj", (every, slice(0, size))),
        Part("mlp.v1", "gate_up_proj", (every, slice(size, 2 * size))),
        Part("mlp.w2", "down_proj", (every, every), is_transposed=True),
    )
    up = mlp.w1.new_empty(num_experts, 2 * size, mlp.w1.shape[1])
    down = mlp.w2.data.unflatten(0, (num_experts, size)).transpose(1, 2)
    for part in parts[:2]:
        weight = experts.get_parameter(part.name)
        part.of(up).copy_(weight.data.unflatten(0, (num_experts, size)))
        weight.data = weight.data.new_empty(0)
    requires_grad = mlp.w2.requires_grad
    stacked = nn.Parameter(up.detach(), requires_grad), nn.Parameter(down, requires_grad)
    return StackedExperts(*stacked, mlp.activation_fn, parts, experts)
