"""Odd sizes in every layout against float64, one group a process.

`python -m tests.kernels.layouts cuda bfloat16 halves standard transposed` runs that group.
A kernel that is stopped by the GPU takes the process with it, so every case is named before it runs.
"""

import itertools
import sys
from collections.abc import Iterator

import torch

import moe_ops
from moe_ops import Activation
from tests.kernels import oracles

EXPERTS = 5
DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = {
    "halves": Activation(),
    "interleaved": Activation("swiglu_oai", interleaved=True),
    "ungated": Activation("relu2"),
}
LAYOUTS = ("standard", "transposed")
GROUPS = list(itertools.product(DTYPES, ACTIVATIONS, LAYOUTS, LAYOUTS))  # ..., of w13, of w2
TOKENS = (1, 4, 33, 777)
SIZES = ((96, 100), (100, 96), (101, 300), (300, 101), (300, 300), (101, 101))  # H, I


def _weight(rows: int, depth: int, layout: str) -> torch.Tensor:
    weight = torch.randn(EXPERTS, rows, depth) / depth**0.5
    return weight.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else weight


def _check(
    tokens: int, hidden: int, inner: int, device: str, dtype: str, activation: str, *layouts: str
) -> None:
    act, kind = ACTIVATIONS[activation], getattr(torch, dtype)
    tensors = {
        "hidden_states": torch.randn(tokens, hidden),
        "w13": _weight(2 * inner if act.is_gated else inner, hidden, layouts[0]),
        "w2": _weight(hidden, inner, layouts[1]),
    }
    tensors = {name: tensor.to(kind) for name, tensor in tensors.items()}
    top_k = 2 if tokens == 33 else 1
    ids = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(tokens)]).to(torch.int32)
    routed = {"topk_weights": torch.rand(tokens, top_k), "topk_ids": ids}
    absent = dict.fromkeys(("w13_bias", "w2_bias", "expert_map", "shared"))
    placed = {name: tensor.to(device) for name, tensor in {**tensors, **routed}.items()}
    out = moe_ops.fused_experts(**placed, activation=act, emit="fused").cpu()
    oracles.assert_close(out, oracles.experts(**tensors, **routed, **absent, activation=act))


def _wrong(device: str, group: tuple[str, ...]) -> Iterator[str]:
    """The cases of a group that are wrong; each is named on stdout before it runs."""
    for tokens, (hidden, inner) in itertools.product(TOKENS, SIZES):
        case = f"T={tokens} H={hidden} I={inner} {' '.join(group)}"
        print(f"case {case}", flush=True)
        try:
            _check(tokens, hidden, inner, device, *group)
        except AssertionError as error:
            yield f"{case}: {error}"


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit("\n".join(_wrong(sys.argv[1], tuple(sys.argv[2:]))) or None)
