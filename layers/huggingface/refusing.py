"""experts_implementation="moe_ops" on models that would accept it and do nothing, and saving what nothing can load.

transformers takes any name that is registered, also for models that run their experts outside its interface. Two of its
methods are followed by a look at the model: the one by which the implementation is set, and the last of a constructor.
One comes behind a look: it would save quantised experts as weights of 16 bits or more beside scales that nobody reads,
and of experts that ranks share it would write nothing or what no model loads, on one rank alone, and experts that have
moved under the numbers of others.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from layers.huggingface.experts import NAME, is_dispatched
from layers.huggingface.finding import undispatched_blocks


def refuse_where_ignored() -> None:
    """Makes transformers raise ValueError there, for every model of the process. Calling it again changes nothing."""
    followed = {
        "set_experts_implementation": _after_setting,
        "post_init": _after_init,
        "save_pretrained": _before_saving,
    }
    for name, follow in followed.items():
        own = getattr(PreTrainedModel, name)
        if not hasattr(own, "__wrapped__") or own.__module__ != __name__:
            setattr(PreTrainedModel, name, follow(own))


def _after_setting(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
        before = _implementations(self)
        own(self, experts_implementation)
        if experts_implementation == NAME and (ignored := _ignored(self)):
            for config, name in before:
                config._experts_implementation_internal = name
            raise _error(self, ignored)

    set_experts_implementation.__module__ = __name__
    return set_experts_implementation


def _after_init(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def post_init(self: Any) -> None:
        own(self)
        if self.config._experts_implementation == NAME and (ignored := _outside(self)):
            raise _error(self, ignored)

    post_init.__module__ = __name__
    return post_init


def _before_saving(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        given = signature(own).bind(self, *args, **options).arguments
        if given.get("state_dict") is None:
            _expect_savable(self)
        _expect_in_order(self)
        return own(self, *args, **options)

    save_pretrained.__module__ = __name__
    return save_pretrained


def _expect_savable(model: Any) -> None:
    """Raises ValueError for experts that were quantised, or that ranks share in a way that transformers knows not."""
    for name, module in model.named_modules():
        if hasattr(module, "moe_ops_format"):
            raise ValueError(
                f"{name} is quantised, of which a checkpoint says nothing: expected "
                "save_pretrained before that, or a state_dict"
            )
        if hasattr(module, "moe_ops_parallel") and not _is_gathered(model, module):
            raise ValueError(
                f"{name} is shared by ranks: expected a state_dict that all of them gathered, as docs/parallel.md says"
            )


def _expect_in_order(model: Any) -> None:
    """Raises ValueError where an expert has another's place: what was gathered has it under the number of the place."""
    for name, module in model.named_modules():
        balancing = getattr(module, "moe_ops_balancing", None)
        if balancing is not None and not balancing.is_initial():
            raise ValueError(
                f"{name} has experts that have moved: expected them in their order, by place('linear') of the "
                "ExpertRebalancer before a state_dict is gathered"
            )


def _is_gathered(model: Any, experts: nn.Module) -> bool:
    """Whether transformers, which loaded these by a plan, saves them as it found them: gate and up in one dimension."""
    return getattr(model, "tp_size", None) is not None and all(
        each.dim() < 4 for each in experts.parameters(recurse=False)
    )


def _implementations(model: nn.Module) -> list[tuple[Any, str | None]]:
    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
    return [(config, config._experts_implementation) for config in configs.values()]


def _ignored(model: nn.Module) -> list[str]:
    """Names of experts that do not run the implementation now."""
    experts = {name: module for name, module in model.named_modules() if is_dispatched(module)}
    return _outside(model) + [
        name for name, each in experts.items() if getattr(each.config, "_experts_implementation", "") != NAME
    ]


def _outside(model: nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    return list(
        undispatched_blocks(modules, {name: each for name, each in modules.items() if is_dispatched(each)})
    )


def _error(model: nn.Module, ignored: list[str]) -> ValueError:
    return ValueError(
        f"experts_implementation={NAME!r}: {type(model).__name__} runs {ignored[0]} outside transformers' experts "
        "interface, where it would do nothing: expected layers.huggingface.patch(model)"
    )
