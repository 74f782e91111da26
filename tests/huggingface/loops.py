"""MoE blocks as people write them: a list of experts and a loop over it."""

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, INTER, EXPERTS, TOP_K = 64, 48, 8, 2


class Expert(nn.Module):
    """Named as in the first Mixtral code; w1 is the gate."""

    def __init__(self, bias=False):
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INTER, bias=bias)
        self.w2 = nn.Linear(INTER, HIDDEN, bias=bias)
        self.w3 = nn.Linear(HIDDEN, INTER, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class FunctionalExpert(nn.Module):
    """Named as in Llama's MLP, with an activation that is a function."""

    def __init__(self):
        super().__init__()
        self.down_proj = nn.Linear(INTER, HIDDEN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, INTER, bias=False)

    def forward(self, hidden_states):
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Loop(nn.Module):
    """Softmax, top-k, and an `index_add_` for each expert; returns its logits as well."""

    def __init__(self, expert=Expert):
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, TOP_K
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(EXPERTS)])

    def weigh(self, logits):
        weights, ids = F.softmax(logits, dim=1, dtype=torch.float).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def routed(self, hidden_states, logits):
        weights, ids = self.weigh(logits)
        final = torch.zeros_like(hidden_states)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            place, token = torch.where(mask[expert])
            output = self.experts[expert](hidden_states[token]) * weights[token, place, None]
            final.index_add_(0, token, output.to(hidden_states.dtype))
        return final

    def forward(self, hidden_states):
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(tokens)
        return self.routed(tokens, logits).view(hidden_states.shape), logits


class Shared(Loop):
    """Beside a shared expert; returns its output alone."""

    def __init__(self):
        super().__init__(FunctionalExpert)
        self.shared_experts = FunctionalExpert()

    def weigh(self, logits):
        return logits.sigmoid().topk(self.top_k, dim=-1)

    def forward(self, hidden_states):
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        output = self.routed(tokens, self.gate(tokens)) + self.shared_experts(tokens)
        return output.view(hidden_states.shape)


class GatedShared(Loop):
    """Beside a shared expert that a sigmoid weighs (Qwen2-MoE)."""

    def __init__(self):
        super().__init__(FunctionalExpert)
        self.shared_expert = FunctionalExpert()
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden_states):
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(tokens)
        shared = F.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return (self.routed(tokens, logits) + shared).view(hidden_states.shape), logits


class Squared(Loop):
    """Weights that nothing of ours gives."""

    def weigh(self, logits):
        weights, ids = super().weigh(logits)
        return weights**2, ids


class Noisy(Loop):
    """Which routes in training as it does not in evaluation."""

    def forward(self, hidden_states):
        if self.training:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        return super().forward(hidden_states)


class Scaled(Loop):
    """Whose output is not the experts' sum."""

    def forward(self, hidden_states):
        output, logits = super().forward(hidden_states)
        return output * hidden_states.sigmoid(), logits


class Shifted(Loop):
    """Whose experts are given something else."""

    def routed(self, hidden_states, logits):
        return super().routed(hidden_states + 0.1, logits)


def block(kind, **options):
    """Seeded, in evaluation, with experts that matter."""
    torch.manual_seed(0)
    made = kind(**options).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0, 0.2)
    return made


class Collection(nn.Module):
    """Experts that are called as transformers' are, and are no class of its."""

    def __init__(self):
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INTER, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for expert in range(EXPERTS):
            token, place = self.chosen(top_k_index, expert)
            gate, up = F.linear(hidden_states[token], self.up(expert)).chunk(2, -1)
            rows = F.linear(self.middle(self.act_fn(gate), up), self.down_proj[expert])
            final = final.index_add(0, token, rows * self.weight(top_k_weights)[token, place, None])
        return self.returned(final)

    def chosen(self, ids, expert):
        return torch.where(ids == expert)

    def up(self, expert):
        return self.gate_up_proj[expert]

    def middle(self, gate, up):
        return gate * up

    def weight(self, weights):
        return weights

    def returned(self, output):
        return output
