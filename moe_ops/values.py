"""Values of operators' arguments: what always travels together, from a layer down to a launch plan.

T tokens, H hidden size, E experts held here, K experts per token, I intermediate size.
"""

from typing import Annotated, NamedTuple

from torch import Tensor

from moe_ops.pairs import numbers_in
from moe_ops.records import Role

Index = Annotated[Tensor, Role.INDEX]
PerToken = Annotated[Tensor, Role.PER_TOKEN]
PerTokenOrNone = Annotated[Tensor | None, Role.PER_TOKEN]
Ids = Annotated[Tensor, Role.PER_TOKEN, Role.CONSTANT]


class GroupedLinear(NamedTuple):
    """A product of each expert: weight [E, B, A], bias [E, B]."""

    NAMED_AFTER_FIELD = True

    weight: Tensor
    bias: Tensor | None = None


class PairedLinear(NamedTuple):
    """A product of each expert whose weight may be two tensors: gate rows, then up rows [E, B, A], biases [E, B].

    Both have the same strides and either no bias or one each. Without `up` it is a `GroupedLinear`.
    """

    NAMED_AFTER_FIELD = True

    weight: Tensor
    bias: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None

    @property
    def columns(self) -> int:
        """What it makes of a row, of both tensors together."""
        return self.weight.shape[1] * (1 if self.up is None else 2)

    @property
    def parts(self) -> tuple[GroupedLinear, ...]:
        """The products that it consists of, one or two."""
        return self.halves[:1] if self.up is None else self.halves

    @property
    def halves(self) -> tuple[GroupedLinear, GroupedLinear]:
        """Both products, whether there is a second or not: of records that hold no tensors."""
        return GroupedLinear(*self[:2]), GroupedLinear(*self[2:])  # type: ignore[arg-type]


class ScaledLinear(NamedTuple):
    """A product of each expert in 8 bits: weight [E, B, A], the scale of each of its blocks, bias [E, B].

    A block has so many rows and columns, those on the border fewer: scale [E, ceil(B / rows), ceil(A / columns)].
    In 4 bits (`pairs`) the weight is [E, B, A / 2]; blocks of integers may have zero points too, of the scale's shape.
    `nvfp4` may have global scales [E, P], one of each B / P rows.
    """

    NAMED_AFTER_FIELD = True

    weight: Annotated[Tensor, Role.CONSTANT]
    scale: Annotated[Tensor, Role.CONSTANT]
    bias: Tensor | None
    block_rows: int
    block_columns: int
    zero: Annotated[Tensor | None, Role.CONSTANT] = None
    global_scale: Annotated[Tensor | None, Role.CONSTANT] = None

    @property
    def depth(self) -> int:
        """A."""
        return self.weight.shape[2] * numbers_in(self.weight.dtype)


class ExpertWeights(NamedTuple):
    """The two products of each expert: gate and up [E, 2I, H] ([E, I, H] without a gate), down [E, H, I]."""

    w13: PairedLinear
    w2: GroupedLinear


class Epilogue(NamedTuple):
    """What joins a token's sum besides `shared`: the logit of that one's gate [T, 1], a residual [T, H]."""

    shared_gate: PerTokenOrNone = None
    residual: PerTokenOrNone = None


class SharedExpert(NamedTuple):
    """The expert that every token visits: gate and up [2J, H], down [H, J], weight [T, 1], and its activation.

    Where up is a tensor of its own, as in a `PairedLinear`, `shared_w13` has the gate rows [J, H].
    """

    shared_w13: Tensor
    shared_w2: Tensor
    shared_weights: PerTokenOrNone
    shared_activation: str
    shared_up: Tensor | None = None


class SharedAlone(NamedTuple):
    """Of no operator: what `fused_experts_with_shared` launches beside its routed experts, where it does."""

    hidden_states: PerToken
    shared: SharedExpert


class Gate(NamedTuple):
    """A gate captured from PyTorch: tensors that it reads besides gate and up, and the spec of its `Formula`."""

    operand0: Annotated[Tensor | None, Role.WHOLE]
    operand1: Annotated[Tensor | None, Role.WHOLE]
    operand2: Annotated[Tensor | None, Role.WHOLE]
    operand3: Annotated[Tensor | None, Role.WHOLE]
    formula: str

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return tuple(each for each in self[:-1] if each is not None)


class Router(NamedTuple):
    """What chooses experts: logits [T, E_global], correction bias [E_global], and the spec of a `RoutingConfig`."""

    router_logits: PerToken
    correction_bias: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT]
    routing: str


class Placement(NamedTuple):
    """Where experts are: [E_global], the local index of each."""

    expert_map: Annotated[Tensor | None, Role.WHOLE, Role.INDEX] = None

    def num_ids(self, num_experts: int) -> int:
        """How many experts ids may name, of which `num_experts` are here."""
        return num_experts if self.expert_map is None else self.expert_map.shape[0]


class Replicas(NamedTuple):
    """Where the replicas of each expert are: [E_global, R] physical experts, and [E_global], how many of them count."""

    logical_to_physical: Annotated[Tensor, Role.WHOLE, Role.CONSTANT]
    replica_count: Annotated[Tensor, Role.WHOLE, Role.INDEX]


class LoadRecord(NamedTuple):
    """Where load is recorded: [P] counts, and on the device of how many tokens [], and whether at all []."""

    load: Annotated[Tensor, Role.WHOLE, Role.MUTATED]
    num_real_tokens: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT] = None
    is_recording: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT] = None


class ExchangePlan(NamedTuple):
    """Which rows of T tokens go where, W ranks and M rows for each.

    slots [T, W] int32, the row that a token has on each rank, -1 for none; tokens [W, M] int32, the token of each row,
    -1 for none; sent [W] int32, how many there are.
    """

    slots: Annotated[Tensor, Role.CONSTANT]
    tokens: Annotated[Tensor, Role.CONSTANT]
    sent: Index
