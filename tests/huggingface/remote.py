"""MoE blocks in the styles of models with remote code: their gates choose, or their lists of experts are called."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from tests.huggingface.loops import EXPERTS, HIDDEN, TOP_K, Expert, FunctionalExpert, Loop


class Gate(nn.Module):
    """DeepSeek-V2's: ids, weights and, in training, a loss of each sequence; of hidden states [B, S, H] alone."""

    def __init__(self):
        super().__init__()
        self.top_k, self.alpha, self.scale = TOP_K, 0.1, 1.5
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))

    def forward(self, hidden_states):
        batch, length, size = hidden_states.shape
        scores = F.linear(hidden_states.view(-1, size).float(), self.weight.float()).softmax(-1)
        weights, ids = scores.topk(self.top_k, dim=-1, sorted=False)
        loss = None
        if self.training:
            counts = torch.zeros(batch, EXPERTS)
            counts.scatter_add_(1, ids.view(batch, -1), torch.ones(batch, length * self.top_k))
            loss = (counts * scores.view(batch, length, -1).mean(1)).sum(1).mean() * self.alpha
        return ids, weights * self.scale, loss


class AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, loss):
        assert loss.numel() == 1
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(1)


class DeepSeek(nn.Module):
    """Tokens sorted by expert and no gradient in evaluation; slot by slot, with a loss, in training."""

    def __init__(self, gate=Gate):
        super().__init__()
        self.experts = nn.ModuleList([FunctionalExpert() for _ in range(EXPERTS)])
        self.gate = gate()
        self.shared_experts = FunctionalExpert()

    def forward(self, hidden_states):
        ids, weights, loss = self.gate(hidden_states)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        if self.training:
            routed = AddLoss.apply(self.slot_by_slot(tokens, ids.view(-1), weights), loss)
        else:
            routed = self.infer(tokens, ids, weights)
        return routed.view(hidden_states.shape) + self.shared_experts(hidden_states)

    def slot_by_slot(self, tokens, ids, weights):
        rows = tokens.repeat_interleave(TOP_K, dim=0)
        output = torch.empty_like(rows)
        for place, expert in enumerate(self.experts):
            output[ids == place] = expert(rows[ids == place])
        return (output.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)

    @torch.no_grad()
    def infer(self, tokens, ids, weights):
        counts = ids.new_zeros((ids.shape[0], len(self.experts))).scatter_(1, ids, 1).sum(0)
        order = ids.view(-1).argsort()
        parts = tokens[order // ids.shape[1]].split(counts.tolist())
        rows = torch.cat([self.experts[place](part) for place, part in enumerate(parts) if len(part)])
        output = torch.empty_like(rows)
        output[order] = rows
        return (output.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


class DeepSeekV3(DeepSeek):
    """Whose code is for evaluation alone."""

    def forward(self, hidden_states):
        if self.training:
            raise NotImplementedError("no training")
        return super().forward(hidden_states)


class ConfiguredGate(Gate):
    """Which has sizes from its model's config."""

    def __init__(self):
        super().__init__()
        self.config = PreTrainedConfig(hidden_size=HIDDEN)

    def forward(self, hidden_states):
        return super().forward(hidden_states.view(len(hidden_states), -1, self.config.hidden_size))


class Configured(DeepSeek):
    def __init__(self):
        super().__init__(ConfiguredGate)


class BailingGate(nn.Linear):
    """Logits as well, and of [T, H] alone."""

    def __init__(self):
        super().__init__(HIDDEN, EXPERTS, bias=False)

    def forward(self, tokens):
        assert tokens.dim() == 2
        logits = super().forward(tokens)
        weights, ids = logits.softmax(-1).topk(TOP_K)
        return ids, weights, logits


class Bailing(Loop):
    """Returns, beside its output, a tuple of what its gate gave, by sequence."""

    def __init__(self):
        super().__init__()
        self.gate = BailingGate()

    def forward(self, hidden_states):
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        ids, weights, logits = self.gate(tokens)
        output = self.routed(tokens, (weights, ids)).view(hidden_states.shape)
        rows = hidden_states.shape[:-1]
        return output, (logits.view(*rows, -1), ids.view(*rows, -1))

    def weigh(self, logits):
        return logits


class NemotronH(Bailing):
    """Runs experts without a token on zeros, in the dtype of their weights."""

    def routed(self, hidden_states, logits):
        _, ids = logits
        unused = [each for place, each in enumerate(self.experts) if not (ids == place).any()]
        zeros = [each(torch.zeros_like(hidden_states[:1], dtype=each.w2.weight.dtype)) for each in unused]
        return super().routed(hidden_states, logits) + sum(zeros)


class Afmoe(Bailing):
    """The block's bias, for the selection, is an argument of its router."""

    class Router(BailingGate):
        def forward(self, tokens, bias):
            logits = nn.Linear.forward(self, tokens)
            scores = logits.sigmoid()
            _, ids = (scores + bias).topk(TOP_K)
            return ids, scores.gather(1, ids), logits

    def __init__(self):
        super().__init__()
        del self.gate
        self.router, self.expert_bias = self.Router(), nn.Parameter(torch.zeros(EXPERTS))

    def forward(self, hidden_states):
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        ids, weights, _ = self.router(tokens, self.expert_bias)
        return self.routed(tokens, (weights, ids)).view(hidden_states.shape)


class Accumulated(Loop):
    """Which sums in float32, and leaves it so."""

    def routed(self, hidden_states, logits):
        weights, ids = self.weigh(logits)
        final = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(self.num_experts):
            token, place = torch.where(ids == expert)
            output = self.experts[expert](hidden_states[token]) * weights[token, place, None]
            final.index_add_(0, token, output.float())
        return final


class Biased(Loop):
    """The block's bias, for the selection, is a module's [1, E] (ERNIE 4.5)."""

    def __init__(self):
        super().__init__()
        self.statics = nn.Module()
        self.statics.bias = nn.Parameter(torch.zeros(1, EXPERTS))

    def weigh(self, logits):
        scores = logits.sigmoid()
        _, ids = (scores + self.statics.bias.squeeze(0)).topk(self.top_k)
        return scores.gather(1, ids), ids


class CalledExperts(nn.ModuleList):
    """A list with a forward of its own, as transformers 4.57 had it."""

    def __init__(self):
        super().__init__([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for place in range(len(self)):
            token, slot = torch.where(top_k_index == place)
            final.index_add_(0, token, self[place](hidden_states[token]) * top_k_weights[token, slot, None])
        return final


class MiniMaxM2(Loop):
    """The block routes, in its own way, and hands ids and weights to its experts."""

    def __init__(self):
        super().__init__()
        self.experts = CalledExperts()

    def routed(self, hidden_states, logits):
        weights, ids = self.weigh(logits.tanh())
        return self.experts(hidden_states, top_k_index=ids, top_k_weights=weights)


class OtherName(MiniMaxM2):
    """By a name that stacked experts do not have."""

    class Experts(CalledExperts):
        def forward(self, hidden_states, ids, top_k_weights):
            return super().forward(hidden_states, ids, top_k_weights)

    def __init__(self):
        super().__init__()
        self.experts = self.Experts()

    def routed(self, hidden_states, logits):
        weights, ids = self.weigh(logits)
        return self.experts(hidden_states, ids=ids, top_k_weights=weights)


def returning(change):
    """A loop that returns something else."""
    return type("Returning", (Loop,), {"forward": lambda self, states: change(*Loop.forward(self, states))})
