"""`load_state_dict` of patched models whose experts have another format than the state dict's: an error."""

import copy
import io

import pytest
import torch

from layers import WeightScale, huggingface
from tests.huggingface.families import tiny_model, tokens

PLAIN, FLOAT8, INT8, PAIRS, INTEGERS, FROM_ZEROS = formats = (
    None, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.uint4, "zeros",
)  # fmt: skip
NAME = r"model\.layers\.\d\.mlp\.experts\.(gate_up|down)_proj"


def model_in(form):
    torch.manual_seed(0)
    model = tiny_model("qwen3_moe")
    huggingface.patch(model)
    if form is not None:
        zeros = form == FROM_ZEROS
        dtype = torch.uint4 if zeros else form
        kind = WeightScale.GROUP if form in (PAIRS, INTEGERS, FROM_ZEROS) else WeightScale.CHANNEL
        huggingface.quantise_experts(model, kind, (1, 32), dtype=dtype, zero_points=zeros)
    return model


def refused(ours, state, message):
    with pytest.raises(RuntimeError, match=message):
        ours.load_state_dict(state, strict=False)


@pytest.mark.parametrize("ours", [PLAIN, FLOAT8, INT8])
@pytest.mark.parametrize("theirs", [PLAIN, FLOAT8, INT8])
def test_numbers_of_another_dtype(ours, theirs):
    state = model_in(theirs).state_dict()
    if ours != theirs:
        refused(model_in(ours), state, f"{NAME} has dtype {theirs or torch.float32}: expected")
    else:
        assert str(model_in(ours).load_state_dict(state, strict=False)) == "<All keys matched successfully>"


def test_scales_of_another_dtype():
    refused(
        model_in(INTEGERS), model_in(PAIRS).state_dict(), f"{NAME}_scale_inv has dtype torch.uint8: expected"
    )
    refused(model_in(PAIRS), model_in(INTEGERS).state_dict(), f"{NAME}_scale_inv has dtype torch.float32")


def test_what_the_module_would_pass_over():
    told = "is of weights that are stored otherwise: expected none"
    refused(model_in(INTEGERS), model_in(FROM_ZEROS).state_dict(), f"{NAME}_zero_point {told}")
    scales = {
        name: each for name, each in model_in(FLOAT8).state_dict().items() if name.endswith("_scale_inv")
    }
    refused(model_in(PLAIN), scales, f"{NAME}_scale_inv {told}")


def test_assigned_numbers_bring_their_dtype():
    ours, theirs = model_in(INT8), model_in(FLOAT8)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    ids = tokens(2, 5)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_other_casts_stay():
    ours, state = model_in(PLAIN), model_in(PLAIN).bfloat16().state_dict()
    ours.load_state_dict(state)
    assert torch.equal(
        ours.state_dict()["model.layers.0.mlp.experts.down_proj"].bfloat16(),
        state["model.layers.0.mlp.experts.down_proj"],
    )


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copies_look_too(copied):
    original = model_in(FLOAT8)
    ours = copied(original)
    refused(ours, model_in(PLAIN).state_dict(), f"{NAME} has dtype")
    again = copied(model_in(PLAIN))
    huggingface.unpatch(again)
    again.load_state_dict(model_in(FLOAT8).state_dict(), strict=False)  # as stock does
    refused(original, model_in(PLAIN).state_dict(), f"{NAME} has dtype")


def test_patched_again_it_is_told_once():
    ours = model_in(PLAIN)
    huggingface.patch(ours)
    with pytest.raises(RuntimeError) as raised:
        ours.load_state_dict(model_in(INT8).state_dict(), strict=False)
    assert str(raised.value).count("layers.0.mlp.experts.down_proj has dtype") == 1
