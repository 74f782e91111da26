"""The safetensors files of a checkpoint: one file, or a folder with one file or an index of shards."""

import json
import os
from pathlib import Path

from layers.weights.safetensors_file import StoredTensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint at `path`, by name; headers are read, tensors are not.

    Args:
        path: a folder as `save_pretrained` writes and the Hub's cache holds it, a safetensors file, or an index.

    Raises:
        ValueError: there is no such checkpoint, a file of it is no safetensors, corrupt or truncated, lies outside the
            folder, or does not hold what the index says.
    """
    given = Path(path)
    if not given.exists():
        raise ValueError(f"path={str(path)!r}: expected a folder or a safetensors file, there is none")
    if given.is_dir():
        return _open_folder(given)
    if given.name.endswith(".index.json"):
        return _open_index(given)
    return read_header(inside(given.parent, given.name))


def _open_folder(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE).is_file():
        return read_header(inside(folder, SINGLE))
    if (folder / INDEX).is_file():
        return _open_index(folder / INDEX)
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    remark = f" and only pickles ({', '.join(pickles)}), which are not read" if pickles else ""
    raise ValueError(f"path={str(folder)!r}: expected {SINGLE} or {INDEX} in it, there is neither{remark}")


def _open_index(path: Path) -> dict[str, StoredTensor]:
    text = inside(path.parent, path.name).read_bytes()
    try:
        weight_map = json.loads(text)["weight_map"]
        assigned = {(str(name), str(shard)) for name, shard in weight_map.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON with a weight_map: {error!r}") from error
    shards = {
        shard: read_header(inside(path.parent, shard)) for shard in sorted({each for _, each in assigned})
    }
    held = {(name, shard) for shard, tensors in shards.items() for name in tensors}
    if lost := sorted(assigned - held):
        listed = ", ".join(f"{name!r} in {shard}" for name, shard in lost[:20])
        raise ValueError(f"{path}: {len(lost)} tensors are not where the index says: {listed}")
    if len(names := {name for name, _ in held}) < len(held):
        raise ValueError(f"{path}: {len(held) - len(names)} tensors are in more than one shard")
    return {name: stored for tensors in shards.values() for name, stored in tensors.items()}


def inside(folder: Path, name: str) -> Path:
    """The file `name` of the folder. Raises ValueError when there is none, or when it leads out of the folder."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, there is none")
    root, target = folder.resolve(), path.resolve()
    # In the Hub's cache the files of snapshots/<revision> link to blobs/, beside snapshots/.
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise ValueError(f"{path}: leads to {target}, out of the checkpoint's folder; it is not read")
    return path
