"""Experts that were modules of their own, in two tensors, under the names that they had.

A state dict has, and takes, what the modules had: each of their weights is a part of a stacked one, in its memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from layers.huggingface.expert_modules import Mlp, activation_of
from layers.huggingface.experts import experts_forward, settle, settled_activation
from moe_ops._compat import is_past_autograd
from moe_ops.errors import value_error

_NOT_PATCHED = (
    "experts are stacked, but their block runs its own code, as out of a pickle: "
    "expected layers.huggingface.patch(model) first"
)
_NO_MODULE = f"to take one: expected layers.huggingface.unpatch(model) first, which brings modules back; {_NOT_PATCHED}"


class Part(NamedTuple):
    """Where one weight of before lies.

    Attributes:
        name: of the weight, among the experts.
        parameter: of the stacked experts.
        place: of it, [experts, rows].
        is_transposed: experts [E, I, H] in a row.
    """

    name: str
    parameter: str
    place: tuple[int | slice, slice]
    is_transposed: bool = False

    def of(self, stacked: Tensor) -> Tensor:
        """The part, a view."""
        experts, rows = self.place
        if stacked.dim() == 4:  # [E, 2, I, H]: gate and up apart, where ranks share every expert
            return stacked[experts][..., rows.start // stacked.shape[2], :, :]
        part = stacked[experts, rows]
        return part.transpose(-1, -2) if self.is_transposed else part

    def weight(self, stacked: Tensor) -> Tensor:
        """The part in two dimensions, as it was before."""
        part = self.of(stacked)
        return _by_experts(part).flatten(0, 1) if part.dim() == 3 else part


def _by_experts(part: Tensor) -> Tensor:
    """[E, I, H] of which E * I rows can be made: of a DTensor, that only views its memory, whole experts in a copy.

    Each rank has as many of them, for DTensors make one dimension only of even parts; or all.
    """
    if not isinstance(part, DTensor):
        return part
    mesh, is_even = part.device_mesh, part.shape[0] % part.device_mesh.size() == 0
    if not is_even or any(each.is_shard() and not each.is_shard(0) for each in part.placements):
        placement = Shard(0) if is_even and mesh.ndim == 1 else Replicate()
        part = part.redistribute(placements=[placement] * mesh.ndim)
    return part.clone(memory_format=torch.contiguous_format)


class StackedExperts(nn.Module):
    """E experts with a gate and without biases, or without a gate.

    Args:
        up: [E, 2I, H], gate rows first, or [E, I, H] without a gate.
        down: [E, H, I].
        act_fn: of the gate columns, or of all where there is no gate.
        parts: the weights of before.
        before: what held them. It is kept for `unpatch`, without weights.
    """

    has_bias = is_transposed = False
    is_concatenated = True

    def __init__(
        self, up: nn.Parameter, down: nn.Parameter, act_fn: Any, parts: Sequence[Part], before: nn.Module
    ) -> None:
        super().__init__()
        self.training = before.training
        self.has_gate = up.shape[1] == 2 * down.shape[2]
        self.register_parameter("gate_up_proj" if self.has_gate else "up_proj", up)
        self.down_proj = down
        self.num_experts = down.shape[0]
        self.act_fn = act_fn
        self.moe_ops_parts = tuple(parts)
        self.moe_ops_before = (before,)  # in a tuple, so that it is no module of this one
        self.moe_ops_options = settle(self, "auto", "auto", settled_activation(self))
        self.register_state_dict_post_hook(_rename)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] to [T, H], by ids and weights [T, K]."""
        if hidden_states.dim() != 2:  # dbrx's own code
            value_error(_NOT_PATCHED)
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def __getitem__(self, index: Any) -> nn.Module:
        """For a block's own code, which takes or goes through its experts one by one."""
        raise ValueError(_NO_MODULE)

    def __len__(self) -> int:
        """As the list of before; what comes next in such code is an expert."""
        return self.num_experts

    def unstacked(self) -> nn.Module:
        """What held the weights before, with them: views of the stacked ones."""
        before = self._before_with(lambda part: part.weight(self.get_parameter(part.parameter).data))
        return before if before.training == self.training else before.train(self.training)

    def _before_with(self, weight: Callable[[Part], Tensor]) -> nn.Module:
        (before,) = self.moe_ops_before
        for part in self.moe_ops_parts:
            owner, _, name = part.name.rpartition(".")
            requires_grad = self.get_parameter(part.parameter).requires_grad
            setattr(before.get_submodule(owner), name, nn.Parameter(weight(part), requires_grad))
        return before

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """What held the weights before loads them, by its names; what it has then is put together."""
        rest = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        of_modules = tuple(f"{prefix}{name}." for name in self._modules)
        ours = {key: value for key, value in state_dict.items() if key.startswith(of_modules)}
        theirs = {key: value for key, value in state_dict.items() if key not in ours}
        wholes = {name: _whole(parameter) for name, parameter in self.named_parameters(recurse=False)}
        before = self._before_with(lambda part: part.weight(wholes[part.parameter].detach()))
        _load(before, theirs, prefix, *rest)
        for name, whole in wholes.items():
            parts = [part for part in self.moe_ops_parts if part.parameter == name]
            weights = [before.get_parameter(part.name).detach() for part in parts]
            is_assigned = local_metadata.get("assign_to_params_buffers", False) and any(
                prefix + part.name in theirs for part in parts
            )
            if is_assigned and (why := _why_not_assigned(whole, weights)):
                error_msgs.append(f"{prefix}{name} {why}")
            else:
                whole = _joined(whole, parts, weights, is_assigned)
            ours[prefix + name] = whole
        self._before_with(lambda part: torch.empty(0))
        super()._load_from_state_dict(ours, prefix, *rest)


class MaskedExperts(StackedExperts):
    """Experts told by a mask [T, 1, E], at most one for a token (Switch)."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] to [T, H], by a mask and weights [T, 1]."""
        is_chosen, ids = top_k_index.max(-1)
        return experts_forward(self, hidden_states, ids.masked_fill(is_chosen == 0, -1), top_k_weights)


def _rename(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    stacked = {name: state_dict.pop(prefix + name) for name, _ in module.named_parameters(recurse=False)}
    for part in module.moe_ops_parts:
        state_dict[prefix + part.name] = _alone(part.weight(stacked[part.parameter]))


def _alone(weight: Tensor) -> Tensor:
    """The same memory, as if there were no more of it: safetensors' `save_model` takes no part of a storage."""
    is_plain = type(weight) is Tensor and is_past_autograd([weight]) and not torch.compiler.is_compiling()
    if not is_plain or weight.is_meta or not weight.is_contiguous():
        return weight
    if weight.is_cpu and weight.is_shared():  # which a slice would not be
        return weight
    start, size = weight.storage_offset() * weight.element_size(), weight.numel() * weight.element_size()
    storage: Any = weight.untyped_storage()[start : start + size]
    return weight.new_empty(0).set_(storage, 0, weight.shape, weight.stride())


def _load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """As `nn.Module.load_state_dict` does for a module inside another."""
    module._load_from_state_dict(state_dict, prefix, *rest)
    for name, child in module._modules.items():
        if child is not None:
            below = f"{prefix}{name}."
            _load(
                child, {key: each for key, each in state_dict.items() if key.startswith(below)}, below, *rest
            )


def _whole(parameter: Tensor) -> Tensor:
    """With all experts; of a DTensor a copy for this rank."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim).detach()


def _why_not_assigned(whole: Tensor, weights: list[Tensor]) -> str | None:
    if any(isinstance(each, DTensor) for each in (whole, *weights)):
        return "is shared by ranks: expected assign=False"
    kinds = sorted({f"{each.dtype} on {each.device}" for each in weights})
    return None if len(kinds) == 1 else f"has parts in {' and '.join(kinds)}: expected one dtype and device"


def _joined(whole: Tensor, parts: list[Part], weights: list[Tensor], is_assigned: bool) -> Tensor:
    """Weights in one tensor: `whole`, of which they are views unless they were assigned."""
    first, target = weights[0], whole.detach()
    if is_assigned:
        target = torch.empty_like(target, dtype=first.dtype, device=first.device)
    for part, weight in zip(parts, weights, strict=True):
        place = part.of(target)
        if is_assigned or place.dim() == 3:  # experts in a row may have been copied
            place.copy_(weight.reshape(place.shape))
    return target if is_assigned else whole


def of_modules(experts: Any, mlp: Mlp, kind: type[StackedExperts]) -> StackedExperts:
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


def of_rows(experts: Any) -> StackedExperts:
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
