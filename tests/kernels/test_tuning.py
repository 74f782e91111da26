"""Tuning tables: what a file may say, which products a choice is for, and that nothing planned before outlives one."""

import json
from dataclasses import replace

import pytest
import torch

import moe_ops
from moe_ops import _library, records
from moe_ops.arguments import FusedExperts, GroupedGemm, PairedLinear, Permute
from moe_ops.kernels import gemm_config, gpu, plans, products
from moe_ops.kernels.gemm_tables import BY_TMA_IN_SHORT_STEPS, TMA_ALTERNATIVES, LaunchConfig, offered
from moe_ops.kernels.gpu import H200, gpu_of
from moe_ops.kernels.templates import Templates
from moe_ops.kernels.tuning import Choice, Product, Tuning, nearest_rows
from tests.kernels.any_count import LAYERS, arguments
from tests.kernels.catalogue import meta, product

EXPERTS = 8
NARROW, OTHER = TMA_ALTERNATIVES[3], BY_TMA_IN_SHORT_STEPS[32]
DOWN = Product(EXPERTS, 64, 128, "bfloat16", "rows", gated=False, gathered=False)


def table(*choices, name="NVIDIA H200"):
    return Tuning(name, choices or (Choice(DOWN, 16, NARROW),))


TUNED = replace(H200, tuning=table())


@pytest.fixture(autouse=True)
def _no_table():
    yield
    moe_ops.use_tuning(None)


def _down(rows, dtype=torch.bfloat16, gpu=TUNED):
    return product(meta(EXPERTS, 64, 128, dtype=dtype), rows, gpu=gpu)


def _is_tuned(gemm):
    return gemm_config.pick_config(gemm) == NARROW != gemm_config.config_by_rule(gemm)


def test_a_choice_is_for_three_quarters_to_three_halves_of_its_rows():
    tuned = [rows for rows in range(300) if _is_tuned(_down(rows))]
    assert tuned == list(range(12 * EXPERTS + 1, 24 * EXPERTS + 1))
    one = replace(H200, tuning=table(Choice(DOWN, 1, NARROW)))
    assert [rows for rows in range(30) if _is_tuned(_down(rows, gpu=one))] == list(range(13))
    many = _down(4 * 16 * EXPERTS)
    assert _is_tuned(replace(many, num_ids=4 * EXPERTS)) and not _is_tuned(many)
    for rows in (1, 2, 16, 512):  # of neighbours, each count of rows has one
        assert {nearest_rows(mean) for mean in (rows, 1.5 * rows)} == {rows}
        assert nearest_rows(1.5 * rows + 0.01) == 2 * rows


@pytest.mark.parametrize(
    "gemm",
    [
        replace(_down(128), rows_per_tile=64),
        replace(_down(128), max_tokens=16),
        replace(_down(128), top_k=2),
        _down(128, torch.float16),
        product(meta(EXPERTS, 64, 136), 128, gpu=TUNED),
        product(meta(EXPERTS, 64, 128).mT.contiguous().mT, 128, gpu=TUNED),
        product(meta(EXPERTS, 128, 128), 128, moe_ops.Activation(), TUNED),
    ],
    ids=["fixed rows", "batched", "gathered", "dtype", "depth", "layout", "gated"],
)
def test_other_products_follow_the_rule(gemm):
    assert gemm_config.pick_config(gemm) == gemm_config.config_by_rule(gemm)


def test_rows_and_weights_that_load_otherwise_follow_the_rule():
    gemm = _down(128)
    apart = gemm.x.meta._replace(strides=(129, 1))
    off = gemm.linear.weight.meta._replace(aligned=False)
    uneven = replace(gemm, x=replace(gemm.x, meta=apart))
    by_pointer = replace(gemm, linear=gemm.linear._replace(weight=replace(gemm.linear.weight, meta=off)))
    assert _is_tuned(gemm) and by_pointer.product == uneven.product == gemm.product
    assert not _is_tuned(uneven) and not _is_tuned(by_pointer)


def test_templates_know_where_a_choice_ends():
    """Experts have 16 rows in the mean at 256 tokens: the choices are for 193 to 384."""
    gemms = products.of(_experts(256), H200)
    choices = [Choice(gemm.product, 16, config) for gemm, config in zip(gemms, (NARROW, OTHER), strict=True)]
    tuned, widths = replace(H200, tuning=table(*choices)), {}
    make = plans._PLANS[FusedExperts].make.__wrapped__
    templates = Templates(make)
    for tokens in (256, 255, 192, 193, 384, 385, 400, 64, 300, 700):
        leaves = tuned, *records.flatten(_experts(tokens))
        filled, made = templates.plan(*leaves), make(*leaves).filled
        assert [step[1:7] for step in filled.steps] == [step[1:7] for step in made.steps]
        widths[tokens] = [each.block[-2] for step in made.steps for _, each in step.descriptors]
    assert [tokens for tokens, each in widths.items() if each == widths[256]] == [256, 255, 193, 384, 300]


def _experts(tokens):
    layer = LAYERS["Qwen3-30B-A3B"]
    return next(each for each in arguments(layer, tokens) if type(each) is FusedExperts)


def test_a_table_in_use_is_in_every_plan_made_from_then_on():
    args = GroupedGemm(
        meta(128, 128), PairedLinear(meta(EXPERTS, 64, 128)), meta(EXPERTS + 1, dtype=torch.int32)
    )
    before = plans.program(args)
    moe_ops.use_tuning(table())
    blocks = [launch.args["BLOCK_N"] for launch in plans.program(args).launches if "BLOCK_N" in launch.args]
    assert blocks == [NARROW.block_n] and blocks != [before.launches[-1].args["BLOCK_N"]]
    assert gpu_of(torch.device("meta")) == TUNED and moe_ops.tuning_key() == table().digest
    moe_ops.use_tuning(None)
    assert plans.program(args) is before and moe_ops.tuning_key() == ""


def test_what_was_launched_is_planned_again():
    _library._plans()
    known = plans._PLANS[Permute].known
    known["metadata"] = "launches"
    moe_ops.use_tuning(table())
    assert not known


def test_a_file_and_back(tmp_path):
    path = tmp_path / "table.json"
    wide = Choice(DOWN._replace(layout="transposed", gated=True), 64, LaunchConfig(64, 128, 64, 4, 4, 2))
    path.write_text(table(Choice(DOWN, 16, NARROW), wide).to_json())
    moe_ops.use_tuning(path)
    assert gpu.in_use() == table(Choice(DOWN, 16, NARROW), wide) != table()
    assert gpu.in_use().choices[1] == wide


def _edited(**changes):
    """The text of a table with one choice, of which some keys are others."""
    read = json.loads(table().to_json())
    choice = {**read["choices"][0], **changes.pop("choice", {})}
    choice["config"] = (
        {**choice["config"], **changes.pop("config", {})} if choice["config"] else choice["config"]
    )
    return json.dumps({**read, "choices": [choice], **changes})


def _without(key):
    read = json.loads(table().to_json())
    del read["choices"][0][key]
    return json.dumps(read)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "expected a JSON file by `python -m benchmarks tune`"),
        ("[]", r"t\.json has \[\]: expected the keys format, gpu, choices"),
        (_edited(format=2), r"t\.json: format=2: expected 1"),
        (_edited(gpu=7), r"t\.json: gpu=7: expected a GPU's name"),
        (_edited(choices={}), r"t\.json: choices=\{\}: expected a list"),
        (_edited(extra=1), r"t\.json has format, gpu, choices, extra: expected the keys format, gpu, choices"),
        (_without("rows"), r"t\.json: choices\[0\] has experts, .* expected the keys experts, .*, rows, config"),
        (_edited(choice={"experts": 0}), r"choices\[0\]\.experts=0: expected an integer of at least 1"),
        (_edited(choice={"depth": True}), r"choices\[0\]\.depth=True: expected an integer of at least 1"),
        (_edited(choice={"rows": 48}), r"choices\[0\]\.rows=48: expected a power of two"),
        (_edited(choice={"rows": 2**21}), r"choices\[0\]\.rows=2097152: expected a power of two up to 1048576"),
        (_edited(format=True), r"t\.json: format=True: expected 1"),
        ("\udcff", r"t\.json: .* expected a JSON file by `python -m benchmarks tune`"),
        (_edited(choice={"dtype": "int8"}), r"choices\[0\]\.dtype='int8': expected one of 'bfloat16', "),
        (_edited(choice={"layout": []}), r"choices\[0\]\.layout=\[\]: expected one of 'rows', 'transposed'"),
        (_edited(choice={"gated": 1}), r"choices\[0\]\.gated=1: expected true or false"),
        (_edited(choice={"config": None}), r"choices\[0\]\.config=None: expected an object"),
        (_edited(config={"block_m": "64"}), r"choices\[0\]\.config\.block_m='64': expected an integer"),
        (_edited(config={"block_n": 100}), r"choices\[0\]\.config=LaunchConfig\(.*100.*: expected one of the \d+ that"),
        (
            json.dumps({**(read := json.loads(table().to_json())), "choices": 2 * read["choices"]}),
            r"choices\[1\] is for the product and rows of choices\[0\]: expected one of each",
        ),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path, text, told):
    path = tmp_path / "t.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=told) as raised:
        moe_ops.use_tuning(path)
    assert str(path) in str(raised.value) and gpu.in_use() is None


def test_a_table_of_another_gpu_and_what_is_none(tmp_path):
    moe_ops.use_tuning(table())
    with pytest.raises(ValueError, match=r"its gpu is 'NVIDIA L40S': expected a table for 'NVIDIA H200'"):
        moe_ops.use_tuning(table(name="NVIDIA L40S"))
    with pytest.raises(TypeError, match=r"table=7: expected a Tuning, the path of a file, or None"):
        moe_ops.use_tuning(7)
    with pytest.raises(FileNotFoundError):
        moe_ops.use_tuning(tmp_path / "none.json")
    assert gpu.in_use() == table()


def test_a_table_is_for_gpus_of_its_name(monkeypatch):
    found = {0: "NVIDIA H200", 1: "NVIDIA L40S"}

    def properties(device):
        values = {"name": found[device.index], "major": 9, "minor": 0, "multi_processor_count": 132}
        values |= {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}  # of an H100
        return type("Properties", (), {**values, "shared_memory_per_block_optin": H200.shared_memory})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", found.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    moe_ops.use_tuning(table(name="NVIDIA L40S"))
    assert [gpu_of(torch.device("cuda", index)).tuning for index in found] == [
        None,
        table(name="NVIDIA L40S"),
    ]
    assert gpu_of(torch.device("cuda", 0)).memory_speed == pytest.approx(3.35e12, rel=1e-3)
    monkeypatch.undo()
    moe_ops.use_tuning(None)


def test_any_choice_offered_is_compiled_ahead_of_time():
    """A file may name what `candidates` lists of some product, and nothing else."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        listed = {
            config
            for one in (H200, replace(H200, capability=80), replace(H200, capability=120))
            for sizes in ((8, 64, 128), (8, 63, 127))
            for config in gemm_config.candidates(product(meta(*sizes, dtype=dtype), gpu=one))
        }
        assert listed == offered[dtype], dtype
