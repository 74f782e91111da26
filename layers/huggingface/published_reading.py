"""What one parameter is made of, where a checkpoint is in 4 bits: experts stay so, other matrices become 16 bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist

from layers.huggingface import quantised_loading, quantising
from layers.huggingface.published_checks import BIAS
from layers.huggingface.published_formats import Tensors
from moe_ops.errors import value_error
from moe_ops.types import ScaledWeight
from moe_ops.weight_formats import dequantised

_STACKING = (MergeModulelist, Concatenate)


class Read(ConversionOps):
    """In the place of a converter's operations, which it calls for what is not in 4 bits then.

    Args:
        hf_quantizer: knows the format, and which experts are in it. transformers casts nothing for operations that have
            one.
        sources: the converter's patterns of weights.
    """

    def __init__(self, hf_quantizer: Any, sources: Sequence[str], operations: Sequence[Any]) -> None:
        self.hf_quantizer, self.sources, self.operations = hf_quantizer, list(sources), list(operations)
        format_ = hf_quantizer.format
        of_experts = (BIAS,) if self.is_stack else ()
        parts = dict.fromkeys(("weight", *format_.parts, *format_.beside, *of_experts))
        self.patterns = {
            f"{source.removesuffix('weight')}{part}$": (source, part) for source in sources for part in parts
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "Read":
        """transformers copies converters for each parameter; the quantizer stays the one."""
        return self

    @property
    def leaves(self) -> list[str]:
        """Modules of an expert, such as "gate_proj" and "up_proj"."""
        return [source.replace("\\", "").split(".")[-2] for source in self.sources]

    @property
    def is_stack(self) -> bool:
        """Whether it stacks experts, rows of one projection after those of the other."""
        return bool(self.operations) and all(type(each) in _STACKING for each in self.operations)

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, list[Tensor]], *more: Any, full_layer_name: str, model: Any, **rest: Any
    ) -> dict[str, Any]:
        """See `ConversionOps`. transformers would print an error and raise another, so it waits until all is read."""
        path, _, name = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        quantised_loading.expect_whole(module, path, name)
        rest |= {"source_patterns": self.sources, "full_layer_name": full_layer_name, "model": model}
        try:
            if path in self.hf_quantizer.blocks:
                return self._experts(self._matrices(input_dict), module, path, name)
            return self._weights(self._matrices(input_dict), getattr(module, name).dtype, **rest)
        except (TypeError, ValueError) as error:
            self.hf_quantizer.refused.append(f"{full_layer_name}: {error}")
            return _nothing(module, path, name)

    def _matrices(self, collected: dict[str, list[Tensor]]) -> dict[str, list[Tensors]]:
        """Of each source: tensors of a matrix by part, for one expert after the other."""
        by_source: dict[str, dict[str, list[Tensor]]] = {source: {} for source in self.sources}
        for pattern, tensors in collected.items():
            source, part = self.patterns[pattern]
            if part == BIAS and any(bool(each.any()) for each in tensors):
                value_error("{} has other numbers than zeros: expected experts without biases", pattern)
            by_source[source][part] = tensors
        return {
            source: [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]
            for source, parts in by_source.items()
        }

    def _weights(
        self, matrices: dict[str, list[Tensors]], dtype: torch.dtype, **named: Any
    ) -> dict[str, Any]:
        read: Any = {
            source: [self._weight(each, dtype) for each in found] for source, found in matrices.items()
        }
        if not self.operations:
            return {named["full_layer_name"]: read[self.sources[0]][0]}
        for each in self.operations:
            read = each.convert(read, **named)
        return read

    def _weight(self, matrix: Tensors, dtype: torch.dtype) -> Tensor:
        format_ = self.hf_quantizer.format
        if format_.is_in(matrix):
            return dequantised(format_.unpack(matrix), dtype)
        return matrix["weight"].to(dtype)

    def _experts(
        self, matrices: dict[str, list[Tensors]], module: nn.Module, path: str, name: str
    ) -> dict[str, nn.Parameter]:
        made = {}
        for index, source in enumerate(self.sources):
            for expert, matrix in enumerate(matrices[source]):
                linear = self.hf_quantizer.format.unpack(matrix)
                of_expert = ScaledWeight(linear.weight, linear.scale, None, linear.zero, linear.global_scale)
                for part, tensor in quantising.parts(name, of_expert).items():
                    if part not in made:
                        made[part] = torch.empty_like(getattr(module, part), device=tensor.device)
                    _put(part, made[part][expert].chunk(len(self.sources))[index], tensor)
        return {f"{path}.{part}": nn.Parameter(each, requires_grad=False) for part, each in made.items()}


def _nothing(module: nn.Module, path: str, name: str) -> dict[str, nn.Parameter]:
    """What stands in the place of a weight that is refused: transformers would draw what is missing."""
    parts = {each: part for each, part in module.named_parameters(recurse=False) if each.startswith(name)}
    empty = {f"{path}.{each}": torch.empty_like(part, device="cpu") for each, part in parts.items()}
    return {each: nn.Parameter(part, requires_grad=False) for each, part in empty.items()}


def _put(name: str, place: Tensor, tensor: Tensor) -> None:
    if (tensor.shape, tensor.dtype) != (place.shape, place.dtype):
        found, wanted = (f"{list(each.shape)} in {each.dtype}" for each in (tensor, place))
        value_error("{} of an expert is {}: expected {}", name, found, wanted)
    place.copy_(tensor)
