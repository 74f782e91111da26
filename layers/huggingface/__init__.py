"""Our operators inside Hugging Face transformers models.

`register()` adds the experts implementation "moe_ops" to transformers, for `from_pretrained(...,
experts_implementation="moe_ops")` and `model.set_experts_implementation("moe_ops")`. `patch(model)` does more
for one loaded model: experts *and* routers, so that a compiler sees the layer from logits to output, and a
report of what was left alone. Importing this module does not import transformers.
"""

from typing import TYPE_CHECKING

from layers.huggingface.report import PatchReport

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PatchReport", "patch", "register"]


def register() -> None:
    """Makes `experts_implementation="moe_ops"` known to transformers. Calling it again changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    from layers.huggingface import experts

    experts.register()


def patch(model: "nn.Module") -> PatchReport:
    """Runs the experts and routers of `model` on `moe_ops`, in place, without copying a weight.

    Every experts module that transformers dispatches gets our implementation, in the layout its own flags
    declare; every router whose code we know gets `moe_ops.topk_routing`, and keeps returning its family's
    tuple, so `output_router_logits` and the auxiliary loss work as before. Other models are not affected, not
    even those built from the same config object: the patched model gets its own copy of the config, so change
    options on `model.config` afterwards, not on the object it was built from.

    Patched routers return routing weights in float32 (stock Qwen, OLMoE and gpt-oss round them to the model's
    dtype) and int32 expert ids. That is closer to exact arithmetic and saves the casts between routing and
    experts; it also means that transformers' own "eager" experts, whose loop needs int64 ids, no longer fit
    behind a patched router ("grouped_mm" and "batched_mm" do).

    Args:
        model: a loaded transformers model, or a module of one.

    Returns:
        The names of what was changed, and of every MoE block left alone with the reason.

    Raises:
        ImportError: transformers is not installed.
        TypeError: `model` is not a module.
    """
    from layers.huggingface import patching

    return patching.patch(model)
