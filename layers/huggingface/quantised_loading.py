"""Experts that become ones of 8 or 4 bits while `from_pretrained` reads them, one weight after the other.

transformers has a quantizer for each method of quantisation, by the name that its config gives. Ours declares what is
beside the weights, turns each into what is stored once the experts of a layer are merged, and patches the model in the
end. Weights that gpt-oss publishes in MXFP4 are taken as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from layers.huggingface import experts, patching, quantised, quantising
from layers.huggingface.experts import is_dispatched
from layers.huggingface.quantised import SCALE, Blocks
from layers.weights.scales import WeightScale
from moe_ops.errors import value_error
from moe_ops.pairs import GROUP, PAIRS
from moe_ops.scaled_experts import RowKind
from moe_ops.weight_formats import IN_4_BITS, quantised_weight

_METHOD = "moe_ops"
_OF_BLOCKS = 4  # dimensions of published MXFP4: experts, rows, groups of 32 columns, bytes of a group


class ExpertsQuantisation(QuantizationConfigMixin):
    """See `layers.huggingface.quantisation`. Attributes are what JSON can say, for configs are printed as such."""

    def __init__(
        self,
        kind: WeightScale,
        block: tuple[int, int],
        dtype: torch.dtype,
        rows: RowKind | None,
        zero_points: bool,
    ) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # one that transformers does not know
        self.rows: RowKind = quantising.expect_quantisation(kind, block, dtype, rows, zero_points)
        self.kind, self.block, self.zero_points = kind.value, list(block), zero_points
        self.dtype = str(dtype).removeprefix("torch.")


@register_quantizer(_METHOD)
class ExpertsQuantizer(HfQuantizer):
    """What transformers asks while it reads a model."""

    def __init__(self, quantization_config: ExpertsQuantisation, **named: Any) -> None:
        super().__init__(quantization_config, **named)
        self.options = quantization_config
        self.dtype: torch.dtype = getattr(torch, quantization_config.dtype)
        self.blocks: dict[str, Blocks] = {}  # of each experts module
        self.stored: set[str] = set()  # names of weights

    def param_needs_quantization(self, model: nn.Module, param_name: str, **more: Any) -> bool:
        """Whether it is a weight of experts."""
        path, _, name = param_name.rpartition(".")
        return path in self.blocks and name in quantised.names(model.get_submodule(path))

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Bytes of a number, by which transformers shares out the memory of devices."""
        if self.param_needs_quantization(model, param_name):
            return 0.5 if self.dtype in IN_4_BITS else 1
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """What a weight goes through when it has been read."""
        return _Store(self)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The names in which MXFP4 is published are those of what it becomes."""
        is_mxfp4 = self.dtype == PAIRS and self.options.block == [1, GROUP]
        ends = {"_blocks": "", "_scales": SCALE} if is_mxfp4 else {}
        renamed = [
            WeightRenaming(rf"experts\.{weight}{end}$", f"experts.{weight}{part}")
            for weight in ("gate_up_proj", "down_proj")
            for end, part in ends.items()
        ]
        return [*renamed, *weight_conversions]

    def is_serializable(self) -> bool:  # type: ignore[override]
        """transformers has no names for what the state dict holds."""
        return False

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        """Gradients go through to tokens, to adapters and to all that is not quantised."""
        return True

    @property
    def is_compileable(self) -> bool:
        """As patched models are."""
        return True

    def store(self, module: Any, path: str, name: str) -> dict[str, Tensor]:
        """What is stored of a weight in the layout of the checkpoint, by the names of parameters."""
        self.stored.add(f"{path}.{name}")
        weight = getattr(module, name)
        if weight.dim() == _OF_BLOCKS:
            return {name: weight.to(PAIRS).flatten(2)}
        return self._made(module, path, name, slice(None))

    def _made(self, module: Any, path: str, name: str, of: slice) -> dict[str, Tensor]:
        index = quantised.names(module).index(name)
        weight = experts.weights(module)[index].weight[of]
        made = quantised_weight(weight, self.blocks[path][index], self.dtype, self.options.zero_points)
        return quantising.parts(name, made)

    def _process_model_before_weight_loading(self, model: nn.Module, **more: Any) -> None:
        """Declares parameters for what weights have beside them."""
        found: dict[str, Any] = {n: m for n, m in model.named_modules() if is_dispatched(m)}
        if not found:
            value_error("{} has no experts that transformers dispatches: expected some", type(model).__name__)
        rows, columns = self.options.block
        for path, module in found.items():
            self.blocks[path] = quantising.blocks_of(
                module, WeightScale(self.options.kind), (rows, columns), self.dtype
            )
            for name in quantised.names(module):
                for each, tensor in self._declared(module, path, name).items():
                    module.register_parameter(each, nn.Parameter(tensor, requires_grad=False))

    def _declared(self, module: Any, path: str, name: str) -> dict[str, Tensor]:
        """Parameters beside a weight, by those of one expert. The weight itself stays: what is read gets its dtype."""
        of_one = self._made(module, path, name, slice(1))
        count = experts.weights(module).w2.weight.shape[0]
        return {n: each.new_empty((count, *each.shape[1:])) for n, each in of_one.items() if n != name}

    def _process_model_after_weight_loading(self, model: Any, **more: Any) -> Any:
        for path, blocks in self.blocks.items():
            module = model.get_submodule(path)
            for name in quantised.names(module):
                self._expect_here(module, path, name)
            quantising.settle(module, self.options.rows, blocks)
        report = patching.patch(model, "auto", "auto", None, None, False)
        for path, why in report.left:
            if path in self.blocks and path not in report.experts:
                value_error("{} cannot run on our operators: {}", path, why)
        return model

    def _expect_here(self, module: nn.Module, path: str, name: str) -> None:
        if f"{path}.{name}" not in self.stored:
            wanted = "expected it in 16 bits or more; or in MXFP4, and dtype=torch.uint8, block=(1, 32)"
            value_error("{}.{} is not in the checkpoint: " + wanted, path, name)
        if getattr(module, name).is_meta:
            value_error("{}.{} is offloaded: expected a device_map that keeps experts on devices", path, name)


class _Store(ConversionOps):
    """Turns a weight that has been read into what is stored."""

    def __init__(self, of: ExpertsQuantizer) -> None:
        self.of: Any = of

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *more: Any, full_layer_name: str, model: nn.Module, **rest: Any
    ) -> dict[str, Tensor]:
        """See `ConversionOps`; the weight takes its place in the module, where what it is one of says how it lies."""
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(getattr(module, name), DTensor):
            raise ValueError(
                f"{full_layer_name} is read by parts: expected whole experts, which patch shares out"
            )
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
        stored = self.of.store(module, path, name)
        return {f"{path}.{each}": nn.Parameter(found, requires_grad=False) for each, found in stored.items()}
