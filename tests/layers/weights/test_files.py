"""Files that are corrupt, truncated, foreign or elsewhere. The safetensors package is the judge of headers."""

import json
import os
import pickle
import random

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from layers import MoEBlock, MoEConfig, checkpoint_state_dict, load_checkpoint
from layers.weights import safetensors_file
from layers.weights.files import open_checkpoint
from layers.weights.safetensors_file import read_header, read_into

CONFIG = MoEConfig(4, 2, 8, 6)
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


class _Qwen3Moe:
    model_type = "qwen3_moe"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in two shards, with an index."""
    torch.manual_seed(0)
    state = checkpoint_state_dict(MoEBlock(CONFIG), _Qwen3Moe, prefix="layers.0")
    names = sorted(state)
    shard_of = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    path = tmp_path / "checkpoint"
    path.mkdir()
    for shard in sorted(set(shard_of.values())):
        save_file({name: state[name] for name in names if shard_of[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return path


def _refused(path, message):
    block = MoEBlock(CONFIG)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_checkpoint(block, path, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


def test_shards_load_through_their_index(folder):
    torch.manual_seed(0)
    expected, block = MoEBlock(CONFIG), MoEBlock(CONFIG)
    for path in (folder, folder / "model.safetensors.index.json"):
        load_checkpoint(block, path, progress=False)
        assert all(
            torch.equal(a, b) for a, b in zip(block.state_dict().values(), expected.state_dict().values())
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_every_kind_of_view_is_read(dtype, tmp_path):
    whole = (100 * torch.randn(5, 6, 7)).to(dtype)
    tensors = {"pad": torch.ones(3, dtype=torch.uint8), "whole": whole, "scalar": whole[0, 0, 0].clone(),
               "empty": whole[:0].clone()}  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    stored = read_header(tmp_path / "a.safetensors")
    assert {name: each.shape for name, each in stored.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    views = {
        "whole": [lambda t: t, lambda t: t[2], lambda t: t[:, 1:3], lambda t: t.mT, lambda t: t[1, :, ::2],
                  lambda t: t[4].T[2:]],
        "scalar": [lambda t: t],
        "empty": [lambda t: t],
    }  # fmt: skip
    file = os.open(tmp_path / "a.safetensors", os.O_RDONLY)
    for name, selections in views.items():
        for select in selections:
            expected = select(tensors[name])
            shape = expected.shape
            transposed = (
                [torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT] if len(shape) > 1 else []
            )
            for target in (torch.empty(shape, dtype=dtype), *transposed):
                read_into(file, stored[name], select, target)
                assert torch.equal(target, expected)
    os.close(file)


@pytest.mark.parametrize(
    "select",
    [lambda t: t.mT, lambda t: t[:, :, 1::2], lambda t: t.permute(2, 0, 1), lambda t: t.permute(2, 1, 0)],
)
def test_a_view_is_read_in_stretches_of_the_file_however_it_lies(select, tmp_path, monkeypatch):
    """A transposed matrix that is larger than what is staged must not be read number by number."""
    whole = torch.randn(3, 40, 50)
    save_file({"a": whole}, tmp_path / "a.safetensors")
    read, counts = safetensors_file._read_bytes, []
    monkeypatch.setattr(safetensors_file, "_STAGING_BYTES", 1000)  # five rows of 50 numbers
    monkeypatch.setattr(safetensors_file, "_read_bytes", lambda *to: (counts.append(to[3]), read(*to)))
    expected = select(whole)
    target = torch.empty(expected.shape)
    with (tmp_path / "a.safetensors").open("rb") as file:
        read_into(file.fileno(), read_header(tmp_path / "a.safetensors")["a"], select, target)
    assert torch.equal(target, expected)
    assert len(counts) == 3 * 40 / 5
    assert max(counts) <= 1000


def test_a_read_that_stops_early_goes_on(folder, monkeypatch):
    """As reads of more than 2 GiB do, and of files on a network."""
    expected, block, preadv = MoEBlock(CONFIG), MoEBlock(CONFIG), os.preadv
    load_checkpoint(expected, folder, progress=False)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
    load_checkpoint(block, folder, progress=False)
    assert all(map(torch.equal, block.state_dict().values(), expected.state_dict().values()))


def test_a_file_that_shrinks_while_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: 0)
    with pytest.raises(OSError, match=r"the file ended .* bytes early: it changed while it was read"):
        load_checkpoint(MoEBlock(CONFIG), folder, progress=False)


def test_truncated_files(folder):
    shard = folder / "model-1.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    _refused(folder, r"model-1\.safetensors: truncated: it has \d+ bytes, its header says")
    for size in (100, 5, 0):
        shard.write_bytes(whole[:size])
        _refused(folder, r"model-1\.safetensors: not a safetensors file, or a truncated one")
    shard.write_bytes(whole + b"\0")
    _refused(folder, "corrupt: it has")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "'a' has 4 bytes: expected 8"),
        ({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, "'a' has unknown dtype 'F33'"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "of 'a' are not sizes"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "of 'a' are not sizes"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "'a' has no dtype, shape and data_offsets"),
        ({"a": 3}, "'a' has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "'a' does not begin where"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, r"'a' has unknown dtype \['F32'\]"),
        ({"a": {"dtype": "F32", "shape": [1 << 64, 0], "data_offsets": [0, 0]}}, "of 'a' are not sizes"),
        ({"a": {**ENTRY, "more": float("nan")}}, "corrupt header: .*NaN"),
        ({"a": ENTRY, "__metadata__": {"format": 3}}, "expected strings by name in __metadata__"),
        ({"a": ENTRY, "__metadata__": []}, "expected strings by name in __metadata__"),
        ([], "expected a JSON object"),
    ],
)
def test_headers_that_lie(change, message, tmp_path):
    header = json.dumps(change).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
    _refused(path, message)
    _refused(tmp_path, message)


def test_a_name_twice(tmp_path):
    entry = '"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    header = f"{{{entry}, {entry}}}".encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    _refused(path, "a name occurs twice")


def test_whatever_the_package_refuses_is_refused(tmp_path):
    """Bytes of the header changed at random."""
    generator = random.Random(0)
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.int8)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for trial in range(400):
        changed = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            changed[generator.randrange(end)] = generator.randrange(256)
        path = tmp_path / f"{trial}.safetensors"
        path.write_bytes(changed)
        try:
            with safe_open(path, "pt") as file:
                stock = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            stock = None
        try:
            ours = {name: each.shape for name, each in read_header(path).items()}
        except ValueError:
            ours = None
        assert ours == stock or ours is None, (bytes(changed[:end]), ours, stock)
        refused += stock is None
    assert 100 < refused < 400


def test_pickles_are_not_read(folder, tmp_path):
    weights = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, weights)
    _refused(weights, r"pytorch_model\.bin: not a safetensors file.*a pickle; only safetensors is read")
    _refused(tmp_path, r"and only pickles \(pytorch_model\.bin\), which are not read")

    class Trap:
        def __reduce__(self):
            return os.abort, ()

    for protocol in (2, 4):
        (folder / "model-0.safetensors").write_bytes(pickle.dumps(Trap(), protocol))
        _refused(folder, "not a safetensors file")


def test_links_out_of_the_folder_are_not_followed(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (folder / "model-0.safetensors").rename(outside)
    (folder / "model-0.safetensors").symlink_to(outside)
    _refused(folder, r"model-0\.safetensors: leads to .*outside\.safetensors, out of the checkpoint's folder")
    _refused(folder / "model-0.safetensors", "out of the checkpoint's folder")
    (folder / "model-0.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-0.safetensors", "../outside.safetensors"))
    _refused(folder, "out of the checkpoint's folder")


def test_links_inside_the_folder_and_of_the_hubs_cache_are(folder, tmp_path):
    (folder / "model-0.safetensors").rename(folder / "data")
    (folder / "model-0.safetensors").symlink_to("data")
    assert len(open_checkpoint(folder)) == 13
    cache = tmp_path / "models--someone--model"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    folder.rename(cache / "snapshots" / "0123abc")
    snapshot = cache / "snapshots" / "0123abc"
    (snapshot / "model-1.safetensors").rename(cache / "blobs" / "ffff")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/ffff")
    assert len(open_checkpoint(snapshot)) == 13
    (snapshot / "model-1.safetensors").unlink()
    (cache / "blobs" / "ffff").rename(cache / "secret")
    (snapshot / "model-1.safetensors").symlink_to("../../secret")
    _refused(snapshot, "out of the checkpoint's folder")


def test_a_tensor_in_two_shards(folder):
    held = load_file(folder / "model-0.safetensors")
    other = load_file(folder / "model-1.safetensors")
    save_file({**other, **dict([held.popitem()])}, folder / "model-1.safetensors")
    _refused(folder, "1 tensors are in more than one shard")


def test_an_index_that_lies(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    moved = {
        **content["weight_map"],
        "layers.0.mlp.gate.weight": "model-0.safetensors",
        "b": "model-1.safetensors",
    }
    held = content["weight_map"]["layers.0.mlp.gate.weight"]
    moved["layers.0.mlp.gate.weight"] = (
        "model-0.safetensors" if held.endswith("1.safetensors") else "model-1.safetensors"
    )
    index.write_text(json.dumps({"weight_map": moved}))
    _refused(
        folder, r"2 tensors are not where the index says: 'b' in model-1\.safetensors, 'layers\.0\.mlp\.gate"
    )
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "c": "model-7.safetensors"}}))
    _refused(folder, r"model-7\.safetensors: expected a file, there is none")
    for shard in (3, [], "."):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        _refused(folder, "expected a file, there is none")
    for broken in ("{", "[]", '{"weight_map": 3}', '{"weights": {}}', "[" * 100_000):
        index.write_text(broken)
        _refused(folder, r"index\.json: expected JSON with a weight_map")
    index.unlink()
    _refused(
        folder, r"expected model\.safetensors or model\.safetensors\.index\.json in it, there is neither"
    )
    _refused(folder / "nowhere", "expected a folder or a safetensors file, there is none")
