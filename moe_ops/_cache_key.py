"""Keeps compiled code from going stale.

Inductor's caches know a custom operator by name only: neither its gradient formula, nor its fake, nor its kernels
enter the key (reproduced on torch 2.11 and 2.13). So the hash of our sources does.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch


def hash_sources(roots: Iterable[Path]) -> str:
    """sha256 over path and content of every file below `roots`, 16 hex digits."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix in {".py", ".json"}:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Hash of moe_ops: operators, gradients, fakes, kernels and tuning tables."""
    return hash_sources([Path(__file__).parent])


def tag_compile_caches() -> None:
    """Appends our hash to `torch.compiler.config.cache_key_tag`, keeping what the user has there."""
    tag = f"moe-{source_hash()}"
    present = torch.compiler.config.cache_key_tag
    if tag not in present:
        torch.compiler.config.cache_key_tag = f"{present}+{tag}" if present else tag
