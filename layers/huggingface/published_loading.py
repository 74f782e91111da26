"""Models whose checkpoints are in 4 bits: experts stay in these, and other matrices become 16 bits while they are read.

transformers collects what becomes one parameter, such as the gate and up projections of all experts, by the patterns
of a converter. Ours ask for the tensors of quantised matrices in the place of weights. What a checkpoint lacks is found
before the first byte is read, by its names, as transformers will rename them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from layers.huggingface import experts, quantised, quantised_loading, quantising
from layers.huggingface.published import METHOD, Settings, format_of
from layers.huggingface.published_checks import Stored, expect_complete, expect_experts, quantised_matrices
from layers.huggingface.published_reading import Read
from layers.huggingface.quantised import GLOBAL_SCALE, SCALE, ZERO_POINT, Blocks
from layers.huggingface.quantised_loading import MISSING
from layers.weights.safetensors_file import read_header
from layers.weights.scales import WeightScale
from moe_ops.errors import value_error
from moe_ops.pairs import PAIRS

_HALVES = (torch.float16, torch.bfloat16)


class Target(NamedTuple):
    """What becomes a parameter: how it is read, if not as it is, and tensors of the checkpoint."""

    read: Read | None
    names: list[str]


class PublishedQuantisation(QuantizationConfigMixin):
    """What `as_published` makes of a config's `quantization_config`."""

    def __init__(self, published: Settings, **named: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # one that transformers does not know
        self.published = published


register_quantization_config(METHOD)(PublishedQuantisation)


@register_quantizer(METHOD)
class PublishedQuantizer(quantised_loading.Quantizer):
    """What transformers asks while it reads a model."""

    def __init__(self, quantization_config: PublishedQuantisation, **named: Any) -> None:
        super().__init__(quantization_config, **named)
        self.format = format_of(quantization_config.published)
        self.stored: Stored = {}
        self.blocks: dict[str, Blocks] = {}  # of each experts module in 4 bits
        self.dtypes: dict[str, torch.dtype] = {}
        self.refused: list[str] = []
        self.reading: Any = None  # the model, until it is read

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """transformers' converters, reading what the checkpoint has, and after them ours for all other matrices."""
        matrices = quantised_matrices(self.stored, self.format)
        leaves = sorted({name.rpartition(".")[2] for name in matrices})
        found = [self._reading(each, leaves) for each in weight_conversions]
        found += [self._converter([f"{leaf}.weight"], [f"{leaf}.weight"], []) for leaf in leaves]
        self._declare_experts(matrices, self._targets(found))
        return found

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **more: Any
    ) -> None:
        quantised_loading.experts_of(model)
        for each in checkpoint_files or []:
            if not each.endswith(".safetensors"):
                value_error("{} in the checkpoint: expected safetensors", Path(each).name)
            self.stored |= read_header(Path(each))
        expect_complete(self.stored, self.format)
        self.dtypes = {name: each.dtype for name, each in model.named_parameters()}
        self.reading = model

    def _reading(self, conversion: Any, leaves: list[str]) -> Any:
        """One of transformers' conversions; of weights of such modules it takes what the checkpoint has of them."""
        sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
        is_of_weights = all(each.endswith(".weight") for each in sources)
        if not isinstance(conversion, WeightConverter) or not is_of_weights:
            return conversion
        made = self._converter(sources, targets, conversion.operations)
        if not set(made.operations[0].leaves) & set(leaves):
            return conversion
        for name in ("scope_prefix", "base_model_prefix", "force_cpu"):
            setattr(made, name, getattr(conversion, name))
        return made

    def _converter(self, sources: list[str], targets: list[str], operations: list[Any]) -> Any:
        read = Read(self, sources, operations)
        return WeightConverter(list(read.patterns), list(targets), [read])

    def _targets(self, conversions: list[Any]) -> dict[str, Target]:
        """What becomes a parameter, by its name."""
        state, prefix = self.reading.state_dict(), self.reading.base_model_prefix
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        reads = {
            pattern: each.operations[0] if isinstance(each.operations[0], Read) else None
            for each in converters
            for pattern in each.source_patterns
        }
        found: dict[str, Target] = {}
        for name in self.stored:
            parameter, pattern = rename_source_key(name, renamings, converters, prefix, state)
            found.setdefault(parameter, Target(reads.get(pattern or ""), [])).names.append(name)
        return found

    def _declare_experts(self, matrices: set[str], targets: dict[str, Target]) -> None:
        """Those in 4 bits get their parameters. Raises ValueError where experts are missing, or none are."""
        for path, module in quantised_loading.experts_of(self.reading).items():
            of_module = {}
            for name in quantised.names(module):
                if f"{path}.{name}" not in targets:
                    value_error(MISSING, path, name)
                of_module[name] = targets[f"{path}.{name}"]
            names = [name for each in of_module.values() for name in each.names]
            if any(name.rpartition(".")[0] in matrices for name in names):
                self._declare(path, module, of_module)
        if not self.blocks:
            wanted = "expected {} of experts, as its quantization_config says"
            value_error("the checkpoint has no experts in 4 bits: " + wanted, self.format.numbers)

    def _declare(self, path: str, module: Any, targets: dict[str, Target]) -> None:
        columns = self.format.columns
        kind = WeightScale.CHANNEL if columns is None else WeightScale.GROUP
        blocks = quantising.blocks_of(module, kind, (1, columns or 1), self.format.dtype)
        for (name, target), linear in zip(targets.items(), experts.weights(module), strict=True):
            read, count = target.read, linear.weight.shape[0]
            if read is None or not read.is_stack or not getattr(module, "is_concatenated", True):
                value_error("{}.{} in 4 bits: expected experts of which each has its own tensors", path, name)
            expect_experts(self.stored, target.names, count, read.leaves, self.format)
            ends = f".{self.format.scale}"
            scale = next(self.stored[each].dtype for each in target.names if each.endswith(ends))
            quantised_loading.declare(module, self._declared(name, linear.weight, scale, len(read.leaves)))
        self.blocks[path] = blocks

    def _declared(self, name: str, weight: Tensor, scale: torch.dtype, leaves: int) -> dict[str, Tensor]:
        """Parameters in the place of a weight [E, B, A]."""
        count, rows, columns = weight.shape
        groups = columns // self.format.group(columns)
        parts = {
            name: weight.new_empty((count, rows, columns // 2), dtype=PAIRS),
            name + SCALE: weight.new_empty((count, rows, groups), dtype=scale),
        }
        if self.format.zero_points:
            parts[name + ZERO_POINT] = weight.new_empty((count, rows, groups), dtype=PAIRS)
        if self.format.has_global_scale:
            parts[name + GLOBAL_SCALE] = weight.new_empty((count, leaves), dtype=torch.float32)
        return parts

    def _process_model_after_weight_loading(self, model: Any, **more: Any) -> Any:
        self.reading, self.stored = None, {}
        if self.refused:
            value_error("{}", self.refused[0])
        for path in self.blocks:
            module = model.get_submodule(path)
            for name in quantised.names(module):
                quantised_loading.expect_here(module, path, name)
        for name, parameter in model.named_parameters():
            if (
                parameter.dtype in _HALVES and name in self.dtypes
            ):  # transformers 5.17 casts none that it renames
                parameter.data = parameter.data.to(self.dtypes[name])
        return quantised_loading.settle(model, self.blocks, "exact")
