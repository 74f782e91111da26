"""The five layer shapes the MoE benchmark runs, their inputs, and the float32 result every timing is gated on.

Letters: T tokens, E experts, K experts per token, H hidden size, I intermediate size.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Routing = Literal["uniform", "zipf", "balanced"]
TOKEN_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
ZIPF_TOKEN_COUNT = 4096

# One H200: dense bf16 products in a short burst, and a streaming read, both as measured on the card.
PEAK_FLOPS = 790e12
PEAK_BYTES = 4.59e12

_SEED_OF_ROUTING = {"uniform": 0, "zipf": 1, "balanced": 2}
_ROTATED_WEIGHT_BYTES = 2.4e9  # forty times the L2 cache


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer shape."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of w13 and w2 in bfloat16."""
        return self.num_experts * 3 * self.hidden_size * self.intermediate_size * 2

    @property
    def weight_copies(self) -> int:
        """How many copies of the weights a timing rotates over, so that none stays in the L2 cache."""
        return max(1, math.ceil(_ROTATED_WEIGHT_BYTES / self.weight_bytes))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", 8, 2, 4096, 14336),  # Mixtral-8x7B
        Workload("W2", 128, 8, 2048, 768),  # Qwen3-30B-A3B
        Workload("W3", 256, 8, 7168, 2048),  # DeepSeek-V3
        Workload("W4", 128, 4, 2880, 2880),  # gpt-oss-120b, without its biases
        Workload("W5", 64, 8, 2048, 1024),  # OLMoE
    )
}


@dataclass(frozen=True, slots=True)
class Weights:
    """w13 [E, 2I, H] with gate rows first and w2 [E, H, I], bfloat16."""

    w13: Tensor
    w2: Tensor


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload at a token count and a routing distribution: one cell of the comparison."""

    workload: Workload
    tokens: int
    routing: Routing

    @property
    def num_inputs(self) -> int:
        """How many different inputs one timing goes through."""
        return 8 if self.tokens <= 64 else 4 if self.tokens <= 1024 else 2


@dataclass(frozen=True, slots=True)
class Inputs:
    """hidden_states [T, H] bfloat16 and router_logits [T, E] float32."""

    hidden_states: Tensor
    router_logits: Tensor


@dataclass(frozen=True, slots=True)
class Load:
    """How the routed rows of a cell spread: distinct experts hit (mean over inputs) and the fullest expert's rows."""

    distinct_experts: float
    max_load: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """The work a cell cannot avoid, and the time the card needs for it."""

    flops: float
    min_bytes: float

    @property
    def us(self) -> float:
        return max(self.flops / PEAK_FLOPS, self.min_bytes / PEAK_BYTES) * 1e6

    @property
    def bound(self) -> str:
        return "flops" if self.flops / PEAK_FLOPS > self.min_bytes / PEAK_BYTES else "bytes"


def cells_of(workload: Workload, token_counts: tuple[int, ...]) -> list[Cell]:
    """Uniform routing at every token count, and zipf routing where 4096 is among them."""
    cells: list[Cell] = [Cell(workload, tokens, "uniform") for tokens in token_counts]
    if ZIPF_TOKEN_COUNT in token_counts:
        cells.append(Cell(workload, ZIPF_TOKEN_COUNT, "zipf"))
    return cells


def make_weights(workload: Workload, seed: int, device: str) -> Weights:
    """Normal weights scaled by 1/sqrt(fan_in), filled expert by expert so that nothing is held twice."""
    E, H, I = workload.num_experts, workload.hidden_size, workload.intermediate_size
    generator = torch.Generator(device=device).manual_seed(seed)
    w13 = torch.empty(E, 2 * I, H, device=device, dtype=torch.bfloat16)
    w2 = torch.empty(E, H, I, device=device, dtype=torch.bfloat16)
    for expert in range(E):
        w13[expert].normal_(0, 1 / math.sqrt(H), generator=generator)
        w2[expert].normal_(0, 1 / math.sqrt(I), generator=generator)
    return Weights(w13, w2)


def make_inputs(cell: Cell, device: str) -> list[Inputs]:
    """The cell's different inputs, the same on every run."""
    seed = 1234 + cell.tokens + 7 * _SEED_OF_ROUTING[cell.routing]
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (cell.tokens, cell.workload.hidden_size)
    hidden = [
        torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)
        for _ in range(cell.num_inputs)
    ]
    return [Inputs(states, _router_logits(cell, generator)) for states in hidden]


def _router_logits(cell: Cell, generator: torch.Generator) -> Tensor:
    E, K, T = cell.workload.num_experts, cell.workload.top_k, cell.tokens
    device = generator.device
    logits = torch.randn(T, E, device=device, generator=generator)
    if cell.routing == "zipf":  # the experts' popularity falls as 1/rank
        popularity = -torch.log(torch.arange(1, E + 1, device=device, dtype=torch.float32))
        return logits + popularity[torch.randperm(E, device=device, generator=generator)]
    if cell.routing == "balanced":  # every expert gets T*K/E rows
        experts = torch.randperm(E, device=device, generator=generator)
        chosen = experts[torch.arange(T * K, device=device).view(T, K) % E]
        logits.scatter_add_(1, chosen, torch.full(chosen.shape, 20.0, device=device))
    return logits


def route(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights [T, K] float32, ids [T, K] int64): softmax over the K selected logits, equal to renormalised softmax."""
    values, ids = torch.topk(router_logits.float(), top_k, dim=-1)
    return torch.softmax(values, dim=-1), ids


def reference(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """The layer in float32, expert by expert: [T, H]."""
    topk_weights, topk_ids = route(inputs.router_logits, top_k)
    hidden = inputs.hidden_states.float()
    output = torch.zeros_like(hidden)
    for expert in range(weights.w13.shape[0]):
        token, slot = torch.where(topk_ids == expert)
        if token.numel() == 0:
            continue
        gate, up = (hidden[token] @ weights.w13[expert].float().T).chunk(2, dim=-1)
        expert_out = (torch.nn.functional.silu(gate) * up) @ weights.w2[expert].float().T
        output.index_add_(0, token, expert_out * topk_weights[token, slot, None])
    return output


def load_of(cell: Cell, inputs: list[Inputs]) -> Load:
    """The spread of the cell's routed rows."""
    E, K = cell.workload.num_experts, cell.workload.top_k
    counts = [torch.bincount(route(one.router_logits, K)[1].flatten(), minlength=E) for one in inputs]
    distinct = sum(int((count > 0).sum()) for count in counts) / len(counts)
    return Load(distinct, max(int(count.max()) for count in counts))


def roofline(cell: Cell, load: Load) -> Roofline:
    """FLOPs of the routed rows; bytes of the weights that are hit, of hidden states in and out, and of logits."""
    E, K = cell.workload.num_experts, cell.workload.top_k
    H, I, T = cell.workload.hidden_size, cell.workload.intermediate_size, cell.tokens
    flops = T * K * 3 * 2 * H * I
    return Roofline(flops, load.distinct_experts * 3 * H * I * 2 + T * H * 2 * 2 + T * E * 4)
