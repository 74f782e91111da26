"""The server on a GPU, its steps captured: answers are those of `generate`, and nothing is captured twice."""

import pytest

from benchmarks.checkpoints import write_chat_checkpoint
from tests.serve.running import running
from tests.serve.test_server import TEXTS, answer, replied

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["moe_inductor", "none"])
def test_answers_are_those_of_generate(backend, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_chat_checkpoint(tmp_path / "chat")
    stock = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    options = ("--greedy", "--cuda-graphs", "--max-batch-tokens", "256", "--num-blocks", "32")
    options = (*options, "--page-size", "16", "--backend", backend)
    with running(model, *options, device="cuda", folder=tmp_path) as server:
        assert [answer(server, text, 9, True) for text in TEXTS] == [
            replied(stock, text, 9) for text in TEXTS
        ]
        assert "Failed to warm up" not in server.printed
