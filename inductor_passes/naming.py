"""Which layer a node belongs to, and what it is called: every stage of one layer reads one dispatch plan."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from inductor_passes.base import LAYER_KEY
from inductor_passes.graph_tools import arguments, find, getitem_source, is_moe_op, is_op, outputs
from inductor_passes.raising.experts import product_layers

_WHOLE_LAYERS = ("fused_experts", "fused_moe")
_DISPATCHES = ("build_dispatch", "routing_dispatch")
_LAST_STAGES = ("combine", "gemm_combine", *_WHOLE_LAYERS)


@dataclass
class LayerNames:
    """Names the layers of one or several graphs, each name once."""

    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of a module by its `str(id(module))`, where the modules are known."""
    taken: Counter[str] = field(default_factory=Counter)

    def write(self, graph: Graph, where: str = "") -> None:
        """Writes `node.meta[LAYER_KEY]` on every MoE operator and on the products of stock layers; names already there
        stay. `where` names a subgraph.
        """
        groups = [_stages_of(dispatch) for dispatch in find(graph, *_DISPATCHES)]
        groups += [_with_router(node) for node in find(graph, *_WHOLE_LAYERS)]
        groups += [[product.node for product in layer] for layer in product_layers(graph)]
        self.taken.update({node.meta[LAYER_KEY]: 1 for node in graph.nodes if LAYER_KEY in node.meta})
        for index, group in enumerate(groups):
            fresh = [node for node in group if LAYER_KEY not in node.meta]
            if not fresh:
                continue
            name = self._unique(self._path(group) or f"moe_{index}", where)
            for node in fresh:
                node.meta[LAYER_KEY] = name

    def _path(self, group: list[Node]) -> str:
        """The module of the last stage or, where the router sits beside that, the module around both."""
        paths = [path for node in group if (path := self.module_path(node))]
        last = self.module_path(_last_stage(group))
        around = last.rpartition(".")[0]
        if not is_moe_op(group[-1]) and last.endswith(".experts"):
            return around  # where the router is, too, which is not known as one yet
        if around and not all(_is_within(path, last) for path in paths):
            return around if all(_is_within(path, around) for path in paths) else last
        return last

    @staticmethod
    def modules_around(node: Node) -> list[str]:
        """Ids of the modules a node was traced in, outermost first. Dynamo adds "@1" and so on at further calls."""
        return [str(key).partition("@")[0] for key in node.meta.get("nn_module_stack") or ()]

    def module_path(self, node: Node) -> str:
        """Dotted path of the module a node was traced in, e.g. "model.layers.0.mlp"; empty when it was in none."""
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return ""
        known = self.modules.get(self.modules_around(node)[-1])
        return known if known is not None else _readable(next(reversed(stack.values()))[0])

    def _unique(self, name: str, where: str) -> str:
        name = f"{name} in {where}" if where else name
        self.taken[name] += 1
        return name if self.taken[name] == 1 else f"{name}#{self.taken[name]}"


def _stages_of(dispatch: Node) -> list[Node]:
    """The dispatch, the router before it, and every operator that reads its plan or a GEMM of it."""
    group = _with_router(dispatch)
    readers = [user for out in outputs(dispatch).values() for user in out.users if is_moe_op(user)]
    group += dict.fromkeys(readers)
    group += [user for node in readers for user in node.users if is_op(user, "gated_activation")]
    return list(dict.fromkeys(group))


def _with_router(node: Node) -> list[Node]:
    source = getitem_source(getattr(arguments(node), "topk_ids", None))
    return [source[0], node] if source is not None and is_op(source[0], "topk_routing") else [node]


def _last_stage(group: list[Node]) -> Node:
    return next((node for node in reversed(group) if is_op(node, *_LAST_STAGES)), group[-1])


def _is_within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _readable(source: str) -> str:
    """A module's path out of the Python source Dynamo writes it as.

    L['self']._modules['layers'][0].mlp, L['run'].__closure__[1].cell_contents.layers[0].mlp and, for a global of
    another module, G['__import_main'].model.layers[0].mlp are all "layers.0.mlp".
    """
    path = re.sub(r"^G\[['\"]__import_[^'\"]*['\"]\]\.\w+", "", source)
    path = re.sub(r"^[LG]\[['\"][^'\"]*['\"]\]", "", path)
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents|\.__self__|\.__dict__|\._orig_mod\b", "", path)
    path = re.sub(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.replace("._modules", "").strip(".")
