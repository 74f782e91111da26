"""Our operators inside Hugging Face transformers models.

Importing this module is enough for the experts implementation "moe_ops" in `from_pretrained(...,
experts_implementation="moe_ops")` and `model.set_experts_implementation("moe_ops")`. `patch(model)` does more for
one loaded model: experts *and* routers, so that a compiler sees the layer from logits to output, and a report of
what was left alone; `unpatch(model)` brings the stock model back. None of it imports transformers before you do.
"""

from typing import TYPE_CHECKING

from layers.huggingface.registration import register_with_transformers
from layers.huggingface.report import PatchReport

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from layers.config import Emit, SaveForBackward
    from layers.lora import ExpertLora
    from layers.weights.scales import WeightScale
    from moe_ops.scaled_experts import RowKind

__all__ = [
    "PatchReport",
    "add_adapters",
    "as_published",
    "patch",
    "quantisation",
    "quantise_experts",
    "register",
    "tp_plan",
    "unpatch",
]

register_with_transformers()


def register() -> None:
    """Makes `experts_implementation="moe_ops"` known to transformers. Calling it again changes nothing.

    Importing `layers.huggingface` does the same as soon as a model of transformers can be built; call it only
    for experts modules used without one.

    Raises:
        ImportError: transformers is not installed.
    """
    from layers.huggingface import experts

    experts.register()


def patch(
    model: "nn.Module",
    *,
    emit: "Emit" = "auto",
    save_for_backward: "SaveForBackward" = "auto",
    mesh: "DeviceMesh | None" = None,
    style: "ParallelStyle | None" = None,
    stack_experts: bool = False,
) -> PatchReport:
    """Runs the experts and routers of `model` on `moe_ops`, in place, without copying a weight.

    Every experts module that transformers dispatches gets our implementation, in the layout its own flags
    declare; every router whose code we know gets `moe_ops.topk_routing`, and keeps returning its family's
    tuple, so `output_router_logits` and the auxiliary loss work as before. Wrappers (PEFT before or after) and
    accelerate's hooks (`device_map`, offloading) stay in force around them. Other models are not affected, not
    even those built from the same config object: the patched model gets its own copy of the config, so change
    options on `model.config` afterwards, not on the object it was built from. Patching again changes the options;
    `unpatch` brings the stock model back. What changes inside later counts too: a router with another `top_k`,
    experts with another activation or hooks on it run their own code then, until they are patched again. Modules of
    another model that are put in later need a patch of their own. Deep copies are
    patched as the model is, those of `copy.copy` call the original; out of a pickle
    (`torch.save(model)`) it is to be patched again: till then its routers and
    blocks run their own code, and stacked experts raise.

    Patched routers return routing weights in float32 (stock Qwen, OLMoE and gpt-oss round them to the model's
    dtype), and int32 expert ids to our experts. That is closer to exact arithmetic and saves the casts between
    routing and experts. Logits that a family computes in float32 (DeepSeek-V3, GLM-4) are float32 inside
    `torch.autocast` too. transformers' own implementations work behind patched routers, which hand them int64 ids.

    Args:
        model: a loaded transformers model, or a module of one.
        emit, save_for_backward: as in `layers.MoEConfig`, for all its experts; not "batch_invariant". Experts with a
            gate of their own, and quantised ones (`FineGrainedFP8Config`), always run stage by stage and keep
            activations; with "inputs" they are checkpointed.
        mesh: of one dimension: its ranks share the experts of the model, which every one of them has loaded, or its
            part by the plan of `tp_plan`. None leaves them as they are, whole or shared before.
        style: how, an `ExpertParallel` or `ExpertTensorParallel` of `layers.parallel`. None is
            `ExpertParallel("allreduce")`: every rank runs the same tokens, as generation does. Experts are shared once.
        stack_experts: experts that are modules of their own, in a list that their block loops over, are stacked into
            two tensors, and gate and up projections that are two tensors become one. Each weight is freed when it has
            been copied, so do it before an optimiser holds them. State dicts keep the names of before, and are loaded
            as the modules would; with `assign=True` the weights of a tensor need one dtype and device. Experts with
            hooks or a forward of their own, or used elsewhere in the model as well, stay modules. A gate that chooses
            experts itself keeps its own code.

    Returns:
        The names of what was changed, and of every MoE block left alone with the reason.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: `model` is not a module, an option is not one, or experts are shared by another mesh or
            style already; nothing has been changed then. Experts that cannot be shared by the mesh's ranks, among them
            those of blocks that are patched as a whole, or were loaded by another plan, are patched, and stay as they
            are.
    """
    from layers.huggingface import patching

    return patching.patch(model, emit, save_for_backward, mesh, style, stack_experts)


def add_adapters(
    model: "nn.Module",
    num_adapters: int,
    rank: int,
    adapter_ids: "Tensor",
    *,
    gate_up_rank: int | None = None,
) -> "dict[str, ExpertLora]":
    """Makes LoRA adapters for the experts of all layers of a patched model, in place of those it had.

    Of experts that ranks share, each rank holds the adapters of what it has, as DTensors. New ones change nothing until
    `ExpertLora.load_adapter` or training does. `unpatch` takes them away.

    Args:
        model: patched, and sharded if it is to be.
        num_adapters, rank, gate_up_rank: see `layers.ExpertLora`.
        adapter_ids: [M] int32 or int64, of the tokens [batch * length] that come next, changed in place before a
            forward, which reads as many as it has tokens: one for each sequence in a step of generation.

    Returns:
        Adapters by the name of their experts, such as "model.layers.0.mlp.experts". Rows of w13 are in the order in
        which the model has them: gate rows first, or alternating (gpt-oss).

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: an argument is not as described; no experts are patched, or some compute their activation
            themselves.

    Example:
        >>> adapters = add_adapters(model, num_adapters=4, rank=16, adapter_ids=adapter_ids)
        >>> adapters["model.layers.0.mlp.experts"].load_adapter(0, gate_up, down, scaling=2.0)
    """
    from layers.huggingface import adapters

    return adapters.add_adapters(model, num_adapters, rank, adapter_ids, gate_up_rank)


def quantise_experts(
    model: "nn.Module",
    kind: "WeightScale",
    block: tuple[int, int] = (128, 128),
    *,
    dtype: "torch.dtype",
    rows: "RowKind | None" = None,
    zero_points: bool = False,
) -> tuple[str, ...]:
    """Turns the experts of a patched model into ones of 8 or 4 bits, in place; the rest of the model stays.

    Weights are frozen, and each is freed when its rounded copy is there. Experts of gpt-oss in bfloat16 become the
    MXFP4 in which they are published, to the bit. Save a model before: transformers has no names for what its state
    dict holds afterwards. Ranks share such experts as they do published ones in float8, by `patch(model, mesh=mesh)`.

    Args:
        model: patched, without adapters and not sharded.
        kind, block, dtype, rows, zero_points: see `layers.quantise_experts`. Tokens that need a gradient are not
            rounded.

    Returns:
        The names of the experts.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: as `layers.quantise_experts`; no experts are patched, or some are of another interface
            than transformers', quantised, sharded, offloaded or adapted. Nothing has been changed then.

    Example:
        >>> patch(model)
        >>> quantise_experts(model, layers.WeightScale.CHANNEL, dtype=torch.float8_e4m3fn)
    """
    from layers.huggingface import quantising

    return quantising.quantise_experts(model, kind, block, dtype, rows, zero_points)


def quantisation(
    kind: "WeightScale",
    block: tuple[int, int] = (128, 128),
    *,
    dtype: "torch.dtype",
    rows: "RowKind | None" = None,
    zero_points: bool = False,
) -> "QuantizationConfigMixin":
    """What makes `from_pretrained` read a model's experts into 8 or 4 bits, one weight after the other, and patch it.

    The model is that of `patch` and then `quantise_experts`, but its experts are never all there in 16 bits. Published
    MXFP4, as gpt-oss is, is taken to the bit with `dtype=torch.uint8`, `WeightScale.GROUP` and (1, 32), if the model's
    config has no `quantization_config` of its own. `patch` again changes options and shares experts out to ranks.

    Args:
        kind, block, dtype, rows, zero_points: see `layers.quantise_experts`.

    Returns:
        For `from_pretrained(..., quantization_config=...)`, which raises ValueError where experts are not of
        transformers' interface, cannot run on our operators, or are not in the checkpoint as such.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: as `layers.quantise_experts`.

    Example:
        >>> config = AutoConfig.from_pretrained("openai/gpt-oss-120b")
        >>> del config.quantization_config  # by which transformers would convert all of it to bfloat16
        >>> in_mxfp4 = quantisation(layers.WeightScale.GROUP, (1, 32), dtype=torch.uint8)
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     "openai/gpt-oss-120b", config=config, quantization_config=in_mxfp4, device_map="cuda"
        ... )
    """
    from layers.huggingface import quantised_loading

    return quantised_loading.ExpertsQuantisation(kind, block, dtype, rows, zero_points)


def as_published(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """A config by which `from_pretrained` reads a checkpoint in 4 bits, and leaves its experts in these.

    Checkpoints are GPTQ's, AWQ's, compressed-tensors' ("pack-quantized", "nvfp4-pack-quantized") or ModelOpt's (NVFP4);
    no package of theirs is needed. Experts are integers of 4 bits or NVFP4 then, the same numbers to the bit, and other
    matrices that are in 4 bits (attention, shared experts) become ones of the model's dtype. Tokens stay exact, also
    those that NVFP4's config would round, and so do caches. The model is patched.

    Args:
        config: of a transformers model, with the `quantization_config` of the checkpoint. It stays as it is.

    Returns:
        A copy for `from_pretrained(..., config=...)`, which raises ValueError where tensors are missing, unknown or do
        not belong together, a layer's experts are in 4 bits in part, or they cannot run on our operators.

    Raises:
        ImportError: transformers is not installed.
        TypeError: `config` is none.
        ValueError: it has no `quantization_config`, or one that is not read so: another method, other bits, groups of
            no multiple of 32, several formats at once, rounded tokens beside integers.

    Example:
        >>> config = as_published(AutoConfig.from_pretrained("Qwen/Qwen3-30B-A3B-GPTQ-Int4"))
        >>> model = AutoModelForCausalLM.from_pretrained(
        ...     "Qwen/Qwen3-30B-A3B-GPTQ-Int4", config=config, device_map="cuda"
        ... )
    """
    from layers.huggingface import published, published_loading  # noqa: F401  # the latter is known to transformers then

    return published.as_published(config)


def tp_plan(model: "nn.Module", style: "ParallelStyle") -> dict[str, str]:
    """A plan by which `from_pretrained` reads, of a checkpoint, what each rank computes with after `patch`.

    The plan is one of transformers' rules: for `DistributedConfig(tp_size=W, tp_plan=...)`. Of experts it names the
    part that `style` gives a rank, so no rank reads the others'. The rest is as the model's own plan has it, where
    ranks run the same tokens; where they have their own, every rank has it whole.

    Args:
        model: a transformers model, which may be on the meta device.
        style: that of `patch`, an `ExpertParallel` or `ExpertTensorParallel`.

    Returns:
        Rules by name, with "*" for the numbers of layers.

    Raises:
        ImportError: transformers is not installed, or has no plans.
        TypeError: an argument is not as described.
        ValueError: experts cannot be shared by ranks.

    Example:
        >>> with torch.device("meta"):
        ...     plan = tp_plan(AutoModelForCausalLM.from_config(config), style)
        >>> split = DistributedConfig(tp_size=W, tp_plan=plan)
        >>> model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split)
        >>> patch(model, mesh=mesh, style=style)
    """
    from layers.huggingface import plans

    return plans.tp_plan(model, style)


def unpatch(model: "nn.Module") -> None:
    """Undoes `patch`: forwards, attributes and the config's experts implementation are as before the first one.

    That holds for copies and pickles of a patched model as well, and whatever implementation was set since. The
    config stays the model's own. A model that was not patched is left as it is.

    Raises:
        ImportError: transformers is not installed.
        TypeError: `model` is not a module.
        ValueError: its experts are sharded over a mesh, were quantised, or are stacked and inside a wrapper.
    """
    from layers.huggingface import patching

    patching.unpatch(model)
