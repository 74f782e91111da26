"""What passes of ours in a slot of Inductor's config have in common: the user's of that slot run behind them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from inductor_passes import _compat, compile_log
from inductor_passes.cache_key import own_key, source_hash
from inductor_passes.fingerprint import NoFingerprint
from inductor_passes.pipeline import passes_in

UserPass = Callable[..., Any]


@dataclass(frozen=True)
class InSlot:
    """A pass of ours, then the user's of the slot."""

    slot: ClassVar[str]

    chained: tuple[UserPass, ...] | None = None
    """The user's passes; None for those that this one covers in the slot when a graph is compiled."""

    def __post_init__(self) -> None:
        _compat.watch_slots()

    @classmethod
    def around(cls, slot: Any) -> Self:
        """What to put in the slot so that what is in it now runs too."""
        given = passes_in(slot)
        is_open = bool(given) and all(isinstance(each, cls) and each.chained is None for each in given)
        return cls(None if is_open else cls._users_among(given))

    def uuid(self) -> Any | None:
        """A key over our sources and the user's passes; None (no caching) without one."""
        try:
            return (type(self).__qualname__, source_hash(), *map(own_key, self.users()))
        except NoFingerprint as reason:
            compile_log.key_asked(str(reason))
            return None

    def users(self) -> tuple[UserPass, ...]:
        """The user's passes, as things are now."""
        if self.chained is not None:
            return self.chained
        here, *covered = map(passes_in, _compat.slot_and_covered(self.slot))
        if len(here) > 1:
            return ()  # of a sequence Inductor runs the others itself
        return next((found for found in map(self._users_among, (here, *covered)) if found), ())

    @classmethod
    def _users_among(cls, given: Iterable[Any]) -> tuple[UserPass, ...]:
        chained = ((each.chained or ()) if isinstance(each, cls) else (each,) for each in given)
        return tuple(user_pass for some in chained for user_pass in some)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a value; torch copies options
