"""One checkpoint tensor into the parameters of `FusedMoE`, and the names to look for: what model loaders call.

Shards: "w1" is the gate, "w3" the up projection, "w2" the down projection. w1 and w3 are the two halves of `w13`
(alternating rows when the activation is interleaved); both are split by rows over a tensor-parallel group, each on
its own, and w2 by columns. A parameter with the attribute `is_transposed` is stored and loaded the other way round.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from layers._checks import expect_choice, expect_positive, expect_type
from layers.balancing import experts_at
from layers.weights.scales import INPUT_SCALES, WeightScale
from moe_ops._checks import expect_dense

ShardId = Literal["w1", "w2", "w3"]
ParamsMapping = list[tuple[str, str, int, str]]

_SINGLE_VALUES = ("input_scale", "weight_shape")
_SCALES = ("scale", "zero", "offset")
_DIMS_OF_ALL = {"weight": 3, "scale": 3, "bias": 2}  # of a fused checkpoint's tensors


def expert_params_mapping(
    gate: str, down: str, up: str, num_experts: int, num_redundant: int
) -> ParamsMapping:
    """See `FusedMoE.make_expert_params_mapping`."""
    expect_positive("num_experts", num_experts)
    if not isinstance(num_redundant, int) or num_redundant < 0:
        raise ValueError(f"num_redundant_experts={num_redundant!r}: expected an int >= 0")
    shards = (("w1", gate, "w13"), ("w2", down, "w2"), ("w3", up, "w13"))
    return [
        (f"experts.{param}_", f"experts.{physical % num_experts}.{name}.", physical, shard_id)
        for physical in range(num_experts + num_redundant)
        for shard_id, name, param in shards
    ]


def load_expert_weight(
    module: Any, param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
) -> bool:
    """See `FusedMoE.weight_loader`: True when `param` changed, False when the weight belongs elsewhere."""
    for name, tensor in (("param", param), ("loaded_weight", loaded_weight)):
        expect_type(name, tensor, Tensor)
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: expected memory with values, or for them")
    if param.grad_fn is not None:  # of a parametrisation or pruning, which computes it again
        raise ValueError("param is computed of other tensors: expected a parameter, to be written to")
    expect_dense("loaded_weight", loaded_weight)
    expect_type("weight_name", weight_name, str)
    expect_choice("shard_id", shard_id, ShardId)
    if param.dim() == 0:
        raise ValueError("param has shape (): expected the experts in its first dimension")
    _expect_shard_of(module, param, shard_id)
    if shard_id == "w3" and not module.config.activation.is_gated:
        raise ValueError(f"shard_id='w3': activation {module.config.activation.name!r} has no up projection")
    kind = _kind(weight_name)
    if kind is None:
        return False
    _check_dtype(param, loaded_weight, weight_name)
    pairs = _expert_pairs(module, param, loaded_weight, kind, expert_id)
    with torch.no_grad():
        for expert_data, weight in pairs:
            _LOADERS[kind](module, param, expert_data, weight, shard_id)
    return bool(pairs)


def _expect_shard_of(module: Any, param: Tensor, shard_id: str) -> None:
    """A parameter that is larger takes the other's matrices as well, as padded ones do."""
    names = (name for name, each in module.named_parameters(recurse=False) if each is param)
    name = next(names, "")  # some callers load into tensors of their own
    for prefix, shards in (("w13_", ("w1", "w3")), ("w2_", ("w2",))):
        if name.startswith(prefix) and shard_id not in shards:
            expected = " or ".join(map(repr, shards))
            raise ValueError(f"shard_id={shard_id!r} with param={name}: expected {expected}")


def _kind(weight_name: str) -> str | None:
    if "weight_global_scale" in weight_name:
        raise ValueError(f"{weight_name} is what weights are divided by: expected 1 / it, as weight_scale_2")
    if any(part in weight_name for part in _SINGLE_VALUES):
        return "single"
    if "g_idx" in weight_name:
        return "g_idx"
    if any(part in weight_name for part in _SCALES):
        return "scale"
    if "bias" in weight_name:
        return "bias"
    return "weight" if "weight" in weight_name else None


def _check_dtype(param: Tensor, loaded: Tensor, weight_name: str) -> None:
    plain = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if param.dtype != loaded.dtype and not {param.dtype, loaded.dtype} <= set(plain):
        raise TypeError(
            f"{weight_name} has dtype {loaded.dtype}: expected {param.dtype}, that of the parameter"
        )


def _expert_pairs(
    module: Any, param: Tensor, loaded: Tensor, kind: str, expert_id: int
) -> list[tuple[Tensor, Tensor]]:
    """(the expert's part of the parameter, its weight): one pair, or all experts of a fused checkpoint."""
    if kind == "single" and _is_one_of(module, param, INPUT_SCALES):
        return [(param.data[_logical(module, expert_id)], loaded)]
    local_of, here = module.expert_map, _memory_of(module, param, kind)
    if here.shape[0] != module.num_local_experts:
        raise ValueError(
            f"param has {here.shape[0]} experts: expected {module.num_local_experts}, those here"
        )
    is_fused = loaded.dim() == _DIMS_OF_ALL.get(kind)
    if not is_fused:
        known = param.shape[0] if local_of is None else local_of.shape[0]
        _expect_expert(expert_id, known)
        local = expert_id if local_of is None else int(local_of[expert_id])
        return [] if local < 0 else [(here[local], loaded)]
    places = range(param.shape[0]) if local_of is None else local_of.tolist()
    num_experts = module.config.num_experts
    if loaded.shape[0] not in (num_experts, len(places)):
        raise ValueError(f"loaded_weight has shape {tuple(loaded.shape)}: expected {num_experts} experts")
    weights = (loaded[expert] for expert in experts_at(module.balancing, len(places), loaded.shape[0]))
    return [(here[local], weight) for local, weight in zip(places, weights, strict=True) if local >= 0]


def _is_one_of(module: Any, param: Tensor, names: tuple[str, ...]) -> bool:
    return any(module._parameters.get(name) is param for name in names)


def _logical(module: Any, expert_id: int) -> int:
    """Of what ranks have of all experts: that of a place is its expert's."""
    num_places, num_experts = module.config.num_physical_experts, module.config.num_experts
    _expect_expert(expert_id, num_places)
    return experts_at(module.balancing, num_places, num_experts)[expert_id]


def _expect_expert(expert_id: int, known: int) -> None:
    if not isinstance(expert_id, int) or isinstance(expert_id, bool) or not 0 <= expert_id < known:
        raise ValueError(f"expert_id={expert_id!r}: expected an expert in [0, {known})")


def _memory_of(module: Any, param: Any, kind: str) -> Tensor:
    """What is here of a parameter: of a DTensor its part, if a style of `layers.parallel` made it, and nothing else."""
    if not is_distributed(param):
        return param.data
    if module.parallel is None or param.device_mesh.ndim > 1:
        raise TypeError(
            "param is a DTensor: expected a plain tensor, or one that a style of layers.parallel made"
        )
    return part_here(param, 2 if kind == "bias" else 3)


def is_distributed(parameter: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(parameter, "placements")


def part_here(parameter: Any, num_dims: int) -> Tensor:
    """The memory of a DTensor of experts that is here, gate rows followed by up rows."""
    local = parameter.detach().to_local()
    return local if local.dim() <= num_dims else local.flatten(1, 2)  # a scale of a matrix has fewer


def _load_single(module: Any, param: Tensor, expert_data: Tensor, weight: Tensor, shard_id: str) -> None:
    if expert_data.shape == (2,) and weight.numel() == 1:  # gate and up have one each
        expert_data = _value_of(shard_id, expert_data)
    if weight.numel() != expert_data.numel():
        _copy(expert_data, weight)  # raises
    expert_data.copy_(weight.reshape(expert_data.shape))


def _value_of(shard_id: str, expert_data: Tensor) -> Tensor:
    if shard_id == "w2":
        return expert_data
    place = int(shard_id == "w3")
    if expert_data.dim() == 0 or len(expert_data) <= place:
        raise ValueError(
            f"param has {tuple(expert_data.shape)} per expert: expected one value for each of gate and up"
        )
    return expert_data[place]


def _load_group_index(module: Any, param: Tensor, expert_data: Tensor, weight: Tensor, shard_id: str) -> None:
    _copy(expert_data, module.shard.of(weight, 0) if shard_id == "w2" else weight)


def _load_bias(module: Any, param: Tensor, expert_data: Tensor, weight: Tensor, shard_id: str) -> None:
    if shard_id != "w2":
        _expect_shape("bias", weight, (module.config.intermediate_size,))
        _copy_padded(_half(module, expert_data, shard_id, -1), module.shard.of(weight, -1))
    elif module.shard.rank == 0 or is_distributed(param):  # a DTensor's is whole on all ranks
        _expect_shape("bias", weight, (module.config.expert_hidden_size,))
        _copy_padded(expert_data, weight)
    else:
        expert_data.zero_()  # the ranks' outputs are summed, and the bias counts once


def _load_weight(module: Any, param: Tensor, expert_data: Tensor, weight: Tensor, shard_id: str) -> None:
    dim, copy = _sharded_dim(param, shard_id), _copy
    if param.is_floating_point():  # else packed integers, which are fewer than the matrix has, and not padded
        shape = (module.config.intermediate_size, module.config.expert_hidden_size)
        _expect_shape("weight", weight, shape if dim == -2 else shape[::-1])
        copy = _copy_padded
    copy(_half(module, expert_data, shard_id, dim), module.shard.of(weight, dim))


def _load_scale(module: Any, param: Tensor, expert_data: Tensor, weight: Tensor, shard_id: str) -> None:
    kind = WeightScale.of(param, module)
    dim = _sharded_dim(param, shard_id)
    if kind is WeightScale.TENSOR:
        _load_single(module, param, _value_of(shard_id, expert_data), weight, shard_id)
    elif shard_id == "w2" and (kind is WeightScale.CHANNEL or getattr(param, "load_full_w2", False)):
        _copy(expert_data, weight)
    else:
        _copy(_half(module, expert_data, shard_id, dim), module.shard.of(weight, dim))


_LOADERS = {
    "single": _load_single,
    "g_idx": _load_group_index,
    "bias": _load_bias,
    "weight": _load_weight,
    "scale": _load_scale,
}


def _sharded_dim(param: Tensor, shard_id: str) -> int:
    return -1 if (shard_id == "w2") != getattr(param, "is_transposed", False) else -2


def _half(module: Any, expert_data: Tensor, shard_id: str, dim: int) -> Tensor:
    """Where a shard goes: half of w13, or all of w2 and of an ungated w1."""
    activation = module.config.activation
    if shard_id == "w2" or not activation.is_gated:
        return expert_data
    if expert_data.dim() < -dim or not expert_data.shape[dim] or expert_data.shape[dim] % 2:
        raise ValueError(
            f"param has {tuple(expert_data.shape)} per expert: expected gate and up, as many each, in dimension {dim}"
        )
    size = module.shard.local_size("intermediate_size", module.config.intermediate_size)
    if activation.interleaved and expert_data.shape[dim] < 2 * size:
        raise ValueError(
            "activation.interleaved=True: expected False, blocks and packed integers would hold rows of gate and up"
        )
    return gate_or_up(expert_data, dim, is_up=shard_id == "w3", interleaved=activation.interleaved)


def gate_or_up(tensor: Tensor, dim: int, *, is_up: bool, interleaved: bool) -> Tensor:
    """The gate's or the up projection's part of dimension `dim`, counted from the last; a view."""
    if interleaved:
        return tensor.unflatten(dim, (-1, 2)).select(dim, int(is_up))
    return tensor.chunk(2, dim)[int(is_up)]


def _expect_shape(name: str, loaded: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(loaded.shape) != expected:
        raise ValueError(f"loaded {name} has shape {tuple(loaded.shape)}: expected {expected}")


def _copy(target: Tensor, loaded: Tensor) -> None:
    if loaded.shape != target.shape:
        raise ValueError(
            f"loaded_weight has {tuple(loaded.shape)} for this rank: expected {tuple(target.shape)}"
        )
    target.copy_(loaded)


def _copy_padded(target: Tensor, loaded: Tensor) -> None:
    """Like `_copy`; where the parameter is larger, as padded ones are, the rest becomes zero."""
    if loaded.dim() != target.dim() or any(a > b for a, b in zip(loaded.shape, target.shape)):
        _copy(target, loaded)  # raises
    inner = target
    for dim, size in enumerate(loaded.shape):
        inner = inner.narrow(dim, 0, size)
    if inner.shape != target.shape:
        target.zero_()
    inner.copy_(loaded)
