"""What a checkpoint in 4 bits has, by the headers of its files: what is missing or unknown is refused by its name."""

from layers.huggingface.published_formats import Published
from layers.huggingface.quantised_loading import MISSING
from layers.weights.safetensors_file import StoredTensor
from moe_ops._checks import FLOATING_DTYPES
from moe_ops.errors import value_error

Stored = dict[str, StoredTensor]
"""By name."""

BIAS = "bias"
"""Of a module, beside its matrix; experts have one of zeros at most."""
_WEIGHT = "weight"
_CACHES = ("k_scale", "v_scale")  # of 8 bits, which are left out


def quantised_matrices(stored: Stored, format_: Published) -> set[str]:
    """Names of matrices in 4 bits, without the parts."""
    matrices = set()
    for name, each in stored.items():
        matrix, _, part = name.rpartition(".")
        if part == format_.numbers and each.dtype == format_.stored:
            matrices.add(matrix)
    return matrices


def expect_complete(stored: Stored, format_: Published) -> None:
    """Raises ValueError for matrices of which a part is missing, and for tensors that stand for something else."""
    matrices = quantised_matrices(stored, format_)
    known = (*format_.parts, *format_.beside, BIAS, *_CACHES)
    for name, each in stored.items():
        matrix, _, part = name.rpartition(".")
        if matrix in matrices:
            if part not in known:
                value_error("{} in the checkpoint: expected one of {} of {}", name, list(known), matrix)
        elif part == format_.numbers != _WEIGHT or (part == _WEIGHT and each.dtype not in FLOATING_DTYPES):
            wanted = f"expected weights of 16 bits or more, or {format_.numbers} in {format_.stored}"
            value_error("{} in the checkpoint has dtype {}: " + wanted, name, each.dtype)
    for matrix in sorted(matrices):
        for part in format_.parts:
            _expect_stored(stored, f"{matrix}.{part}")


def expect_experts(
    stored: Stored, names: list[str], count: int, leaves: list[str], format_: Published
) -> None:
    """Raises ValueError unless each of `count` experts has all parts of `leaves`, such as "gate_proj" and "up_proj".

    names: of tensors that become one parameter, all of which begin alike.
    """
    prefix, *_ = names[0].rsplit(".", 3)
    ends = {name.rpartition(".")[2] for name in names}
    beside = sorted(ends.intersection((*format_.beside, BIAS)))
    for expert in range(count):
        for leaf in leaves:
            for part in (*format_.parts, *beside):
                _expect_stored(stored, f"{prefix}.{expert}.{leaf}.{part}")


def _expect_stored(stored: Stored, name: str) -> None:
    if name not in stored:
        value_error(MISSING, *name.rsplit(".", 1))
