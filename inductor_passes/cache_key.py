"""The key that keeps compiled code from outliving the sources it was made from.

Inductor's own keys know neither an operator's gradient, nor its fake, nor a kernel or graph rewrite made after
tracing. So every source of `moe_ops` (operators, gradients, fakes, kernels) and of this package is hashed into the
`uuid` of our pass, with the source and state of every pass that a user gives. `import moe_ops` adds its own part to
`torch.compiler.config.cache_key_tag`, which protects a plain `torch.compile` that runs no pass of ours.
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import moe_ops
from inductor_passes.fingerprint import NoFingerprint, fingerprint


@lru_cache(maxsize=1)
def source_hash() -> str:
    """sha256 over every source file of `moe_ops` and `inductor_passes`, names included."""
    digest = hashlib.sha256(moe_ops.source_hash().encode())
    root = Path(__file__).parent
    for path in sorted(path for kind in ("*.py", "*.json") for path in root.rglob(kind)):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


source_hash()  # now: the files may be edited while this process runs what they hold today


def pass_key(graph_pass: object) -> Any:
    """Key of a pass among ours: its own `uuid()` where it has one, else its fingerprint. Raises NoFingerprint."""
    return own_key(graph_pass) if hasattr(graph_pass, "uuid") else fingerprint(graph_pass)


def own_key(graph_pass: object) -> Any:
    """What a pass says of itself by `uuid()`, as Inductor asks of every pass in its slots.

    Raises:
        NoFingerprint: it has no `uuid`, or one that says nothing.
    """
    key = graph_pass.uuid() if hasattr(graph_pass, "uuid") else None  # type: ignore[attr-defined]
    if not key:
        raise NoFingerprint(f"the pass {graph_pass!r} has no uuid")
    return (type(graph_pass).__module__, type(graph_pass).__qualname__, key)
