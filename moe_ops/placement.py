"""map_replicas: from logical experts to physical ones, which hold them; map_and_record: and how often each was chosen.

    hash(token)     = token * 2654435769 mod 2^32       (with a seed: mixed with it, so that choices look random)
    physical[t, k]  = logical_to_physical[e, hash(t) % replica_count[e]],   e = topk_ids[t, k]
    load[p]        += how many slots of the first `num_real_tokens` tokens have physical expert p, if `is_recording`

T tokens, K experts per token, E logical experts, P physical ones, R the most replicas that one may have. The choice
depends on the token alone, so every rank makes the same one and all slots of a token agree. `topk_routing` comes
before; `build_dispatch` and `fused_experts` take the result, whose ids count physical experts.

`map_and_record` changes an argument in place, `load`; no other operator changes any. It is one launch, and sums of
integers are exact in any order. All that it reads lies on the device: no host sync, static shapes, and a captured or
compiled graph sees a new placement that is written into the same tensors.
"""

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import LoadRecord, MapAndRecord, MapReplicas, Replicas
from moe_ops.errors import value_error

_GOLDEN_RATIO = 2654435769  # 2^32 / phi: Knuth's multiplicative hash
_LOW_32_BITS = 0xFFFFFFFF


def map_replicas(
    topk_ids: Tensor,
    logical_to_physical: Tensor,
    replica_count: Tensor,
    *,
    seed: Tensor | None = None,
    load: Tensor | None = None,
    num_real_tokens: Tensor | None = None,
    is_recording: Tensor | None = None,
) -> Tensor:
    """Chooses a replica of every expert, and counts the choices.

    Args:
        topk_ids: [T, K] int32 or int64, logical experts.
        logical_to_physical: [E, R] int32, the physical experts that hold a logical one; -1 where there is none.
        replica_count: [E] int32, how many of a row of `logical_to_physical` count.
        seed: [] int32 or int64. Without it neighbouring tokens take turns; with it a token's replica looks random, and
            is the same for the same seed.
        load: [P] int32 or int64, changed in place: grows by the slots of each physical expert.
        num_real_tokens: [] int32 or int64, tokens that are no padding and count in `load`; None for all.
        is_recording: [] bool, whether anything counts; None for always.

    Returns:
        [T, K] int32, physical experts. -1 for an id outside [0, E), and for an expert without a replica.

    Raises:
        ValueError: wrong rank or size, no expert or no replica, tensors on different devices; `num_real_tokens` or
            `is_recording` without `load`.
        TypeError: wrong dtype.

    Not differentiable. `torch.vmap` takes batches of ids only, and adds up their loads.

    Example:
        >>> weights, ids = moe_ops.topk_routing(logits, routing)
        >>> ids = moe_ops.map_replicas(ids, logical_to_physical, replica_count, load=load)
    """
    choice = MapReplicas(topk_ids, Replicas(logical_to_physical, replica_count), seed)
    if load is not None:
        return _library.call(MapAndRecord(choice, LoadRecord(load, num_real_tokens, is_recording)))
    for name, tensor in (("num_real_tokens", num_real_tokens), ("is_recording", is_recording)):
        if tensor is not None:
            value_error("{} without load: expected a tensor [P] to record load in", name)
    return _library.call(choice)


def _check(args: MapReplicas) -> None:
    _checks.expect_index("topk_ids", args.topk_ids)
    _checks.expect_shape("topk_ids", args.topk_ids, ("T", "K"))
    check_replicas(args.replicas, args.seed, args.topk_ids.device, "topk_ids")


def _check_recorded(args: MapAndRecord) -> None:
    _check(args.choice)
    check_record(args.record, args.choice.topk_ids.device, "topk_ids")


def check_replicas(replicas: Replicas, seed: Tensor | None, device: torch.device, reference: str) -> None:
    """The checks of replica maps and a seed, which are to be on `device`, that of the argument called `reference`."""
    experts, counts = replicas
    _checks.expect_index("logical_to_physical", experts, (torch.int32,))
    _checks.expect_shape("logical_to_physical", experts, ("E", "R"))
    if 0 in experts.shape:
        shape = list(experts.shape)
        value_error("logical_to_physical has shape {}: expected at least one replica of an expert", shape)
    _checks.expect_index("replica_count", counts, (torch.int32,))
    _checks.expect_shape("replica_count", counts, (experts.shape[0],))
    _check_scalar("seed", seed, _checks.INDEX_DTYPES)
    _checks.expect_same_device(device, reference, seed=seed, **replicas._asdict())


def check_record(record: LoadRecord, device: torch.device, reference: str) -> None:
    """The checks of where load is recorded; as in `check_replicas`."""
    load, num_real_tokens, is_recording = record
    _checks.expect_index("load", load)
    _checks.expect_shape("load", load, ("P",))
    _check_scalar("num_real_tokens", num_real_tokens, _checks.INDEX_DTYPES)
    _check_scalar("is_recording", is_recording, (torch.bool,))
    _checks.expect_same_device(device, reference, **record._asdict())


def _check_scalar(name: str, tensor: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor is not None:
        _checks.expect_index(name, tensor, dtypes)
        _checks.expect_shape(name, tensor, ())


def _reference(args: MapReplicas) -> Tensor:
    (experts, counts), ids = args.replicas, args.topk_ids.long()
    known = (ids >= 0) & (ids < experts.shape[0])
    ids = ids.masked_fill(~known, 0)
    count = counts[ids].clamp(0, experts.shape[1])
    turn = token_hash(ids.shape[0], args.seed, ids.device).unsqueeze(1)
    physical = experts[ids, turn % count.clamp(min=1)]
    return physical.masked_fill(~known | (count == 0), -1).clamp(min=-1)


def reference_recorded(args: MapAndRecord) -> Tensor:
    """The definition of `map_and_record`, in plain PyTorch."""
    load, num_real_tokens, is_recording = args.record
    physical = _reference(args.choice)
    counts = (physical >= 0) & (physical < load.shape[0])
    if num_real_tokens is not None:
        counts &= (torch.arange(physical.shape[0], device=physical.device) < num_real_tokens).unsqueeze(1)
    if is_recording is not None:
        counts &= is_recording
    added = physical[counts].bincount(minlength=load.shape[0])
    with torch.inference_mode(load.is_inference()):  # a tensor made in inference mode changes in no other
        load += added
    return physical


def token_hash(num_tokens: int, seed: Tensor | None, device: torch.device) -> Tensor:
    """[T] int64 in [0, 2^32): a number for each token, the same on every device and rank."""
    hashed = torch.arange(num_tokens, device=device) * _GOLDEN_RATIO & _LOW_32_BITS
    return hashed if seed is None else mix_bits(hashed ^ (seed.long() & _LOW_32_BITS))


def mix_bits(bits: Tensor) -> Tensor:
    """Numbers in [0, 2^32), each bit of which depends on all bits of `bits` [...] int64, which are such numbers too.

    The finaliser of MurmurHash3.
    """
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _LOW_32_BITS
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _LOW_32_BITS
    return bits ^ (bits >> 16)


def _cuda(args: MapReplicas) -> Tensor:
    return _fake(args) if args.topk_ids.numel() == 0 else _library.launch(args)


def _cuda_recorded(args: MapAndRecord) -> Tensor:
    if args.choice.topk_ids.numel() == 0:
        return _fake(args.choice)
    note_change(args.record.load)
    return _library.launch(args)


def note_change(load: Tensor) -> None:
    """Tells autograd what a kernel does to `load`, which it does not see."""
    if not load.is_inference():
        torch.autograd.graph.increment_version(load)


def _fake(args: MapReplicas) -> Tensor:
    return args.topk_ids.new_empty(args.topk_ids.shape, dtype=torch.int32)


def _fake_recorded(args: MapAndRecord) -> Tensor:
    return _fake(args.choice)


_library.define(MapReplicas, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)
_library.define(
    MapAndRecord,
    "Tensor",
    check=_check_recorded,
    cpu=reference_recorded,
    cuda=_cuda_recorded,
    fake=_fake_recorded,
)
_autograd.define_no_gradient(MapReplicas)
_autograd.define_no_gradient(MapAndRecord)
_library.define_vmap(MapReplicas)
_library.define_vmap(MapAndRecord)
