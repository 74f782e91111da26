"""What a report says of exchanges: what runs during each, or why nothing does."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import inductor_passes
from layers import MoEBlock, MoEConfig, SharedExpertConfig
from layers.parallel import ExpertParallel
from tests.layers.parallel.test_overlap_code import ranks  # noqa: F401

T, H = 160, 16  # so many that products are calls
NEEDED = "every call behind it, up to the next exchange, needs what ranks have sent"


def report_of(style, tmp_path, **options):
    torch.manual_seed(0)
    block = MoEBlock(MoEConfig(8, 2, H, 24, **options))
    parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), {"experts": style})
    with torch.no_grad():
        report = inductor_passes.explain(block, torch.randn(T, H))
    page = report.to_html(tmp_path / "page.html").read_text()
    for line in str(report).partition("\nexchanges: ")[2].splitlines()[1:]:
        assert f"<li>{line.strip()}</li>" in page
    return report


@pytest.mark.usefixtures("ranks")
def test_shared_experts(tmp_path):
    style = ExpertParallel("allgather", max_tokens=T)
    report = report_of(style, tmp_path, shared_experts=SharedExpertConfig(intermediate_size=8))
    *there, back = report.exchanges
    assert [each.kind for each in there] == ["all_gather_into_tensor_coalesced"]
    assert not any(each.during for each in there) and {each.reason for each in there} == {NEEDED}
    assert back.during == ("mm of shared_experts.gate_up_proj", "mm of shared_experts.down_proj")
    assert str(report).endswith(
        "exchanges: 2\n"
        f"  all_gather_into_tensor_coalesced of experts: nothing meanwhile: {NEEDED}\n"
        "  reduce_scatter_tensor of experts: meanwhile mm of shared_experts.gate_up_proj, mm of "
        "shared_experts.down_proj"
    )


@pytest.mark.usefixtures("ranks")
def test_nothing_to_run(tmp_path):
    *there, back = report_of(ExpertParallel("allgather", max_tokens=T), tmp_path).exchanges
    assert not any(each.during for each in (*there, back))
    assert [each.reason for each in there] == [NEEDED]
    assert back.reason == "no call stands between it and the end"


@pytest.mark.usefixtures("ranks")
def test_two_batches(tmp_path):
    report = report_of(ExpertParallel("allgather", max_tokens=T, batches=2), tmp_path)
    during = [set(each.during) for each in report.exchanges]
    assert during == [set()] + [{"grouped_gemm of experts"}] * 2 + [set()]
    assert "all_gather_into_tensor_coalesced of experts: meanwhile grouped_gemm of experts (2 times)" in str(
        report
    )


def test_graphs_without_exchanges_say_nothing_of_them():
    with torch.no_grad():
        report = inductor_passes.explain(MoEBlock(MoEConfig(8, 2, H, 24)), torch.randn(8, H))
    assert report.exchanges == () and "exchanges" not in str(report)
