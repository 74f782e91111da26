"""One expert that is a module of its own: which of its weights are gate, up and down, and what is between them."""

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.huggingface import trial
from layers.huggingface.outside import TOKENS, are_close, run, tokens_of_all_sizes


@dataclass(frozen=True, slots=True)
class Mlp:
    """Names of an expert's weights: [I, H], [I, H] ("" without a gate) and [H, I]; and of its activation function."""

    gate: str
    up: str
    down: str
    act: str


def known_mlp(expert: nn.Module) -> Mlp | None:
    """What an expert is made of, or None where it is nothing that we compute, tried in float64 on small sizes."""
    names = [name for name, each in expert.named_parameters() if each.dim() == 2]
    if len(names) not in (2, 3) or len(names) != len(list(expert.parameters())) or list(expert.buffers()):
        return None
    with trial.trial_mode():
        generator = torch.Generator().manual_seed(0)
        twin = trial.skeleton(expert, trial.random_like(generator), trial.smaller(expert, 0)).train()
        for ordered in permutations(names):
            for act in _functions(twin):
                up, down = ordered[-2:]
                found = Mlp("".join(ordered[:-2]), up, down, act)
                if _is(found, twin, generator):
                    return found
    return None


def activation_of(expert: nn.Module, mlp: Mlp) -> Any:
    """The function between the products."""
    return F.silu if mlp.act == "silu" else expert.get_submodule(mlp.act)


def _functions(expert: nn.Module) -> list[str]:
    """Modules that may be the activation, and the function that most models call."""
    return [
        *(name for name, each in expert.named_modules() if name and not list(each.parameters())),
        "silu",
    ]


def _is(mlp: Mlp, twin: Any, generator: torch.Generator) -> bool:
    down = twin.get_parameter(mlp.down)
    tokens = tokens_of_all_sizes(generator, 1e4, TOKENS, down.shape[0])
    act = activation_of(twin, mlp)

    def ours(expert: Any, hidden_states: Tensor) -> Tensor:
        rows = F.linear(hidden_states, expert.get_parameter(mlp.gate or mlp.up))
        activated = act(rows)
        if mlp.gate:
            activated = activated * F.linear(hidden_states, expert.get_parameter(mlp.up))
        return F.linear(activated, expert.get_parameter(mlp.down))

    return are_close(run(type(twin).forward, twin, tokens), run(ours, twin, tokens))
