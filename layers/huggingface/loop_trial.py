"""How a block computes that loops over a list of experts, found by trying it on a twin of small sizes.

A gate that gives ids and weights, as those of DeepSeek's remote code do, is called as it is. Behind one that gives
logits, experts that only say which they are show how the block routes. Then the block's own forward and ours have to
give the same, with gradients, in training as well.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import loops, precisions, probes, router_trial, trial
from layers.huggingface.expert_modules import Mlp
from layers.huggingface.loops import Choice, Given, StackedBlock
from layers.huggingface.outside import TOKENS, other_batches, tokens_of_all_sizes, twin_of
from layers.huggingface.settled import get, settings_of
from layers.huggingface.stacked import StackedExperts, of_modules
from moe_ops import RoutingConfig

_GATES = ("gate", "router")
_IDS = (torch.int64, torch.int32)

_MODES = (False, True)
_LARGE = 64.0  # to the third power in what an expert gives; a power of two, so that weights come back
_Question = Callable[[], bool]
_NO_CHOICE = (
    "no gate or router gives logits [T, E] by which every token gets as many experts, nor ids and weights "
    "[T, K]"
)
_NO_SUM = (
    "its output is not the sum over experts by a RoutingConfig of its logits, or by what its gate chooses, alone or "
    "beside a shared expert"
)
_OTHER_IN_TRAINING = (
    "in training it gives something else than the sum over experts that it gives in evaluation"
)
_OTHER_ELSEWHERE = (
    "for few tokens, many that want the same experts, some expert, or without gradients it gives something else than "
    "the sum over experts"
)
"""Why experts that are modules stay modules."""


def known_loop(block: Any, mlp: Mlp) -> StackedBlock | str:
    """How the block computes, or why it is not rebuilt."""
    more = list(inspect.signature(type(block).forward).parameters)[2:]
    if more:
        return f"its forward takes more than hidden states: {', '.join(more)}"
    gate = next((name for name in _GATES if isinstance(getattr(block, name, None), nn.Module)), "")
    with trial.trial_mode():
        twin, ours, inputs = _twins(block, mlp)
        ours.moe_ops_settings = settings_of(ours)
        own = _run_all(type(twin).forward, twin, inputs)
        if isinstance(own[0], str):
            return f"its own code cannot be tried: {own[0]}"
        trained = _run_all(type(twin).forward, twin.train(), inputs)
        trains = not _raises(twin, inputs[0].clone())
        routed = _routed(block, twin.eval(), gate, inputs[0], mlp) if gate else None
        if routed is None:
            return _NO_CHOICE
        why, elsewhere = _NO_SUM, _elsewhere(twin, ours, gate, inputs[0], _MODES[: 1 + trains])
        for how in _ways(block, gate, routed, own[0], trains):
            ours.moe_ops_stacked = how
            if not _is_sum(how, twin, ours, inputs, own):
                continue
            if trains and not _are_alike(trained, _run_all(loops.forward, ours.train(), inputs)):
                why = _OTHER_IN_TRAINING
            elif not _hold(elsewhere):
                why = _OTHER_ELSEWHERE
            elif (settled := precisions.settled(how, twin, ours, inputs[0])) is not None:
                return settled
    return why


def _is_sum(
    how: StackedBlock, twin: Any, ours: Any, inputs: Sequence[Tensor], own: Sequence["_Ran | str"]
) -> bool:
    """Whether ours gives in evaluation what the block gave, of what it is said to read and whatever its size."""
    read = [f"{name}." for name in ("experts", how.shared) if name]
    is_alike = _are_alike(own, _run_all(loops.forward, ours.eval(), inputs))
    is_alike = is_alike and _reads_no_more(how, twin, inputs, own)
    return is_alike and _are_large(twin, ours, inputs, read, loops.forward)


def _elsewhere(twin: Any, ours: Any, gate: str, tokens: Tensor, modes: Sequence[bool]) -> list[_Question]:
    """Whether ours gives the same for other tokens, without gradients and for every expert."""
    others, given = other_batches(tokens), product(modes, (True, False))
    return [
        *(partial(_is_alike_in, each, twin, ours, others, loops.forward) for each in given),
        *_visits(twin, ours, gate, tokens),
    ]


def _hold(questions: list[_Question]) -> bool:
    """Whether all do. What does not is asked first the next time: ways that are one here are one there."""
    for place, holds in enumerate(questions):
        if not holds():
            questions.insert(0, questions.pop(place))
            return False
    return True


def _twins(block: Any, mlp: Mlp) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """Two twins alike, one with stacked experts, and hidden states for them, of many tokens and of one."""
    (twin, generator), (ours, _) = twin_of(block, len(block.experts)), twin_of(block, len(block.experts))
    ours.experts = of_modules(ours.experts, mlp, StackedExperts)
    hidden_size = ours.experts.down_proj.shape[1]
    tokens = tokens_of_all_sizes(generator, 10, 3, TOKENS // 3, hidden_size)
    return twin, ours, (tokens, tokens[-1:, -1:])  # one token may go another way


def calls_with_ids(block: Any, mlp: Mlp) -> bool:
    """Whether experts have a forward of their own, which the block calls as it would stacked ones."""
    if type(block.experts).forward is nn.Module.forward:
        return False
    with trial.trial_mode():
        twin, ours, inputs = _twins(block, mlp)
        forward = type(twin).forward
        is_alike = _are_everywhere(twin, ours, [*inputs, *other_batches(inputs[0])], forward)
        return is_alike and _are_large(twin, ours.eval(), inputs, ["experts."], forward)


def _visits(twin: Any, ours: Any, gate: str, tokens: Tensor) -> list[_Question]:
    """Whether both are alike in evaluation for tokens of every expert, where the gate has a weight for each."""
    unit = tokens * (tokens.shape[-1] ** 0.5 / tokens.norm(dim=-1, keepdim=True))
    weights: list[Any] = [getattr(getattr(each, gate), "weight", None) for each in (twin, ours)]
    num_experts = len(twin.experts)
    if any(not isinstance(each, Tensor) or each.shape != (num_experts, tokens.shape[-1]) for each in weights):
        return []

    def visit(start: int) -> bool:
        with trial.scaled([each.data[start : start + 4] for each in weights], 4.0):
            own = _run(type(twin).forward, twin.eval(), unit)
            return _is_alike(own, _run(loops.forward, ours.eval(), unit))

    return [partial(visit, start) for start in range(0, num_experts, 4)]


def _are_everywhere(twin: Any, ours: Any, inputs: Sequence[Tensor], forward: Callable[..., Any]) -> bool:
    """Whether both are alike for all of these, in both modes, with gradients and without."""
    return all(_is_alike_in(each, twin, ours, inputs, forward) for each in product(_MODES, (True, False)))


def _is_alike_in(
    modes: tuple[bool, bool], twin: Any, ours: Any, inputs: Sequence[Tensor], forward: Callable[..., Any]
) -> bool:
    """Whether both are alike in training or not, with gradients or without."""
    is_training, has_gradients = modes
    with torch.set_grad_enabled(has_gradients):
        own = _run_all(type(twin).forward, twin.train(is_training), inputs)
        return _are_alike(own, _run_all(forward, ours.train(is_training), inputs))


def _are_large(
    twin: Any, ours: Any, inputs: Sequence[Tensor], read: Sequence[str], forward: Callable[..., Any]
) -> bool:
    """Whether both are alike in evaluation where experts give large numbers: limits on the output show."""
    grown = [
        each.data
        for module in (twin.eval(), ours)
        for name, each in module.named_parameters()
        if name.startswith(tuple(read))
    ]
    with trial.scaled(grown, _LARGE):
        return _are_alike(_run_all(type(twin).forward, twin, inputs), _run_all(forward, ours, inputs))


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a forward gave: its output, that one's gradients, by parameters as well, and what else it returned."""

    output: Tensor
    gradient: Tensor
    gradients: dict[str, Tensor]
    more: tuple[Any, ...] | None


def _run_all(run: Callable[..., Any], twin: Any, inputs: Sequence[Tensor]) -> list[_Ran | str]:
    return [_run(run, twin, each) for each in inputs]


def _run(run: Callable[..., Any], twin: Any, tokens: Tensor) -> _Ran | str:
    """What a forward returns in float64; why it cannot be told, where it cannot."""
    leaf = tokens.clone().requires_grad_()
    try:
        returned = trial.run(run, twin, leaf.clone())  # no leaf, so that it may be changed in place
        output, *more = returned if type(returned) is tuple else (returned,)  # none with names
        if not isinstance(output, Tensor):
            return f"it returns a {type(output).__name__}, not its output or a tuple that begins with it"
        gradient, gradients = _gradients(output, leaf, twin)
    except (ValueError, RuntimeError) as error:
        return repr(error.__cause__ or error)
    return _Ran(output.detach(), gradient, gradients, tuple(more) if type(returned) is tuple else None)


def _gradients(output: Tensor, leaf: Tensor, twin: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the tokens and, by the names that they had before experts were stacked, of the parameters."""
    parameters = dict(twin.named_parameters())
    inputs = [leaf, *parameters.values()]
    given: Sequence[Tensor | None] = [None] * len(inputs)
    if output.requires_grad:
        weight = torch.linspace(0.5, 2, output.numel(), dtype=torch.float64).view(output.shape)
        given = torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True)
    pairs = zip(inputs, given, strict=True)
    gradient, *rest = [torch.zeros_like(each) if found is None else found for each, found in pairs]
    gradients = dict(zip(parameters, rest, strict=True))
    if isinstance(twin.experts, StackedExperts):
        for part in twin.experts.moe_ops_parts:
            gradients[f"experts.{part.name}"] = part.of(gradients[f"experts.{part.parameter}"])
    return gradient, gradients


def _raises(twin: Any, tokens: Tensor) -> bool:
    try:
        trial.in_float64(type(twin).forward, twin, tokens)
    except ValueError:
        return True
    return False


def _are_alike(own: Sequence[_Ran | str], ours: Sequence[_Ran | str]) -> bool:
    return all(map(_is_alike, own, ours))


def _is_alike(own: _Ran | str, ours: _Ran | str) -> bool:
    if isinstance(own, str) or isinstance(ours, str):
        return False
    pairs = [(ours.output, own.output), (ours.gradient, own.gradient)]
    pairs += [(ours.gradients[name].flatten(), each.flatten()) for name, each in own.gradients.items()]
    return all(trial.close(*pair) for pair in pairs) and _is_same(own.more, ours.more)


def _is_same(own: Any, ours: Any) -> bool:
    if isinstance(own, tuple) and isinstance(ours, tuple):
        return len(own) == len(ours) and all(map(_is_same, own, ours))
    if isinstance(own, Tensor) and isinstance(ours, Tensor):
        return trial.close(ours, own)
    return type(own) is type(ours) and own == ours


def _reads_no_more(how: StackedBlock, twin: Any, inputs: Sequence[Tensor], own: Sequence[_Ran | str]) -> bool:
    read = tuple(f"{name}." for name in ("experts", how.gate, how.shared, how.shared_gate) if name)
    tensors = [*twin.named_parameters(), *twin.named_buffers()]
    others = [each.detach() for name, each in tensors if not name.startswith(read) and name != how.correction]
    others += trial.loose_tensors(twin)
    return trial.holds_whatever(others, lambda: _are_alike(own, _run_all(type(twin).forward, twin, inputs)))


_Routed = tuple[RoutingConfig | Choice, str, tuple[Any, ...]]
"""What a block makes of what its gate gives, its selection bias, and what the gate gave."""


def _ways(block: Any, gate: str, routed: list[_Routed], own: _Ran, trains: bool) -> Iterator[StackedBlock]:
    """Ways to route that give a token the experts that the block gives it, with what else it may have."""
    shared = [name for name, _ in block.named_children() if "shared" in name]
    every = [name for name in shared if "gate" not in name]
    beside = [("", ""), *product(every, ["", *(name for name in shared if "gate" in name)])]
    for routing, correction, given in routed:
        losses = range(len(given)) if isinstance(routing, Choice) else ()
        for (name, shared_gate), is_detached, loss in product(beside, (False, True), (-1, *losses)):
            returned = None if own.more is None else _told(own.more, given)
            yield StackedBlock(
                gate, routing, correction, name, shared_gate, loss, is_detached, trains, returned
            )


_PLAIN = (type(None), bool, int, float, str)
_UNKNOWN = "what no gate gives"


def _told(value: Any, given: tuple[Any, ...]) -> Any:
    """Where what a block returns comes from. Plain values stand for themselves."""
    if isinstance(value, tuple):
        return tuple([_told(each, given) for each in value])
    if isinstance(value, Tensor) and value.dim() > 1:
        for place, each in enumerate(given):
            if isinstance(each, Tensor) and each.numel() == value.numel():
                if trial.close(each.reshape(value.shape), value):
                    return Given(place, value.dim() == 3)
    return value if isinstance(value, _PLAIN) else _UNKNOWN


def _routed(block: Any, twin: Any, gate: str, tokens: Tensor, mlp: Mlp) -> list[_Routed] | None:
    """What may be made of what the gate gives; None where that is nothing to choose experts by."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    of_experts = [name for name, each in tensors if each.numel() == len(block.experts)]
    corrections = ["", *(name for name in of_experts if not name.startswith(("experts.", f"{gate}.")))]
    if choices := list(_choices(twin, gate, tokens, corrections)):
        return choices
    tried = probes.weights(block, gate, mlp, len(block.experts))
    if tried is None:
        return None
    logits = _given(getattr(twin, gate), tokens.flatten(0, 1))
    biases = {name: get(tried.twin, name).detach().flatten() if name else None for name in corrections}
    return [
        (routing, name, logits)
        for name, bias in biases.items()
        for routing in router_trial.configs(tried, bias)
    ]


def _choices(twin: Any, gate: str, tokens: Tensor, corrections: list[str]) -> Iterator[_Routed]:
    """Ways to call a gate that chooses."""
    for correction, takes_tokens in product(corrections, (False, True)):
        states = tokens.flatten(0, 1) if takes_tokens else tokens
        given = _given(getattr(twin, gate), states.clone(), *([get(twin, correction)] if correction else []))
        for ids, weights in _places(given, tokens):
            yield Choice(ids, weights, takes_tokens), correction, given


def _given(gate: Any, *args: Tensor) -> tuple[Any, ...]:
    try:
        returned = trial.in_float64(gate, *args)
    except ValueError:
        return ()
    return returned if isinstance(returned, tuple) else (returned,)


def _places(given: tuple[Any, ...], tokens: Tensor) -> Iterator[tuple[int, int]]:
    """Where ids and weights may be, [T, K] or [B, S, K]."""
    tensors = [(place, each) for place, each in enumerate(given) if isinstance(each, Tensor)]
    rows = tokens.shape[0] * tokens.shape[1]
    for (ids, first), (weights, second) in permutations(tensors, 2):
        are_kinds = first.dtype in _IDS and second.is_floating_point()
        if are_kinds and first.shape == second.shape and first.dim() > 1 and first[..., 0].numel() == rows:
            yield ids, weights
