"""Which layer a node belongs to: every stage of one layer reads one dispatch plan."""

import re
from collections import Counter

from torch.fx import Graph, Node

from inductor_passes.base import LAYER_KEY
from inductor_passes.graph_tools import arguments, find, getitem_source, is_moe_op, is_op, outputs

_WHOLE_LAYERS = ("fused_experts", "fused_moe")
_DISPATCHES = ("build_dispatch", "routing_dispatch")
_LAST_STAGES = ("combine", "gemm_combine", *_WHOLE_LAYERS)


def name_layers(graph: Graph) -> None:
    """Writes `node.meta[LAYER_KEY]` on every MoE operator; names already there stay."""
    groups = [_stages_of(dispatch) for dispatch in find(graph, *_DISPATCHES)]
    groups += [_with_router(node) for node in find(graph, *_WHOLE_LAYERS)]
    taken = Counter(node.meta[LAYER_KEY] for node in graph.nodes if LAYER_KEY in node.meta)
    for index, group in enumerate(groups):
        fresh = [node for node in group if LAYER_KEY not in node.meta]
        if not fresh:
            continue
        name = _unique(module_path(_last_stage(group)) or f"moe_{index}", taken)
        for node in fresh:
            node.meta[LAYER_KEY] = name


def _stages_of(dispatch: Node) -> list[Node]:
    """The dispatch, the router before it, and every operator that reads its plan or a GEMM of it."""
    group = _with_router(dispatch)
    readers = [user for out in outputs(dispatch).values() for user in out.users if is_moe_op(user)]
    group += dict.fromkeys(readers)
    group += [user for node in readers for user in node.users if is_op(user, "gated_activation")]
    return list(dict.fromkeys(group))


def _with_router(node: Node) -> list[Node]:
    source = getitem_source(arguments(node).get("topk_ids"))
    return [source[0], node] if source is not None and is_op(source[0], "topk_routing") else [node]


def _last_stage(group: list[Node]) -> Node:
    return next((node for node in reversed(group) if is_op(node, *_LAST_STAGES)), group[-1])


def _unique(name: str, taken: Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}#{taken[name]}"


def module_path(node: Node) -> str:
    """Dotted path of the module a node was traced in, e.g. "model.layers.0.mlp"; empty when it was in none.

    Dynamo writes it as Python source, `L['self']._modules['layers'][0].mlp`.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    path = re.sub(r"^[LG]\[['\"][^'\"]*['\"]\]", "", path)
    path = re.sub(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.strip(".")
