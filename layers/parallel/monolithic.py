"""Router logits exchanged in the place of weights and ids, for experts that route themselves in the same operator."""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from layers._checks import expect_features, expect_multiplied, expect_positive, expect_type, rows_of
from layers.fused_moe import FusedMoE
from layers.modular_parts import Prepared
from layers.parallel.all_gather import gathering, rows_of_each
from layers.parallel.collectives import start_reduce_scatter
from layers.parallel.group import Group, expect_agreement
from layers.routed_experts import KnownExperts
from layers.weigh_and_reduce import plus
from moe_ops._checks import expect_shape
from moe_ops.errors import value_error


class AllGatherMonolithic(nn.Module):
    """Every rank routes and runs every token, on its part of the experts; sums come back.

    It takes what `FusedMoE` takes but for a `RouterOutput`, and may stand in its place in a `MoEBlock`. Beside
    `AllGatherPrepareAndFinalize` it sends a token's E logits instead of K weights and ids, and `FusedMoE` runs
    router and experts as one operator.

    Args:
        group: ranks with tokens of their own.
        layer: with the experts, or the part of each, that this rank holds.
        max_tokens: as in `AllGatherPrepareAndFinalize`. Rows past a rank's tokens have zeros for logits: they are
            routed, and run for nothing. `layer.balancing` counts them, and every rank's tokens on every rank.

    Raises:
        TypeError, ValueError: an argument is not as described, or `max_tokens` is not the same on all ranks; later, as
            `AllGatherPrepareAndFinalize` does, of E in the place of top_k, or the layer has what is known of the tokens
            of one rank alone: adapters, captured or known experts, a routing of its own in front of latent experts.

    Example:
        >>> layer = FusedMoE(config, ExpertRanks(E, W).expert_map(rank))
        >>> block.experts = AllGatherMonolithic(group, layer)
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, layer: FusedMoE, *, max_tokens: int | None = None
    ) -> None:
        super().__init__()
        expect_type("layer", layer, FusedMoE)
        if layer.config.emit == "batch_invariant":  # sums over ranks promise no order
            raise ValueError("layer.config.emit='batch_invariant': expected another among ranks")
        if max_tokens is not None:
            expect_positive("max_tokens", max_tokens)
        self.group = Group.of(group)
        expect_agreement(group, {"dispatcher": "logits", "max_tokens": max_tokens})
        self.layer, self.max_tokens = layer, max_tokens

    def reset_parameters(self) -> None:
        """Draws every parameter of the layer anew."""
        self.layer.reset_parameters()

    def forward(self, hidden_states: Tensor, router_logits: Tensor, shared: Tensor | None = None) -> Tensor:
        """[..., H] from hidden_states [..., H], router_logits [..., E] and `shared` [..., H].

        Raises:
            TypeError, ValueError: shapes or dtypes do not fit, as `FusedMoE` says.
        """
        self._expect_tokens_of_all()
        expect_features("hidden_states", hidden_states, self.layer.config.expert_hidden_size)
        expect_multiplied(hidden_states, self.layer.w13_weight)
        expect_features("router_logits", router_logits, self.layer.config.router_size)
        hidden, logits = hidden_states.flatten(0, -2), router_logits.flatten(0, -2)
        expect_shape("router_logits", logits, (hidden.shape[0], logits.shape[1]))
        addend = None if shared is None else rows_of("shared", shared)
        rows = start_reduce_scatter(self._run(hidden, logits), self.group)()
        return plus(rows[: hidden.shape[0]], addend).reshape(hidden_states.shape)

    def _expect_tokens_of_all(self) -> None:
        """Raises ValueError for what has a row for each token of this rank, where the layer gets those of all."""
        layer, config = self.layer, self.layer.config
        if layer.lora is not None:
            value_error("layer has lora: expected None, adapter ids go along in AllGatherPrepareAndFinalize")
        if layer.capture is not None:
            value_error(
                "layer has capture: expected None, ids are captured in front of AllGatherPrepareAndFinalize"
            )
        if layer.parallel is not None:
            value_error(
                "layer is sharded by a style, which exchanges tokens: expected an expert_map or a shard"
            )
        override, function = layer.routing_override, config.router.routing_function
        if isinstance(override, KnownExperts):
            kind = type(override).__name__
            value_error("layer.routing_override={}: expected AllGatherPrepareAndFinalize with it", kind)
        if config.experts.latent_size is not None and (override is not None or function is not None):
            value_error("layer routes by what tokens are in front of latent_size: expected by logits alone")

    def _run(self, hidden: Tensor, router_logits: Tensor) -> Tensor:
        """Sums [W*M, H] of this rank's experts for tokens of all."""
        given = Prepared(hidden, router_logits, router_logits)
        num_rows = rows_of_each(given, "number of logits", self.max_tokens, self.group)
        tokens, logits = gathering(num_rows, self.group)(((hidden, 0), (router_logits, 0)))
        return self.layer(tokens(), logits())
