"""`python -m benchmarks published`: what it writes, reads and compares before it times anything."""

import pytest
import torch

from benchmarks import published_bench


@pytest.fixture
def read(monkeypatch, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    monkeypatch.setattr(published_bench, "_SIZES", sizes | heads)
    published_bench.write(tmp_path, num_experts=4, num_layers=2)
    with torch.no_grad():
        yield [way(tmp_path, "cpu").eval() for way in published_bench.READ.values()]


def test_both_are_the_same_model(read, capsys):
    stock, ours = read
    assert stock.model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16
    assert ours.model.layers[1].mlp.experts.down_proj.dtype == torch.uint8
    published_bench.check(stock, ours)
    assert "weights are the same to the bit, logits differ by 0.0" in capsys.readouterr().out


def test_a_bit_of_a_weight(read):
    stock, ours = read
    ours.model.layers[1].mlp.experts.down_proj[3, 2, 1] ^= 1
    with pytest.raises(ValueError, match="down_proj is not what was published"):
        published_bench.check(stock, ours)


def test_logits(read):
    stock, ours = read
    ours.model.layers[0].mlp.experts.down_proj_bias += 0.004
    with pytest.raises(ValueError, match=r"logits differ by 0\.[01]"):
        published_bench.check(stock, ours)


def test_it_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert published_bench.main(None) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out
