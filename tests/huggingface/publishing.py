"""Tiny checkpoints in 4 bits, as GPTQ, AWQ, compressed-tensors and ModelOpt publish them, and what they stand for.

Written from the formats' layouts with none of our code, up to `read`: a matrix is rounded, packed word by word, and the
numbers that come of it are kept in float64.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from layers import huggingface
from tests.huggingface.families import tiny_model

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
IN_ORDER, OF_AWQ = range(8), (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN = ("embed", "norm", "lm_head", ".gate.", "shared_expert_gate")


def words(codes, order=IN_ORDER):
    """[R, C] codes as [R, ceil(C / 8)] int32: bits 4p hold column order[p] of each eight."""
    rows, columns = codes.shape
    padded = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.int64)
    padded[:, :columns] = codes
    eights = padded.view(rows, -1, 8)
    packed = sum(eights[:, :, column] << (4 * place) for place, column in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def nibbles(codes):
    """[R, C] codes as [R, C / 2] bytes, the even column in the lower half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def integers(weight, columns, is_symmetric, dtype=torch.float16):
    """Codes [B, A], scales and zero points [B, G], and the numbers that they stand for."""
    groups = weight.double().unflatten(1, (-1, columns))
    if is_symmetric:
        scale = (groups.abs().amax(2) / 7.5).to(dtype)
        zero = torch.full(scale.shape, 8)
    else:
        least, largest = groups.amin(2).clamp(max=-1e-3), groups.amax(2).clamp(min=1e-3)
        scale = ((largest - least) / 15).to(dtype)
        zero = (-least / scale.double()).round().clamp(1, 15).long()
    steps = scale.double()[:, :, None]
    codes = ((groups / steps).round().long() + zero[:, :, None]).clamp(0, 15)
    return codes.flatten(1), scale, zero, ((codes - zero[:, :, None]) * steps).flatten(1)


def _gptq(weight, columns, settings):
    codes, scale, zero, numbers = integers(weight, columns, settings["sym"])
    stored = zero if settings["checkpoint_format"] == "gptq_v2" else zero - 1
    parts = {
        "qweight": words(codes).T.contiguous(),
        "qzeros": words(stored.T),
        "scales": scale.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // columns,
    }
    return parts, numbers


def _awq(weight, columns, settings):
    codes, scale, zero, numbers = integers(weight, columns, False)
    packed = {"qweight": words(codes.T, OF_AWQ), "qzeros": words(zero.T, OF_AWQ)}
    return packed | {"scales": scale.T.contiguous()}, numbers


def _packed(weight, columns, settings):
    is_symmetric = settings["config_groups"]["group_0"]["weights"]["symmetric"]
    codes, scale, zero, numbers = integers(weight, columns, is_symmetric, torch.bfloat16)
    parts = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    zeros = {} if is_symmetric else {"weight_zero_point": words(zero.T).T.contiguous()}
    return parts | zeros, numbers


def _nvfp4(weight, outer):
    """Codes, scales and numbers, of a matrix with a global scale."""
    groups = weight.double().unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / 6 / outer).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    steps = scale.double()[:, :, None] * outer
    codes = ((groups / steps)[..., None] - E2M1).abs().argmin(-1)
    return nibbles(codes.flatten(1)), scale, (E2M1[codes] * steps).flatten(1)


def _modelopt(weight, columns, settings):
    factor = (weight.abs().amax() / 6 / 448).float()
    stored, scale, numbers = _nvfp4(weight, factor.double())
    beside = {"weight_scale_2": factor, "input_scale": torch.tensor(0.01)}
    return {"weight": stored, "weight_scale": scale} | beside, numbers


def _nvfp4_packed(weight, columns, settings):
    divisor = (6 * 448 / weight.abs().amax()).float().view(1)
    stored, scale, numbers = _nvfp4(weight, 1 / divisor.double())
    beside = {"weight_global_scale": divisor, "input_global_scale": torch.tensor([100.0])}
    return {"weight_packed": stored, "weight_scale": scale} | beside, numbers


def _of_gptq(group_size=32, sym=False, checkpoint_format="gptq", desc_act=False):
    named = {"group_size": group_size, "sym": sym, "checkpoint_format": checkpoint_format}
    return {"quant_method": "gptq", "bits": 4, "desc_act": desc_act, "lm_head": False, **named}


def _of_awq(group_size=32):
    named = {
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["gate"],
    }
    return {"quant_method": "awq", "bits": 4, **named}


def _of_compressed_tensors(format_, **weights):
    tokens = {"num_bits": 4, "type": "float"} if format_.startswith("nvfp4") else None
    group = {"weights": {"num_bits": 4, **weights}, "input_activations": tokens, "targets": ["Linear"]}
    named = {"format": format_, "ignore": ["lm_head"], "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **named}


def _of_packed(is_symmetric, group_size=32):
    strategy = "group" if group_size else "channel"
    named = {"type": "int", "symmetric": is_symmetric, "strategy": strategy, "group_size": group_size}
    return _of_compressed_tensors("pack-quantized", **named)


KINDS = {
    "gptq": (_gptq, _of_gptq()),
    "gptq of whole rows": (_gptq, _of_gptq(-1)),
    "gptq, symmetric": (_gptq, _of_gptq(128, sym=True)),
    "gptq_v2": (_gptq, _of_gptq(64, checkpoint_format="gptq_v2", desc_act=True)),
    "awq": (_awq, _of_awq()),
    "awq of whole rows": (_awq, _of_awq(-1)),
    "pack-quantized": (_packed, _of_packed(True)),
    "pack-quantized, asymmetric": (_packed, _of_packed(False)),
    "pack-quantized by rows": (_packed, _of_packed(True, None)),
    "nvfp4-pack-quantized": (
        _nvfp4_packed,
        _of_compressed_tensors("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
    ),
    "modelopt": (_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
}


def columns_of(kind):
    """How many share a scale; 0 for all of a row."""
    settings = KINDS[kind][1]
    groups = settings.get("config_groups")
    size = groups["group_0"]["weights"]["group_size"] if groups else settings.get("group_size", 16)
    return 0 if size in (-1, None) else size


def publish(folder, family, kind, keep=(), dtype=torch.float16, shard="1MB", **overrides):
    """Writes a checkpoint of `kind` into a folder, and returns a stock model in float32 of what it stands for.

    keep: parts of names of matrices that stay in `dtype`. shard: the largest file.
    """
    stock = tiny_model(family, **overrides)
    stock.to(dtype).save_pretrained(folder, max_shard_size=shard)
    stock.float()
    pack, settings = KINDS[kind]
    stands_for = {}
    for path in folder.glob("*.safetensors"):
        state = {}
        for name, tensor in load_file(path).items():
            size = min(columns_of(kind) or tensor.shape[-1], tensor.shape[-1])
            is_plain = tensor.dim() != 2 or any(each in name for each in (*PLAIN, *keep))
            if is_plain or tensor.shape[1] % size:
                state[name], stands_for[name] = tensor, tensor.float()
                continue
            parts, numbers = pack(tensor, size, settings)
            stands_for[name] = numbers.float()
            state |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
        save_file(state, path, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        _write_index(index)
    change(folder, settings)
    return type(stock).from_pretrained(None, config=stock.config, state_dict=stands_for, dtype=torch.float32)


def _write_index(path):
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {name: file for file in files for name in load_file(path.parent / file)}
    path.write_text(json.dumps(index))


def change(folder, settings):
    """Writes another `quantization_config`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def read(folder, dtype=torch.float32, **named):
    """A model whose experts stay as they are published."""
    config = huggingface.as_published(AutoConfig.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **named)
