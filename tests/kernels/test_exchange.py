"""Rows pushed to ranks and sums pulled back, ranks in turns, against what a plan says in words."""

from itertools import pairwise

import pytest
import torch

from moe_ops.arguments import PullSums, PushRows
from moe_ops.exchange_plan import plan_exchange
from moe_ops.peers import ExchangeLayout
from tests.helpers import mixed, usually
from tests.kernels.loopback import Loopback

E, K, M, H = 13, 3, 17, 12
SIZES = {"uneven": (7, 0, 17, 1), "none": (0, 0, 0, 0), "one": (0, 1, 0, 0)}
ROUTINGS = ("random", "one rank", "padding")
of_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def owners(num_ranks: int) -> torch.Tensor:
    """Uneven: the first ranks hold more."""
    return (torch.arange(E) * num_ranks // E).to(torch.int32)


def ids_of(tokens: int, routing: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    ids = torch.rand(tokens, E).argsort(1)[:, :K]
    if routing == "one rank":
        ids = torch.arange(K).repeat(tokens, 1)
    elif routing == "padding":
        ids[::2] = -1
        ids[1::3, 0] = E
        ids[1::3, 1] = 1 << 30
    return ids.to(dtype)


def layout(
    num_ranks: int, row_bytes: int = 1024, sum_bytes: int = 512, max_tokens: int = M
) -> ExchangeLayout:
    return ExchangeLayout(num_ranks, max_tokens, row_bytes, sum_bytes)


def wanted_by(rank: int, ids: torch.Tensor, owners: torch.Tensor) -> list[int]:
    """Tokens that a rank gets."""
    return [
        token
        for token, experts in enumerate(ids.tolist())
        if any(0 <= expert < E and owners[expert] == rank for expert in experts)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "tokens, max_tokens", [(0, 1), (1, 1), (7, 9), (33, 33), (90, 300), (300, 300), (1300, 1500)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_plan_numbers_the_tokens_of_each_rank(num_ranks, tokens, max_tokens, dtype, device):
    # Every second token has no experts, but not the first of a block.
    ids, who = ids_of(tokens, "padding", dtype).roll(1, 0), owners(num_ranks)
    if dtype == torch.int64:
        ids[:, 2] = torch.where(ids[:, 2] == 3, (1 << 32) + 3, ids[:, 2])
    rows = Loopback(layout(num_ranks, max_tokens=max_tokens), device)
    slots, order, sent = (each.cpu() for each in rows.plan(ids, who))
    for rank in range(num_ranks):
        wanted = wanted_by(rank, ids, who)
        assert sent[rank] == len(wanted)
        assert order[rank].tolist() == wanted + [-1] * (max_tokens - len(wanted))
        expected = torch.full((tokens,), -1)
        expected[wanted] = torch.arange(len(wanted))
        assert slots[:, rank].tolist() == expected.tolist()
    for ours, theirs in zip(
        (slots, order, sent), plan_exchange(ids, who, num_ranks, max_tokens), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_plan_takes_strided_ids(device):
    ids, who = ids_of(20, "random"), owners(2)
    rows = Loopback(layout(2), device)
    for ours, theirs in zip(rows.plan(ids.t().contiguous().t(), who), rows.plan(ids, who), strict=True):
        assert torch.equal(ours, theirs)


class Ranks:
    """W ranks with tokens of their own."""

    def __init__(self, sizes, routing, device, dtype=torch.float32, columns=H, made=None) -> None:
        self.size, self.device, self.dtype, self.columns = len(sizes), device, dtype, columns
        self.owners = owners(self.size)
        self.exchange = Loopback(made or layout(self.size), device)
        self.draw(sizes, routing)

    def draw(self, sizes, routing) -> None:
        self.hidden = [torch.randn(tokens, self.columns).to(self.dtype) for tokens in sizes]
        self.ids = [ids_of(tokens, routing) for tokens in sizes]
        self.weights = [torch.rand(tokens, K) for tokens in sizes]
        self.extra = [torch.randint(256, (tokens, 5), dtype=torch.uint8) for tokens in sizes]
        self.plans = [self.exchange.plan(ids, self.owners) for ids in self.ids]

    def push(self):
        tensors = zip(self.hidden, self.weights, self.ids, self.extra, strict=True)
        given = zip(tensors, self.plans, strict=True)
        return self.exchange.push(
            [PushRows(*(each.to(self.device) for each in fields), plan, "") for fields, plan in given]
        )

    def pull(self, rows, received, shared=None):
        given = zip(rows, self.plans, received, shared or [None] * self.size, strict=True)
        return self.exchange.pull(
            [PullSums(each, plan, counts, more, "") for each, plan, counts, more in given]
        )

    def expect_pushed(self, outputs) -> None:
        """Every rank has the rows that it wants, in order, and nothing in the others."""
        most = self.exchange.layout.max_tokens
        for rank, pushed in enumerate(outputs):
            rows, weights, ids, extra, received = (each.cpu() for each in pushed)
            for sender in range(self.size):
                wanted = wanted_by(rank, self.ids[sender], self.owners)
                count, first = len(wanted), sender * most
                assert received[sender] == count
                sources = self.hidden, self.weights, self.ids, self.extra
                for moved, source in zip((rows, weights, ids, extra), sources, strict=True):
                    assert moved.dtype == source[sender].dtype
                    assert torch.equal(moved[first : first + count], source[sender][wanted])
                assert not rows[first + count : first + most].any()
                assert not weights[first + count : first + most].any()
                assert (ids[first + count : first + most] == -1).all()
                assert not extra[first + count : first + most].any()


@pytest.mark.parametrize(
    ("sizes", "routing", "num_ranks"), mixed(SIZES.values(), ROUTINGS, (2, 4), rounds=2), ids=str
)
def test_rows_go_where_they_are_wanted(num_ranks, routing, sizes, device):
    ranks = Ranks(sizes[:num_ranks], routing, device)
    ranks.expect_pushed(ranks.push())


@pytest.mark.parametrize(
    ("dtype", "columns"), mixed((torch.bfloat16, torch.float64, torch.float8_e4m3fn), (1, 5, 13)), ids=str
)
def test_rows_of_any_size(columns, dtype, device):
    ranks = Ranks((7, 5, 9), "random", device, dtype if dtype.itemsize > 1 else torch.float32, columns)
    if dtype.itemsize == 1:
        ranks.hidden = [each.to(dtype) for each in ranks.hidden]
        outputs = ranks.push()
        ranks.hidden = [each.view(torch.uint8) for each in ranks.hidden]
        ranks.expect_pushed([(rows.view(torch.uint8), *others) for rows, *others in outputs])
        return
    ranks.expect_pushed(ranks.push())


def test_rows_longer_than_a_block(device, monkeypatch):
    monkeypatch.setattr("moe_ops.kernels.exchange._BLOCK_BYTES", 64)
    monkeypatch.setattr("moe_ops.kernels.exchange._SUMMED_BYTES", 64)
    ranks = Ranks((7, 5), "random", device, columns=50, made=layout(2, 2048))
    outputs = ranks.push()
    ranks.expect_pushed(outputs)
    sums = ranks.pull([pushed[0] for pushed in outputs], [pushed[-1] for pushed in outputs])
    for rank, out in enumerate(sums):
        assert torch.equal(out.cpu(), expected_sums(ranks, [pushed[0] for pushed in outputs], rank))


@pytest.mark.parametrize("num_ranks", usually([2, 3], [3]))
def test_there_and_back_again_and_again(num_ranks, device):
    """Signals of earlier exchanges say nothing of a later one."""
    ranks = Ranks((17, 6, 14)[:num_ranks], "random", device)
    for _ in range(3):
        outputs = ranks.push()
        ranks.expect_pushed(outputs)
        rows = [torch.randn_like(pushed[0]) for pushed in outputs]
        for rank, out in enumerate(ranks.pull(rows, [pushed[-1] for pushed in outputs])):
            assert torch.equal(out.cpu(), expected_sums(ranks, rows, rank))
        ranks.draw((5, 17, 0)[:num_ranks], "random")


def expected_sums(ranks, rows, rank, shared=None):
    """float32 in the order of ranks, rounded once."""
    most, total = ranks.exchange.layout.max_tokens, None
    wide = torch.float64 if ranks.dtype == torch.float64 else torch.float32
    total = torch.zeros(ranks.hidden[rank].shape, dtype=wide)
    for holder in range(ranks.size):
        wanted = wanted_by(holder, ranks.ids[rank], ranks.owners)
        part = rows[holder].cpu()[rank * most :][: len(wanted)]
        total[wanted] += part.to(wide)
    if shared is not None:
        total += shared.cpu().to(wide)
    return total.to(ranks.dtype)


@pytest.mark.parametrize(
    ("dtype", "routing"),
    mixed((torch.float32, torch.bfloat16, torch.float64), ("random", "padding")),
    ids=str,
)
def test_sums_come_back_to_the_bit(dtype, routing, device):
    ranks = Ranks(SIZES["uneven"], routing, device, dtype)
    outputs = ranks.push()
    # The interpreter cuts bfloat16 off and does not round it: small integers are exact.
    draw = (lambda shape: torch.randint(-8, 9, shape)) if dtype == torch.bfloat16 else torch.randn
    rows = [draw(pushed[0].shape).to(device, dtype) for pushed in outputs]
    shared = [draw(each.shape).to(device, dtype) for each in ranks.hidden]
    received = [pushed[-1] for pushed in outputs]
    for more in (None, shared):
        for rank, out in enumerate(ranks.pull(rows, received, more)):
            assert torch.equal(out.cpu(), expected_sums(ranks, rows, rank, more and more[rank]))


def test_what_empty_rows_hold_is_not_summed(device):
    ranks = Ranks((7, 5), "padding", device)
    outputs = ranks.push()
    rows = [torch.full_like(pushed[0], float("nan")) for pushed in outputs]
    for holder, each in enumerate(rows):
        for sender in range(2):
            count = len(wanted_by(holder, ranks.ids[sender], ranks.owners))
            each[sender * M : sender * M + count] = 1
    for rank, out in enumerate(ranks.pull(rows, [pushed[-1] for pushed in outputs])):
        assert torch.equal(out.cpu(), expected_sums(ranks, rows, rank))


def test_a_poisoned_row_changes_no_other(device):
    ranks = Ranks((7, 5), "random", device)
    ranks.hidden[0][2] = float("nan")
    outputs = ranks.push()
    for pushed in outputs:
        assert int(pushed[0].isnan().any(1).sum()) <= 1
    first, _ = ranks.pull([pushed[0] for pushed in outputs], [pushed[-1] for pushed in outputs])
    assert first[[0, 1, 3, 4, 5, 6]].isfinite().all() and first[2].isnan().all()


@pytest.mark.parametrize("order", usually(["ppss", "pspsps", "pps", "pppss"], ["pspsps", "pppss"]))
def test_exchanges_in_any_order(order, device):
    """What was pushed, and what was pulled, is in outputs, and buffers of another parity."""
    ranks = Ranks((7, 5), "random", device)
    outputs = ranks.push()
    for kind in order:
        if kind == "p":
            ranks.draw((torch.randint(0, M, (1,)).item(), 3), "random")
            outputs = ranks.push()
            ranks.expect_pushed(outputs)
        else:
            rows = [torch.randn_like(pushed[0]) for pushed in outputs]
            for rank, out in enumerate(ranks.pull(rows, [pushed[-1] for pushed in outputs])):
                assert torch.equal(out.cpu(), expected_sums(ranks, rows, rank))


def test_parities_alternate(device):
    ranks = Ranks((7, 5), "random", device)
    buffer, layout = ranks.exchange.buffers[0], ranks.exchange.layout
    edges = (0, layout.signals_at, layout.rows_at, layout.sums_at, layout.num_bytes)
    seen, outputs = [], None
    for kind in "ppss":
        before = buffer.clone()
        if kind == "p":
            ranks.draw((6, 4), "random")
            outputs = ranks.push()
        else:
            ranks.pull([pushed[0] for pushed in outputs], [pushed[-1] for pushed in outputs])
        changed = (buffer != before).nonzero().flatten().tolist()
        seen.append(
            [
                {2 * (place - start) // (end - start) for place in changed if start <= place < end}
                for start, end in pairwise(edges)
            ]
        )
    # Counts, signals, rows and sums.
    assert seen == [
        [{0}, {0}, {0}, set()],
        [{1}, {1}, {1}, set()],
        [{0}, {0}, set(), {0}],
        [{1}, {1}, set(), {1}],
    ]


def test_the_gradient_goes_back_by_the_same_plan(device):
    """A push of gradients behind a pull of sums, and the other way round: the transposed map."""
    ranks = Ranks((7, 5, 4), "padding", device, torch.float64)
    outputs = ranks.push()
    received = [pushed[-1] for pushed in outputs]
    grads = [torch.randn(each.shape, dtype=torch.float64) for each in ranks.hidden]
    rows = [torch.randn(pushed[0].shape, dtype=torch.float64) for pushed in outputs]
    sums = ranks.pull([each.to(device) for each in rows], received)
    given = zip(grads, ranks.plans, strict=True)
    back = ranks.exchange.push(
        [PushRows(grad.to(device), None, None, None, plan, "") for grad, plan in given]
    )
    ahead = sum(float((out.cpu() * grad).sum()) for out, grad in zip(sums, grads, strict=True))
    behind = sum(float((each * pushed[0].cpu()).sum()) for each, pushed in zip(rows, back, strict=True))
    assert ahead == pytest.approx(behind, rel=1e-12)
