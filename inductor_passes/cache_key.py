"""The key that keeps compiled code from outliving the sources it was made from.

Inductor's own keys know neither an operator's gradient, nor its fake, nor a kernel or graph rewrite made after
tracing. So every source of `moe_ops` (operators, gradients, fakes, kernels) and of this package is hashed into the
`uuid` of our pass. `import moe_ops` adds its own part to `torch.compiler.config.cache_key_tag`, which protects a plain
`torch.compile` that runs no pass of ours.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import moe_ops


@lru_cache(maxsize=1)
def source_hash() -> str:
    """sha256 over every source file of `moe_ops` and `inductor_passes`, names included."""
    digest = hashlib.sha256(moe_ops.source_hash().encode())
    root = Path(__file__).parent
    for path in sorted(path for kind in ("*.py", "*.json") for path in root.rglob(kind)):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
