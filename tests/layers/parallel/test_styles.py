"""`parallelize_module` on blocks: values, gradients, state dicts and training of the block of one device."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from layers import ExpertsConfig, FusedMoE, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig, TensorShard
from layers.parallel import ExpertParallel, ExpertRanks, ExpertTensorParallel, clip_grad_norm_
from layers.parallel.styles import part_of_all_gather
from moe_ops import Activation, RoutingConfig
from tests.helpers import assert_matches_oracle, assert_same, usually
from tests.layers import oracle
from tests.layers.parallel.world import on_ranks

E, K, H, I = 8, 2, 16, 24
INTERLEAVED = {"activation": Activation("swiglu_oai", interleaved=True), "has_bias": True}
OPTIONS = {
    "plain": {"has_bias": True, "shared_experts": SharedExpertConfig(40, "sigmoid")},
    "gpt_oss": INTERLEAVED,
    "ungated": {"activation": "relu2", "has_bias": True},
    "deepseek_v3": {
        "routing": RoutingConfig(K, "sigmoid", renorm_eps=1e-20, scale=2.5),
        "router": RouterConfig(has_correction_bias=True, scale_on="output", has_expert_scale=True),
        "shared_experts": SharedExpertConfig(40),
    },
    "llama4": {
        "top_k": 1,
        "routing": RoutingConfig(1, "sigmoid", renormalize=False),
        "router": RouterConfig(weight_on="input"),
    },
    "longcat": {"experts": ExpertsConfig(num_zero_experts=3, chunk_size=4)},
    "latent": {"experts": ExpertsConfig(latent_size=8, padded_size=12)},
}
STYLES = {
    "allgather": ExpertParallel("allgather"),
    "allgather_static": ExpertParallel("allgather", max_tokens=9),
    "alltoall": ExpertParallel("alltoall"),
    "alltoall_static": ExpertParallel("alltoall", max_tokens=9),
    "auto": ExpertParallel(),
    "allreduce": ExpertParallel("allreduce"),
    "tensor": ExpertTensorParallel(),
    "tensor_allgather": ExpertTensorParallel("allgather", max_tokens=9),
}
SAME_TOKENS = ("allreduce", "tensor")
styles = pytest.mark.parametrize("style", STYLES)
COMPILED = usually(STYLES, ("allgather", "alltoall_static"))


def make_block(dtype=torch.float32, **options) -> MoEBlock:
    torch.manual_seed(3)
    fields = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I, **options}
    block = MoEBlock(MoEConfig(**fields), dtype=dtype)
    torch.nn.init.normal_(block.gate.weight, std=1.0)
    return block


def mesh_of_all(name="ep"):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def parallel(block: MoEBlock, style: str) -> MoEBlock:
    return parallelize_module(copy.deepcopy(block), mesh_of_all(), {"experts": STYLES[style]})


def tokens_of(rank: int, style: str, dtype=torch.float32):
    """Rank 1 has none."""
    rank = 0 if style in SAME_TOKENS else rank
    count = 0 if rank == 1 else 9 - rank
    return torch.randn(count, H, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@on_ranks(2, 4)
@styles
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "llama4"])
def test_values(style, name):
    block, hidden = make_block(**OPTIONS[name]), tokens_of(dist.get_rank(), style)
    out = parallel(block, style)(hidden)
    assert_matches_oracle(out, oracle.block(block, hidden))


@on_ranks(2)
@styles
def test_one_expert_per_token_weighed_before_it(style):
    block, hidden = make_block(**OPTIONS["llama4"]), tokens_of(dist.get_rank(), style)
    assert_matches_oracle(parallel(block, style)(hidden), oracle.block(block, hidden))


@on_ranks(4)
@styles
def test_a_rank_whose_experts_nobody_chooses(style):
    block, hidden = make_block(**OPTIONS["llama4"]), tokens_of(dist.get_rank(), style)
    assert_matches_oracle(parallel(block, style)(hidden), oracle.block(block, hidden))


@on_ranks(2)
@styles
def test_gradients(style):
    block = make_block(torch.float64, **OPTIONS["plain"])
    sharded, rank = parallel(block, style), dist.get_rank()
    hidden = tokens_of(rank, style, torch.float64).requires_grad_()
    loss(sharded(hidden)).backward()
    ranks = [0] if style in SAME_TOKENS else range(dist.get_world_size())
    expected = [tokens_of(each, style, torch.float64).requires_grad_() for each in ranks]
    for each in expected:
        loss(block(each)).backward()
    assert_same([hidden.grad], [expected[rank if len(expected) > 1 else 0].grad])
    for name, parameter in sharded.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            assert grad.placements == parameter.placements or not grad.placements[0].is_shard()
            grad = grad.full_tensor().reshape(block.get_parameter(name).shape)
        elif len(ranks) > 1:
            dist.all_reduce(grad)
        assert_same([grad], [block.get_parameter(name).grad])


def loss(out):
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@on_ranks(2)
@styles
def test_a_state_dict_has_all_experts(style):
    block = make_block(**OPTIONS["plain"])
    state = parallel(block, style).state_dict()
    assert list(state) == list(block.state_dict())
    for name, tensor in block.state_dict().items():
        assert torch.equal(whole(state[name]).reshape(tensor.shape), tensor), name
    experts = {name: state[f"experts.{name}"] for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias")}
    assert all(isinstance(tensor, DTensor) for tensor in experts.values())
    if not style.startswith("tensor"):
        assert all(tensor.to_local().shape[0] == E // 2 for tensor in experts.values())
    else:
        assert experts["w13_weight"].shape == (E, 2, I, H)
        assert experts["w13_weight"].to_local().shape == (E, 2, I // 2, H)
        assert experts["w2_weight"].to_local().shape == (E, H, I // 2)
        assert experts["w2_bias"].placements == (Replicate(),)


@on_ranks(4)
@pytest.mark.parametrize(
    "style, other", [("alltoall", "allgather"), ("tensor", "tensor"), ("allgather", None)]
)
def test_checkpoints_are_those_of_any_number_of_ranks(style, other, tmp_path):
    block, fresh = make_block(**OPTIONS["plain"]), make_block(**OPTIONS["plain"])
    fresh.reset_parameters()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    pairs = parallelize_module(copy.deepcopy(block), mesh["ep"], {"experts": STYLES[style]})
    checkpoint.save(pairs.state_dict(), checkpoint_id=tmp_path)
    fresh = fresh if other is None else parallel(fresh, other)
    state = fresh.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    fresh.load_state_dict(state)
    for name, tensor in fresh.state_dict().items():
        expected = block.state_dict()[name]
        assert torch.equal(whole(tensor).reshape(expected.shape), expected), name


@on_ranks(2)
@pytest.mark.parametrize("style", COMPILED)
def test_compiled(style):
    block, hidden = make_block(**OPTIONS["deepseek_v3"]), tokens_of(0, style)
    function = torch.compile(parallel(block, style), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        assert_matches_oracle(function(hidden), oracle.block(block, hidden))


@on_ranks(4)
@pytest.mark.parametrize("style", ["allgather", "alltoall", "tensor"])
def test_fully_sharded_blocks_train_like_a_plain_one(style):
    """Experts over ep and dp, the rest over all ranks, for which the gradient of a mean is one over all."""
    mesh, plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), make_block(**OPTIONS["plain"])
    rank = mesh["dp"].get_local_rank() if style in SAME_TOKENS else dist.get_rank()
    sharded = parallelize_module(copy.deepcopy(plain), mesh["ep"], {"experts": STYLES[style]})
    fully_shard(sharded.experts, mesh=mesh["dp"])
    senders = 2 if style in SAME_TOKENS else 4
    fully_shard(sharded, mesh=mesh["dp"] if style in SAME_TOKENS else mesh["dp", "ep"]._flatten("all"))
    sharded.experts.set_gradient_divide_factor(float(senders))
    sharded.experts.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide
    tokens = torch.randn(senders, 6, H)
    for _ in range(2):
        step(plain, tokens.flatten(0, 1), 1 / senders)
        step(sharded, tokens[rank], 1.0)
    for name, parameter in sharded.named_parameters():
        expected = plain.get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor().view(expected.shape), expected, msg=name)


def step(block, hidden, scale):
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    (block(hidden).square().sum() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
@styles
def test_experts_are_clipped_together(style):
    block = make_block(**OPTIONS["plain"])
    sharded, hidden = parallel(block, style), tokens_of(0, style)
    loss(sharded(hidden)).backward()
    for _ in range(1 if style in SAME_TOKENS else 2):
        loss(block(hidden)).backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.experts.parameters(), 0.5) for each in (sharded, block)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    for name, parameter in sharded.experts.named_parameters():
        expected = block.experts.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor().view(expected.shape), expected)


@on_ranks(2)
@styles
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_blocks_are_clipped_whole(style, norm_type):
    block = make_block(**OPTIONS["plain"])
    sharded, ranks = parallel(block, style), [0] if style in SAME_TOKENS else [0, 1]
    tokens = torch.randn(2, 5, H)
    loss(sharded(tokens[dist.get_rank() if len(ranks) > 1 else 0])).backward()
    for rank in ranks:
        loss(block(tokens[rank])).backward()
    for parameter in sharded.parameters():
        if len(ranks) > 1 and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
    found = clip_grad_norm_(sharded.parameters(), 0.5, norm_type)
    torch.testing.assert_close(found, torch.nn.utils.clip_grad_norm_(block.parameters(), 0.5, norm_type))
    for name, parameter in sharded.named_parameters():
        expected = block.get_parameter(name).grad
        torch.testing.assert_close(whole(parameter.grad).view(expected.shape), expected)


def test_nothing_to_clip():
    assert clip_grad_norm_(torch.ones(3), 1.0) == clip_grad_norm_([], 1.0) == 0


@on_ranks(2)
def test_from_the_meta_device():
    block = make_block(**OPTIONS["plain"])
    empty = parallelize_module(
        MoEBlock(block.config, device="meta"), mesh_of_all(), {"experts": STYLES["alltoall"]}
    )
    empty.to_empty(device="cpu")
    sharded = parallel(block, "alltoall")
    empty.load_state_dict(sharded.state_dict())
    hidden = tokens_of(0, "alltoall")
    assert torch.equal(empty(hidden), sharded(hidden))


@on_ranks(2)
@pytest.mark.parametrize(
    "style, options, message",
    [
        ("auto", {"num_experts": 7}, "num_experts=7: expected a multiple of 2 ranks"),
        (
            "tensor",
            {"intermediate_size": 25},
            "intermediate_size=25: expected a multiple of the shard's size=2",
        ),
        ("auto", {"experts": ExpertsConfig(post_norm_eps=0.1)}, "experts.post_norm_eps=0.1: expected None"),
        (
            "auto",
            {"shared_experts": SharedExpertConfig(8, overlap=True)},
            "shared_experts.overlap=True: expected",
        ),
    ],
)
def test_layers_that_cannot_be_sharded(style, options, message):
    with pytest.raises(ValueError, match=message):
        parallel(make_block(**options), style)


@on_ranks(2)
def test_only_experts_are_sharded_and_only_once():
    block = make_block()
    with pytest.raises(
        TypeError, match=r"module=MoEBlock: expected FusedMoE, such as 'experts' of a MoEBlock"
    ):
        parallelize_module(block, mesh_of_all(), ExpertParallel())
    parallelize_module(block, mesh_of_all(), {"experts": ExpertParallel()})
    with pytest.raises(ValueError, match="module holds a part of its experts: expected all of them"):
        parallelize_module(block, mesh_of_all(), {"experts": ExpertParallel()})
    with pytest.raises(TypeError, match="w13_weight is a DTensor: expected a plain parameter"):
        parallelize_module(fully_shard(make_block().experts), mesh_of_all(), ExpertParallel())
    half = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1])
    for part in (FusedMoE(block.config, half), FusedMoE(block.config, shard=TensorShard(0, 2))):
        with pytest.raises(ValueError, match="module holds a part of its experts: expected all of them"):
            parallelize_module(part, mesh_of_all(), ExpertParallel())


@on_ranks(2)
def test_layers_that_differ_between_ranks():
    options = {"activation": ["silu", "gelu"][dist.get_rank()]}
    with pytest.raises(
        ValueError, match=r"config differs between ranks: .*silu.* on rank 0; .*gelu.* on rank 1;"
    ):
        parallel(make_block(**options), "auto")
    with pytest.raises(
        ValueError, match="dispatcher differs between ranks: 'allgather' on rank 0; 'alltoall' on"
    ):
        parallel(make_block(), ["allgather", "alltoall"][dist.get_rank()])


@pytest.mark.parametrize(
    "style, arguments, message",
    [
        (ExpertParallel, {"dispatcher": "x"}, "dispatcher='x': expected one of 'auto'"),
        (ExpertParallel, {"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        (
            ExpertParallel,
            {"dispatcher": "allreduce", "max_tokens": 3},
            "max_tokens=3 with dispatcher='allreduce'",
        ),
        (
            ExpertTensorParallel,
            {"dispatcher": "alltoall"},
            "dispatcher='alltoall': expected one of 'allreduce'",
        ),
        (ExpertTensorParallel, {"max_tokens": 3}, "max_tokens=3 with dispatcher='allreduce': expected None"),
    ],
)
def test_styles_that_make_no_sense(style, arguments, message):
    with pytest.raises(ValueError, match=message):
        style(**arguments)


@pytest.mark.parametrize(
    "num_ranks, top_k, expected", [(2, 2, 0.786), (4, 2, 0.4637), (8, 1, 0.125), (2, 8, 1.0)]
)
def test_what_an_all_to_all_moves(num_ranks, top_k, expected):
    assert part_of_all_gather(ExpertRanks(8, num_ranks), top_k) == pytest.approx(expected, abs=1e-3)


@on_ranks(4)
def test_auto_takes_what_moves_less():
    kinds = []
    for top_k in (1, 2, 3, 8):
        block = parallel(make_block(top_k=top_k), "auto")
        kinds.append(type(block.experts.parallel.exchange).__name__)
    assert kinds == ["AllToAllPrepareAndFinalize"] * 2 + ["AllGatherPrepareAndFinalize"] * 2
    assert Shard(0) == block.experts.w13_weight.placements[0]
