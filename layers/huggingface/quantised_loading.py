"""Experts that become ones of 8 or 4 bits while `from_pretrained` reads them, one weight after the other.

transformers has a quantizer for each method of quantisation, by the name that its config gives. Ours declares what is
beside the weights, turns each into what is stored once the experts of a layer are merged, and patches the model in the
end. Weights that gpt-oss publishes in MXFP4 are read as bytes and stay what they are.
"""

from collections.abc import Iterable
from pathlib import Path
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
from layers.weights.safetensors_file import read_header
from layers.weights.scales import WeightScale
from moe_ops._checks import FLOATING_DTYPES
from moe_ops.errors import value_error
from moe_ops.pairs import GROUP, PAIRS
from moe_ops.scaled_experts import RowKind
from moe_ops.weight_formats import IN_4_BITS, quantised_weight

_METHOD = "moe_ops"
_BLOCKS, _SCALES = "_blocks", "_scales"  # at the end of names of MXFP4 as it is published
MISSING = "{}.{} is not in the checkpoint"
_BYTES = GROUP // 2  # of a group: blocks are [E, B, A / 32, 16], scales [E, B, A / 32]


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


class Quantizer(HfQuantizer):
    """Of experts in fewer bits: what one may do with a model."""

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


@register_quantizer(_METHOD)
class ExpertsQuantizer(Quantizer):
    """What transformers asks while it reads a model."""

    def __init__(self, quantization_config: ExpertsQuantisation, **named: Any) -> None:
        super().__init__(quantization_config, **named)
        self.options = quantization_config
        self.dtype: torch.dtype = getattr(torch, quantization_config.dtype)
        self.blocks: dict[str, Blocks] = {}  # of each experts module
        self.rounded: set[str] = set()  # names of weights
        self.is_published = False

    def param_needs_quantization(self, model: nn.Module, param_name: str, **more: Any) -> bool:
        """Whether it is a weight of experts that is rounded here."""
        path, _, name = param_name.rpartition(".")
        is_rounded = path in self.blocks and not self.is_published
        return is_rounded and name in quantised.names(model.get_submodule(path))

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
        ends = {_BLOCKS: "", _SCALES: SCALE} if self.is_published else {}
        renamed = [
            WeightRenaming(rf"experts\.{weight}{end}$", f"experts.{weight}{part}")
            for weight in ("gate_up_proj", "down_proj")
            for end, part in ends.items()
        ]
        return [*renamed, *weight_conversions]

    def round(self, module: Any, path: str, name: str) -> dict[str, Tensor]:
        """What is stored of a weight in the layout of the checkpoint, by the names of parameters."""
        self.rounded.add(f"{path}.{name}")
        return self._made(module, path, name, slice(None))

    def _made(self, module: Any, path: str, name: str, of: slice) -> dict[str, Tensor]:
        index = quantised.names(module).index(name)
        weight = experts.weights(module)[index].weight[of]
        made = quantised_weight(weight, self.blocks[path][index], self.dtype, self.options.zero_points)
        return quantising.parts(name, made)

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **more: Any
    ) -> None:
        """Declares parameters for what weights have beside them, and for published bytes."""
        found = experts_of(model)
        stored = _stored_experts(checkpoint_files or [])
        is_mxfp4 = self.dtype == PAIRS and self.options.block == [1, GROUP]
        self.is_published = is_mxfp4 and any(name.endswith(_BLOCKS) for name in stored)
        _expect_known(stored, self.is_published)
        rows, columns = self.options.block
        for path, module in found.items():
            self.blocks[path] = quantising.blocks_of(
                module, WeightScale(self.options.kind), (rows, columns), self.dtype
            )
            for name in quantised.names(module):
                if self.is_published:
                    _expect_published(stored, path, name)
                declare(module, self._declared(module, path, name))

    def _declared(self, module: Any, path: str, name: str) -> dict[str, Tensor]:
        """Parameters by those of one expert. A weight that is rounded stays: what is read gets its dtype."""
        of_one = self._made(module, path, name, slice(1))
        count = experts.weights(module).w2.weight.shape[0]
        declared = {n: each.new_empty((count, *each.shape[1:])) for n, each in of_one.items()}
        weight = declared.pop(name)
        return declared | ({name: weight.unflatten(2, (-1, _BYTES))} if self.is_published else {})

    def _process_model_after_weight_loading(self, model: Any, **more: Any) -> Any:
        for path in self.blocks:
            module = model.get_submodule(path)
            for name in quantised.names(module):
                self._expect_read(path, name)
                expect_here(module, path, name)
                if self.is_published:
                    found = nn.Parameter(getattr(module, name).flatten(2), requires_grad=False)
                    module.register_parameter(name, found)
        return settle(model, self.blocks, self.options.rows)

    def _expect_read(self, path: str, name: str) -> None:
        if not self.is_published and f"{path}.{name}" not in self.rounded:
            value_error(MISSING, path, name)


def settle(model: Any, blocks: dict[str, Blocks], rows: RowKind) -> Any:
    """The model, patched, once all of its experts have been read. Raises ValueError for ones that cannot be."""
    for path, of_experts in blocks.items():
        quantising.settle(model.get_submodule(path), rows, of_experts)
    report = patching.patch(model, "auto", "auto", None, None, False)
    for path, why in report.left:
        if path in blocks and path not in report.experts:
            value_error("{} cannot run on our operators: {}", path, why)
    return model


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Modules by name. Raises ValueError where there are none."""
    found = {name: each for name, each in model.named_modules() if is_dispatched(each)}
    if not found:
        value_error("{} has no experts that transformers dispatches: expected some", type(model).__name__)
    return found


def expect_here(module: nn.Module, path: str, name: str) -> None:
    """Raises ValueError for experts of which a part is elsewhere."""
    expect_whole(module, path, name)
    if getattr(module, name).is_meta:
        value_error("{}.{} is offloaded: expected a device_map that keeps experts on devices", path, name)


def expect_whole(module: nn.Module, path: str, name: str) -> None:
    """Raises ValueError for a weight of which a rank reads its part."""
    if isinstance(getattr(module, name), DTensor):
        value_error("{}.{} is read by parts: expected whole experts, which patch shares out", path, name)


def declare(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Registers what is going to be read, by name."""
    for name, tensor in parameters.items():
        parameter: Any = nn.Parameter(tensor, requires_grad=False)
        parameter._is_hf_initialized = True  # nothing is drawn for what is not read, as on a disk
        module.register_parameter(name, parameter)


def _stored_experts(files: list[str]) -> dict[str, torch.dtype]:
    """Names and dtypes of what a checkpoint has of experts. Pickles do not say."""
    headers = (read_header(Path(each)) for each in files if each.endswith(".safetensors"))
    return {name: each.dtype for header in headers for name, each in header.items() if ".experts." in name}


def _expect_published(stored: Iterable[str], path: str, name: str) -> None:
    """Both parts of a weight; names in the checkpoint of a larger model begin otherwise."""
    for end in (_BLOCKS, _SCALES):
        if not any(each.endswith(f"{path}.{name}{end}") for each in stored):
            value_error(MISSING, path, name + end)


def _expect_known(stored: dict[str, torch.dtype], is_published: bool) -> None:
    """Raises ValueError for numbers that stand for others: transformers would read them as what they are not."""
    for name, dtype in stored.items():
        if dtype not in FLOATING_DTYPES and not (is_published and name.endswith((_BLOCKS, _SCALES))):
            wanted = "expected experts in 16 bits or more; or in MXFP4, and dtype=torch.uint8, block=(1, 32)"
            value_error("{} in the checkpoint has dtype {}: " + wanted, name, dtype)


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
        expect_whole(module, path, name)
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
        stored = self.of.round(module, path, name)
        return {f"{path}.{each}": nn.Parameter(found, requires_grad=False) for each, found in stored.items()}
