"""The server, asked by OpenAI's client: answers are those of `generate`, and nothing that clients do makes it hang."""

import json
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoints import write_chat_checkpoint
from tests.serve.running import running

MOST = 3  # requests at once
ROOM = 16 * 32  # tokens in its cache
TEXTS = ("hello", "a longer question than the other one?", "word " * 12, "x")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_checkpoint(tmp_path_factory.mktemp("model") / "chat")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    options = ("--greedy", "--max-requests", str(MOST), "--max-batch-tokens", "64", "--num-blocks", "32")
    with running(model, *options, "--page-size", "16", folder=tmp_path_factory.mktemp("server")) as each:
        yield each


@pytest.fixture(scope="module")
def stock(model):
    return AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)


@pytest.fixture
def client(server):
    return server.client()


def generated(stock, prompt, tokens):
    model, tokenizer = stock
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def replied(stock, text, tokens):
    """In a chat. Of special tokens the server's parser takes the last one away."""
    prompt = stock[1].apply_chat_template(user(text), add_generation_prompt=True, tokenize=False)
    return generated(stock, prompt, tokens).removesuffix("<|im_end|>")


def user(text):
    return [{"role": "user", "content": text}]


def answer(client, server, text, tokens, stream):
    given = {"model": server.model, "messages": user(text), "max_tokens": tokens}
    if not stream:
        return client.chat.completions.create(**given).choices[0].message.content
    chunks = client.chat.completions.create(**given, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=30) as reply:
        return json.load(reply)


def test_layers_are_patched_before_the_first_request(server):
    assert "moe_ops: 2 experts and 2 routers patched" in server.printed


def test_health_and_models(server, client):
    assert get(server, "/health") == {"status": "ok"}
    assert [each.id for each in client.models.list().data] == [server.model]


def test_answers_at_once_are_those_of_generate(server, client, stock):
    expected = [replied(stock, text, 9) for text in TEXTS]
    assert len(set(expected)) == len(TEXTS) and all(expected)
    with ThreadPoolExecutor(MOST) as threads:
        for stream in (False, True):
            answers = [threads.submit(answer, client, server, text, 9, stream) for text in TEXTS]
            assert [each.result() for each in answers] == expected


def test_a_prompt_without_a_template(server, client, stock):
    done = client.completions.create(model=server.model, prompt="once upon", max_tokens=7)
    assert done.choices[0].text == generated(stock, "once upon", 7)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (9, 7)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"messages": []}, "messages=[]: expected a list of at least one message"),
        ({"messages": user(5)}, "messages[0].content=5: expected text"),
        ({"max_tokens": 0}, "max_tokens=0: expected an integer of at least 1"),
        ({"n": 3}, "n=3: this server cannot do that"),
        ({"temperature": 0.7}, "temperature=0.7: requests of one batch are sampled alike"),
        ({"messages": user("x" * ROOM)}, f"expected fewer than {ROOM}"),
        ({"model": "another"}, "requested 'another'"),
    ],
    ids=["none", "number", "length", "several", "sampling", "room", "model"],
)
def test_bad_requests_are_told_why(server, client, given, told):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": server.model, "messages": user("x"), **given})
    assert told in error.value.body["detail"]


@pytest.mark.parametrize("body", [b"{", b"[1]", b"", b"\xff"])
def test_what_is_no_object_of_json_is_refused(server, body):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert 400 <= error.value.code < 500


def test_routes_that_would_change_models_are_not_there(server):
    for path in ("/reset", "/load_model", "/v1/responses"):
        request = urllib.request.Request(server.url + path, b"{}", {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert error.value.code == 404


def test_too_many_at_once_are_refused_and_those_who_leave_make_room(server, client, stock):
    def begin():
        given = {"model": server.model, "messages": user("hello"), "max_tokens": ROOM - 100}
        stream = client.chat.completions.create(**given, stream=True)
        next(iter(stream))
        return stream

    streams = [begin() for _ in range(MOST)]
    with pytest.raises(openai.RateLimitError, match="takes no more at once"):
        answer(client, server, "x", 4, False)
    assert get(server, "/health") == {"status": "ok"}
    for each in streams:
        each.close()  # in the middle of its answer
    deadline = time.monotonic() + 60
    while True:
        try:
            assert answer(client, server, "x", 4, False) == replied(stock, "x", 4)
            return
        except openai.RateLimitError:
            assert time.monotonic() < deadline, server.printed
            time.sleep(0.2)


def test_told_to_end_it_ends(server, client):
    """The last test of this file: also while an answer is on its way."""
    given = {"model": server.model, "messages": user("hello"), "max_tokens": ROOM - 100}
    stream = client.chat.completions.create(**given, stream=True)
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0, server.printed
