"""The order in which the parts of a MoE block run, decided when it is built: a `MoEBlock` of parts you bring.

Letters: T tokens, H hidden size, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from layers._checks import expect_choice, expect_type, rows_of
from layers.config import Combination
from layers.fused_moe import FusedMoE
from layers.local_experts import LocalExperts
from layers.modular_kernel import ModularKernel
from layers.router import RouterOutput
from layers.shared_experts import SharedExperts
from moe_ops._checks import expect_shape
from moe_ops.errors import value_error

SharedOrder = Literal["before", "beside", "after"]
Reduced = Literal["sum", "shared"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Where what several devices computed of one output becomes that output.

    Args:
        reduce: [T, H] to [T, H], such as an all-reduce.
        of: "sum" reduces routed and shared experts together; "shared" only the shared ones, for routed experts that
            come back reduced.

    Raises:
        TypeError, ValueError: `reduce` is no function, or `of` is neither.
    """

    reduce: Callable[[Tensor], Tensor]
    of: Reduced = "sum"

    def __post_init__(self) -> None:
        if not callable(self.reduce):
            raise TypeError(f"reduce={self.reduce!r}: expected a function of a tensor")
        expect_choice("of", self.of, Reduced)

    def applied(self, tensor: Tensor, what: Reduced) -> Tensor:
        """`tensor`, reduced if this is the place for it."""
        if self.of != what:
            return tensor
        reduced = self.reduce(tensor)
        expect_shape("output of reduction.reduce", reduced, tensor.shape)
        return reduced


class MoERunner(nn.Module):
    """Runs gate, routed experts and shared experts.

    Args:
        experts: `FusedMoE`, or a `ModularKernel`.
        gate: a module, tokens to logits. None: the caller has the logits.
        router: logits [T, E] and tokens [T, H] to `RouterOutput`, such as `experts.route`, so that the experts get ids.
            None: they get logits.
        shared_experts: a module, tokens [T, H] to [T, H], or None. Outputs are summed or averaged, as the `combination`
            of `SharedExperts` says; beside another module, as the config of the experts does.
        shared_order: "before" the routed experts, whose sum their output joins before it is rounded; "beside" the way
            to the experts of a `ModularKernel`, or `SharedExperts` beside a `FusedMoE` in one operator, and then the
            same; "after" them, and rounded once more.
        reduction: None on one device.
        routed_input_transform, routed_output_transform: modules around the routed experts, into a space of another
            size and back (latent experts), or None. Gate, router and shared experts see what the runner is given;
            a `reduction` comes behind both.

    Raises:
        TypeError: `experts` is neither, another part is no module, `router` no function, or `reduction` no `Reduction`.
        ValueError: `shared_order` is none of the three, or "beside" a `FusedMoE` that is no place for it
            (`MoEConfig.expect_overlap`, experts that are quantised or that ranks share), other modules than
            `SharedExperts`, a `reduction` of these alone, or transforms; a `reduction` of shared experts that there are
            not; one transform without the other.

    Example:
        >>> runner = MoERunner(block.experts, block.gate, shared_experts=block.shared_experts)  # what `block` does
        >>> output = runner(hidden_states)
    """

    experts: FusedMoE | ModularKernel
    gate: nn.Module | None
    shared_experts: nn.Module | None

    def __init__(
        self,
        experts: FusedMoE | ModularKernel,
        gate: nn.Module | None = None,
        router: Callable[[Tensor, Tensor], RouterOutput] | None = None,
        shared_experts: nn.Module | None = None,
        *,
        shared_order: SharedOrder = "before",
        reduction: Reduction | None = None,
        routed_input_transform: nn.Module | None = None,
        routed_output_transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        expect_type("experts", experts, (FusedMoE, ModularKernel))
        expect_choice("shared_order", shared_order, SharedOrder)
        if reduction is not None:
            expect_type("reduction", reduction, Reduction)
        if shared_order == "beside" and isinstance(experts, FusedMoE):
            _expect_overlap(experts, shared_experts, reduction)
        if reduction is not None and reduction.of == "shared" and shared_experts is None:
            raise ValueError("reduction.of='shared': expected 'sum' with shared_experts=None")
        if router is not None and not callable(router):
            raise TypeError(f"router={router!r}: expected None or a function")
        modules = {
            "gate": gate,
            "shared_experts": shared_experts,
            "routed_input_transform": routed_input_transform,
            "routed_output_transform": routed_output_transform,
        }
        for name, module in modules.items():
            if module is not None:
                expect_type(name, module, nn.Module)
        if (routed_input_transform is None) != (routed_output_transform is None):
            raise ValueError("routed_input_transform, routed_output_transform: expected both or neither")
        if routed_input_transform is not None and shared_order == "beside" and isinstance(experts, FusedMoE):
            raise ValueError("routed_input_transform with shared_order='beside' a FusedMoE: expected None")
        self.experts, self.gate, self.router, self.shared_experts = experts, gate, router, shared_experts
        self.routed_input_transform = routed_input_transform
        self.routed_output_transform = routed_output_transform
        self.shared_order, self.reduction = shared_order, reduction
        self._averages = _combination(experts, shared_experts) == "average"

    def forward(self, hidden_states: Tensor, router_logits: Tensor | RouterOutput | None = None) -> Tensor:
        """[..., H] to [..., H].

        Args:
            hidden_states: [..., H].
            router_logits: [..., E] or a `RouterOutput`, without a gate; None with one.

        Raises:
            TypeError, ValueError: logits beside a gate, or neither; a part that returned something else than [T, H];
                else as the experts do.
        """
        tokens = rows_of("hidden_states", hidden_states)  # [T, H]
        routing = self._route(tokens, router_logits)
        output = self._run(tokens, routing)
        output = output * 0.5 if self._averages else output
        if self.reduction is not None:
            output = self.reduction.applied(output, "sum")
        return output.reshape(hidden_states.shape)

    def _route(self, tokens: Tensor, given: Tensor | RouterOutput | None) -> Tensor | RouterOutput:
        if self.gate is not None and given is not None:
            value_error("router_logits is given: expected None, for there is a gate")
        logits = given if self.gate is None else self.gate(tokens)
        if logits is None:
            value_error("router_logits=None: expected logits, for gate=None")
        if self.router is None or isinstance(logits, RouterOutput):
            return logits
        return self.router(rows_of("router_logits", logits, "E"), tokens)

    def _run(self, tokens: Tensor, routing: Tensor | RouterOutput) -> Tensor:
        latent, routing = self._transformed(tokens, routing)
        if self.shared_order == "beside" and isinstance(self.experts, ModularKernel):
            kernel, started = self.experts, self.experts.start(latent, routing)
            shared = self._shared(tokens)
            return self._with(tokens, shared, lambda shared: kernel.finish(started.wait(), shared).wait())
        if self.shared_order == "after":
            output = self._with(tokens, None, lambda shared: self.experts(latent, routing, shared))
            shared = self._shared(tokens)
            return output if shared is None else output + shared
        if self.shared_order == "beside" and isinstance(self.shared_experts, SharedExperts):
            return self.experts(tokens, routing, self.shared_experts.operand(tokens))
        shared = self._shared(tokens)
        return self._with(tokens, shared, lambda shared: self.experts(latent, routing, shared))

    def _transformed(
        self, tokens: Tensor, routing: Tensor | RouterOutput
    ) -> tuple[Tensor, Tensor | RouterOutput]:
        """What routed experts see: of transformed tokens, the routing is that of the tokens before."""
        if self.routed_input_transform is None:
            return tokens, routing
        routed = routing if isinstance(routing, RouterOutput) else self.experts.route(routing, tokens)
        return self.routed_input_transform(tokens), routed

    def _with(self, tokens: Tensor, shared: Tensor | None, run: Callable[[Tensor | None], Tensor]) -> Tensor:
        """`shared` in the sum of the routed experts; behind the way back, where there is one."""
        if self.routed_output_transform is None:
            return run(shared)
        output = self.routed_output_transform(run(None))
        expect_shape("output of routed_output_transform", output, tokens.shape)
        return output if shared is None else output + shared

    def _shared(self, tokens: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        shared = self.shared_experts(tokens)
        expect_shape("output of shared_experts", shared, tokens.shape)  # a sum would broadcast another
        return shared if self.reduction is None else self.reduction.applied(shared, "shared")


def _combination(experts: FusedMoE | ModularKernel, shared_experts: nn.Module | None) -> Combination:
    if shared_experts is None:
        return "sum"
    if isinstance(shared_experts, SharedExperts):
        return shared_experts.combination
    holder = experts if isinstance(experts, FusedMoE) else experts.experts
    config = holder.config.shared_experts if isinstance(holder, FusedMoE | LocalExperts) else None
    return "sum" if config is None else config.combination


def _expect_overlap(experts: FusedMoE, shared_experts: nn.Module | None, reduction: Reduction | None) -> None:
    experts.config.expect_overlap()
    if experts.quantisation is not None or experts.lora is not None:
        raise ValueError("shared_order='beside' lora or quantised experts: expected 'before' or 'after'")
    if experts.parallel is not None:
        raise ValueError("shared_order='beside' experts that ranks share: expected 'before' or 'after'")
    if not isinstance(shared_experts, SharedExperts):
        kind = type(shared_experts).__name__
        raise ValueError(
            f"shared_experts={kind} with shared_order='beside' a FusedMoE: expected SharedExperts"
        )
    if reduction is not None and reduction.of == "shared":
        raise ValueError("reduction.of='shared' with shared_order='beside' a FusedMoE: expected 'sum'")
