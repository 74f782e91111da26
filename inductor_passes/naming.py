"""Which layer a node belongs to, and what it is called: every stage of one layer reads one dispatch plan."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from inductor_passes.base import LAYER_KEY
from inductor_passes.graph_tools import arguments, find, getitem_source, is_moe_op, is_op, outputs
from inductor_passes.raising.as_written import as_written
from inductor_passes.raising.experts import layers_of_all, product_layers

WHOLE_LAYERS = (
    "fused_experts",
    "fused_experts_formula",
    "fused_moe",
    "fused_moe_formula",
    "batch_invariant_experts",
    "scaled_fused_experts",
    "fused_experts_with_shared",
)
_DISPATCHES = ("build_dispatch", "routing_dispatch")
_LAST_STAGES = ("combine", "gemm_combine", "act_gemm_combine", *WHOLE_LAYERS)


@dataclass
class LayerNames:
    """Names the layers of one or several graphs, each name once."""

    taken: Counter[str] = field(default_factory=Counter)

    def write(self, graph: Graph, where: str = "") -> None:
        """Writes `node.meta[LAYER_KEY]` on every MoE operator and on the products of stock layers; names already there
        stay. `where` names a subgraph.
        """
        groups = [_stages_of(dispatch) for dispatch in find(graph, *_DISPATCHES)]
        groups += [_with_router(node) for node in find(graph, *WHOLE_LAYERS)]
        with as_written(graph):
            groups += [[product.node for product in layer] for layer in product_layers(graph)]
            groups += [[*layer.nodes] for layer in layers_of_all(graph)]
        self.taken.update({node.meta[LAYER_KEY]: 1 for node in graph.nodes if LAYER_KEY in node.meta})
        for index, group in enumerate(groups):
            fresh = [node for node in group if LAYER_KEY not in node.meta]
            if not fresh:
                continue
            name = self._unique(self._path(group) or f"moe_{index}", where)
            for node in fresh:
                node.meta[LAYER_KEY] = name

    @staticmethod
    def _path(group: list[Node]) -> str:
        """The module of the last stage or, where the router sits beside that, the module around both."""
        paths = [path for node in group if (path := module_path(node))]
        last = module_path(_last_stage(group))
        around = last.rpartition(".")[0]
        if not is_moe_op(group[-1]) and last.endswith(".experts"):
            return around  # where the router is, too, which is not known as one yet
        if around and not all(is_within(path, last) for path in paths):
            return around if all(is_within(path, around) for path in paths) else last
        return last

    def _unique(self, name: str, where: str) -> str:
        name = f"{name} in {where}" if where else name
        self.taken[name] += 1
        return name if self.taken[name] == 1 else f"{name}#{self.taken[name]}"


def modules_around(node: Node) -> list[str]:
    """Ids of the modules a node was traced in, outermost first. Dynamo adds "@1" and so on at further calls."""
    return [str(key).partition("@")[0] for key in node.meta.get("nn_module_stack") or ()]


def module_path(node: Node) -> str:
    """Dotted path of the module a node was traced in, e.g. "model.layers.0.mlp"; empty when it was in none."""
    stack = node.meta.get("nn_module_stack")
    return _readable(next(reversed(stack.values()))[0]) if stack else ""


def write_names(graph: Graph, modules: Mapping[str, str], start: str | None = None) -> None:
    """Puts the names that modules have in their model, by `str(id(module))`, in the place of Dynamo's sources.

    A source starts where tracing did: behind a closure, or at a submodule after a graph break. Dynamo does not note the
    module `start`, in whose forward it began.
    """
    began = {} if start is None else {start: (modules[start], None)}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or began
        if stack and node.op in ("call_function", "call_method"):
            node.meta["nn_module_stack"] = {
                key: (modules.get(str(key).partition("@")[0], path), kind)
                for key, (path, kind) in stack.items()
            }


def write_sources(graph: Graph, names: Sequence[str]) -> None:
    """Gives the inputs of a post-grad graph the `names` of those of the graph that Dynamo traced.

    AOTAutograd renames and reorders inputs, and notes which one each was.
    """
    for node in graph.nodes:
        index = getattr(node.meta.get("desc"), "idx", None)
        if node.op == "placeholder" and isinstance(index, int) and index < len(names):
            node.meta[_SOURCE_KEY] = names[index]


_SOURCE_KEY = "moe_source"


def write_callables(graph: Graph) -> None:
    """Says of each node that an operator was called, not an overload of it.

    Under `descriptive_names="torch"` Inductor names kernels after the callable, and an overload's name has a dot in it.
    """
    for node in graph.nodes:
        for key in ("source_fn_stack", "fwd_source_fn_stack"):  # the second is a backward's
            if called := node.meta.get(key):
                node.meta[key] = [(name, getattr(each, "overloadpacket", each)) for name, each in called]


def input_name(placeholder: Node) -> str:
    """What an input of a post-grad graph is in the user's code, or its name there."""
    return placeholder.meta.get(_SOURCE_KEY) or placeholder.name


@dataclass(frozen=True, slots=True)
class TracedInputs:
    """What the inputs of a graph of Dynamo's are in the user's model."""

    names: tuple[str, ...]
    """A parameter's path, or the expression of something else: "args[0]", "hidden"."""
    start: str | None
    """The path of the module whose forward was traced, None where that is no module's or has no weights."""

    @classmethod
    def of(cls, graph: Graph, weights: Mapping[int, str]) -> "TracedInputs":
        """Reads a graph; `weights` are the paths of parameters and buffers by their `id`."""
        origins = [node.meta.get("grapharg") for node in graph.nodes if node.op == "placeholder"]
        sources = [getattr(getattr(origin, "source", None), "name", "") for origin in origins]
        paths = [weights.get(id(getattr(origin, "example", None)), "") for origin in origins]
        starts = (_start(*each) for each in zip(sources, paths, strict=True))
        names = (path or _expression(source) for source, path in zip(sources, paths, strict=True))
        return cls(tuple(names), next((start for start in starts if start is not None), None))


def _start(source: str, path: str) -> str | None:
    """The module called `self` in a forward that reads the weight `path` as `source`."""
    inside = _readable(source)
    is_own = source.startswith("L['self']") and inside and f".{path}".endswith(f".{inside}")
    return path.removesuffix(inside).rstrip(".") if is_own else None


def _expression(source: str) -> str:
    """How the user's code writes an input that is no weight of a module we know."""
    in_module = re.search(r"\._(?:parameters|buffers)\[", source)
    return _readable(source) if in_module else re.sub(r"^[LG]\[['\"]([^'\"]*)['\"]\]", r"\1", source)


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


def is_within(path: str, module: str) -> bool:
    """Whether `path` is a named module or inside it."""
    return bool(module) and (path == module or path.startswith(f"{module}."))


def path_of(layer: str) -> str:
    """The module of a layer: its name without the subgraph it is in and the number of its call."""
    return re.sub(r"#\d+$", "", layer.partition(" in ")[0])


def _readable(source: str) -> str:
    """A module's path out of the Python source Dynamo writes it as.

    L['self']._modules['layers'][0].mlp, L['run'].__closure__[1].cell_contents.layers[0].mlp and, for a global of
    another module, G['__import_main'].model.layers[0].mlp are all "layers.0.mlp".
    """
    path = re.sub(r"^G\[['\"]__import_[^'\"]*['\"]\]\.\w+", "", source)
    path = re.sub(r"^[LG]\[['\"][^'\"]*['\"]\]", "", path)
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents|\.__self__|\.__dict__|\._orig_mod\b", "", path)
    path = re.sub(r"(?:\._(?:modules|parameters|buffers))?\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return path.replace("._modules", "").strip(".")
