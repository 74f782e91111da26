"""Options and plans: the values that cross the public API. Leaf module, imports nothing of ours.

An option object has a canonical string, its `spec`: operator schemas take strings, not dataclasses, and equal
options give equal strings, so identical layers share one compiled graph. The string is built once, when the
object is made, because formatting it inside `forward` would break a full graph.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

ScoreFn = Literal["softmax", "sigmoid", "sqrtsoftplus"]
RoutingOrder = Literal["score_then_topk", "topk_then_score"]
GroupScore = Literal["max", "top2_sum"]
ActivationName = Literal[
    "silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglustep", "situ",
    "relu2", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul",
]  # fmt: skip
ActivationAlias = Literal["gelu_pytorch_tanh", "relu2_no_mul", "swigluoai", "swigluoai_uninterleave"]
AcceptedName = Literal[ActivationName, ActivationAlias]

_UNGATED = frozenset({"relu2", "relu2_no_mul", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul"})
_ALIASES: dict[str, tuple[ActivationName, bool]] = {  # our name, and whether gate and up columns alternate
    "gelu_pytorch_tanh": ("gelu_tanh", False),
    "relu2_no_mul": ("relu2", False),
    "swigluoai": ("swiglu_oai", True),
    "swigluoai_uninterleave": ("swiglu_oai", False),
}
_NUMBERS: dict[str, dict[str, float | None]] = {  # what an activation takes, and its default
    "silu": {"limit": None},
    "swiglu_oai": {"alpha": 1.702, "limit": 7.0, "beta": 1.0},  # gpt-oss reference implementation
    "swiglustep": {"limit": 7.0},
    "situ": {"beta": None, "linear_beta": None},
}

_Options = TypeVar("_Options", "RoutingConfig", "Activation")


class DispatchPlan(NamedTuple):
    """Where every routed slot goes. A slot is `token * top_k + k`, token-major; there are S = T*K of them.

    With K = 1, E = 2 and topk_ids = [1, 0, 1, -1] the plan is sorted_slots = [1, 0, 2, 3],
    inverse = [1, 0, 2, -1] and expert_offsets = [0, 1, 3]: expert 0 owns row 0, expert 1 rows 1 and 2, and
    the slot that no expert takes is sorted last.
    """

    sorted_slots: torch.Tensor
    """[S] int32: slots grouped by expert, stable within an expert, dropped slots last."""
    inverse: torch.Tensor
    """[S] int32: the row of a slot in `sorted_slots`, -1 for a dropped slot."""
    expert_offsets: torch.Tensor
    """[E+1] int32: exclusive prefix sum of rows per expert."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """Weights of 8 or 4 bits that stand for themselves times a scale: what `scaled_grouped_gemm` takes as one.

    Attributes:
        weight: [E, B, A], torch.float8_e4m3fn or torch.int8, stride 1 in either of the last two dimensions. In 4 bits
            [E, B, A / 2], torch.uint8: two numbers, that of the even column in the lower half. They are integers,
            (code - 8) * scale, or e2m1, of MXFP4 or NVFP4: the dtype of `scale` says which.
        scale: [E, ceil(B / rows), ceil(A / columns)], any floating dtype: one of each block. [E, B, 1]: of each row.
            Of MXFP4 torch.uint8 or torch.float8_e8m0fnu, exponents: 2 ** (scale - 127), NaN for 255. On a GPU those
            above 191 may be NaN too, and those below 64 may be zeros. Of NVFP4 torch.float8_e4m3fn.
        block: (rows, columns) of a block. None where blocks are as large as each other, and so follow from the sizes.
        zero: None, or of integers of 4 bits the code from 0 to 15 that stands for 0 in each block, torch.uint8 of the
            shape of `scale`: a number is (code - zero) * scale then. None is 8 everywhere. Larger codes are not looked
            for, and give no number that means anything.
        global_scale: None, or of NVFP4 what a number times its scale is multiplied with, any floating dtype: [E], or
            [E, P] where each of P parts of the rows, as gate and up are, has one.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None = None
    zero: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


class InputScales(NamedTuple):
    """Scales of quantised rows that are known before: "static" ones, such as a calibration of a checkpoint finds.

    A product's rows are divided by the largest of its numbers, as vLLM does where each expert has one; what is larger
    than 448 or 127 times it becomes that. All below 2 ** -118 count as 1.
    """

    w13: torch.Tensor | None = None
    """[N], any floating dtype, of tokens; None: each row has scales of its own."""
    w2: torch.Tensor | None = None
    """[N], of the rows between the products; None likewise."""


LEAST_LARGEST = 2.0**-118
"""A block whose magnitudes are all below counts as zeros: 448 over one of less may be infinite in float32."""


def largest_of(dtype: torch.dtype) -> float:
    """The largest number that weights and rows of 8 bits reach: 448 of float8_e4m3fn, 127 of int8."""
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max


def _require_choice(name: str, value: object, choices: object) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False, got {type(value).__name__}")


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    if value != value:
        raise ValueError(f"{name}={value}: expected a number")
    return float(value)


def _spec_items(options: object, skip: tuple[str, ...] = ()) -> list[str]:
    """`field=value` for every field that differs from its default, in declaration order."""
    items = []
    for option in fields(options):  # type: ignore[arg-type]
        value = getattr(options, option.name)
        if option.init and option.name not in skip and value != option.default:
            items.append(f"{option.name}={value}")
    return items


def _split(spec: object) -> list[str]:
    if not isinstance(spec, str):
        raise TypeError(f"spec={spec!r}: expected a str, got {type(spec).__name__}")
    return spec.split(";")


def _parse_items(options: type[_Options], items: list[str]) -> dict[str, Any]:
    known = {option.name: option for option in fields(options) if option.init}
    parsed: dict[str, Any] = {}
    for item in items:
        name, _, text = item.partition("=")
        if name not in known or not text:
            raise ValueError(
                f"{options.__name__} option {item!r}: expected name=value, name one of {', '.join(known)}"
            )
        parsed[name] = _parse_value(known[name].default, name, text)
    return parsed


def _parse_value(default: object, name: str, text: str) -> object:
    if isinstance(default, bool):
        if text not in ("True", "False"):
            raise ValueError(f"option {name}={text}: expected True or False")
        return text == "True"
    if isinstance(default, str):
        return text
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        raise ValueError(f"option {name}={text}: expected a number") from None


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How router logits become K weighted experts per token; see `moe_ops.topk_routing` for the maths.

    Args:
        top_k: experts per token, K >= 1.
        score_fn: "softmax" over all experts, or elementwise "sigmoid" or "sqrtsoftplus", sqrt(log(1 + e^x)).
        order: "score_then_topk" scores all experts, then selects; "topk_then_score" selects on the raw
            logits and scores the K selected ones only.
        renormalize: divide the K weights by their sum (a zero sum divides by 1).
        renorm_eps: added to that sum (DeepSeek-V3 uses 1e-20).
        num_groups, topk_groups: group-limited selection: of `num_groups` equal groups of experts only the
            best `topk_groups` may be chosen from (DeepSeek-V2/V3).
        group_score: a group's score: its best expert ("max") or the sum of its best two ("top2_sum").
        group_fill: selection score given to experts of the groups left out: -inf, or 0.0 as some models do.
        scale: multiplies the final weights (routed scaling factor).

    Raises:
        ValueError, TypeError: a field is out of range; the message names field, value and expectation.
    """

    top_k: int = 2
    score_fn: ScoreFn = "softmax"
    order: RoutingOrder = "score_then_topk"
    renormalize: bool = True
    renorm_eps: float = 0.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "max"
    group_fill: float = float("-inf")
    scale: float = 1.0
    spec: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "topk_groups"):
            _require_positive_int(name, getattr(self, name))
        _require_choice("score_fn", self.score_fn, ScoreFn)
        _require_choice("order", self.order, RoutingOrder)
        _require_choice("group_score", self.group_score, GroupScore)
        _require_bool("renormalize", self.renormalize)
        for name in ("renorm_eps", "group_fill", "scale"):
            object.__setattr__(self, name, _as_float(name, getattr(self, name)))
        for name in ("renorm_eps", "scale"):
            if abs(getattr(self, name)) == float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: expected a finite number")
        if self.group_fill == float("inf"):  # by which groups that are left out would be chosen
            raise ValueError("group_fill=inf: expected -inf or a finite number")
        if self.topk_groups > self.num_groups:
            raise ValueError(f"topk_groups={self.topk_groups}: expected at most num_groups={self.num_groups}")
        if self.renorm_eps < 0.0:
            raise ValueError(f"renorm_eps={self.renorm_eps}: expected a number >= 0")
        items = [f"top_k={self.top_k}", *_spec_items(self, skip=("top_k",))]
        object.__setattr__(self, "spec", ";".join(items))

    @staticmethod
    @lru_cache(maxsize=None)
    def from_spec(spec: str) -> "RoutingConfig":
        """The config whose `spec` this is. Raises TypeError for no str, ValueError for an unknown option or value."""
        return RoutingConfig(**_parse_items(RoutingConfig, _split(spec)))


@dataclass(frozen=True, slots=True)
class Activation:
    """The gate of an expert: how [S, 2I] gate and up columns become [S, I]; see `moe_ops.gated_activation`.

    Args:
        name: "silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglustep", "situ" (gated), or "relu2", "silu_no_mul",
            "gelu_no_mul", "gelu_tanh_no_mul" (ungated: [S, I] to [S, I]). Names that vLLM and transformers have for
            these are taken as well: "swigluoai" (interleaved), "swigluoai_uninterleave", "gelu_pytorch_tanh" and
            "relu2_no_mul".
        alpha: sigmoid slope of "swiglu_oai", default 1.702.
        limit: clamp of "swiglu_oai" and "swiglustep" (default 7.0) and of clamped "silu" (default: no clamp).
        interleaved: gate and up columns alternate (even gate, odd up) instead of gate first. A layout of the
            weights, not a formula.
        beta: what "swiglu_oai" adds to the up column, default 1.0; bound of the gate of "situ", which has no default.
        linear_beta: bound of the up column of "situ", default: none.

    Raises:
        ValueError: unknown name, an option the activation does not have, a limit or bound that is not positive or,
            for "situ", missing.
        TypeError: a number is not one, interleaved is not a bool.
    """

    name: AcceptedName = "silu"
    alpha: float | None = None
    limit: float | None = None
    interleaved: bool = False
    beta: float | None = None
    linear_beta: float | None = None
    spec: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        _require_choice("activation", self.name, AcceptedName)
        _require_bool("interleaved", self.interleaved)
        name, alternates = _ALIASES.get(self.name, (self.name, False))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "interleaved", self.interleaved or alternates)
        for (
            option,
            default,
        ) in self._numbers().items():  # as floats, so that equal activations have equal specs
            value = getattr(self, option)
            object.__setattr__(self, option, default if value is None else _as_float(option, value))
        self._check_options()
        object.__setattr__(self, "spec", ";".join([self.name, *self._options_spec()]))

    def _numbers(self) -> dict[str, float | None]:
        return _NUMBERS.get(self.name, {})

    def _check_options(self) -> None:
        for option in ("alpha", "limit", "beta", "linear_beta"):
            value = getattr(self, option)
            if value is not None and option not in self._numbers():
                raise ValueError(f"{option}={value}: activation {self.name!r} has no {option}; expected None")
        for option in ("limit", "beta", "linear_beta") if self.name == "situ" else ("limit",):
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise ValueError(f"{option}={value}: expected a positive number")
        if self.name == "situ" and self.beta is None:
            raise ValueError("beta=None: activation 'situ' has no default; expected a positive number")
        if self.interleaved and not self.is_gated:
            raise ValueError(
                f"interleaved=True: activation {self.name!r} has no gate to interleave; expected False"
            )

    def _options_spec(self) -> list[str]:
        # Defaults stay out, so that the bare name "swiglu_oai" is already canonical.
        numbers = [(option, getattr(self, option), default) for option, default in self._numbers().items()]
        items = [f"{option}={value}" for option, value, default in numbers if value != default]
        return items + (["interleaved=True"] if self.interleaved else [])

    @property
    def is_gated(self) -> bool:
        """Whether the input has gate and up columns (2I of them) rather than I."""
        return self.name not in _UNGATED

    @property
    def function(self) -> str:
        """The nonlinearity of the gate columns, or of all when there is no gate: the name without "_no_mul"."""
        return self.name.removesuffix("_no_mul")

    @staticmethod
    @lru_cache(maxsize=None)
    def from_spec(spec: str) -> "Activation":
        """The activation whose `spec` (or bare name) this is. Raises TypeError, ValueError for no such text."""
        name, *items = _split(spec)
        return Activation(name, **_parse_items(Activation, items))  # type: ignore[arg-type]


def is_gated_spec(spec: str) -> bool:
    """Whether an activation's spec names a gated one, without parsing the rest: a compiler traces this."""
    return spec.partition(";")[0] not in _UNGATED


def is_interleaved_spec(spec: str) -> bool:
    """Whether an activation's spec says that gate and up alternate; a compiler traces this too."""
    return "interleaved=True" in spec


def number_in(spec: str, name: str, *, default: float) -> float:
    """A number in the spec of options: to a compiler a constant, where a float of an object may be an input."""
    texts = [item.removeprefix(f"{name}=") for item in spec.split(";") if item.startswith(f"{name}=")]
    return float(texts[0]) if texts else default
