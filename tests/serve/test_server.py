"""The server, asked by OpenAI's client: answers are those of `generate`, and nothing that clients do makes it hang.

One test of several parts, so that one process compiles one server whoever runs the tests.
"""

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


@pytest.fixture
def model(tmp_path):
    return write_chat_checkpoint(tmp_path / "chat")


@pytest.fixture
def server(model, tmp_path):
    options = ("--greedy", "--max-requests", str(MOST), "--max-batch-tokens", "64", "--num-blocks", "32")
    with running(model, *options, "--page-size", "16", folder=tmp_path) as each:
        yield each


@pytest.fixture
def stock(model):
    return AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)


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


def answer(server, text, tokens, stream):
    given = {"model": server.model, "messages": user(text), "max_tokens": tokens}
    client = server.client()
    if not stream:
        return client.chat.completions.create(**given).choices[0].message.content
    chunks = client.chat.completions.create(**given, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def begin(server):
    """A stream of a long answer, of which the first piece is there."""
    given = {"model": server.model, "messages": user("hello"), "max_tokens": ROOM - 100}
    stream = server.client().chat.completions.create(**given, stream=True)
    next(iter(stream))
    return stream


def get(server, path):
    with urllib.request.urlopen(server.url + path, timeout=30) as reply:
        return json.load(reply)


def post(server, path, body, **headers):
    """The status and the body of the answer."""
    headers = {"content-type": "application/json", **headers}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, body, headers), timeout=30
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def layers_are_patched_before_the_first_request(server, stock):
    assert "moe_ops: 2 experts and 2 routers patched" in server.printed


def health_and_models(server, stock):
    assert get(server, "/health") == {"status": "ok"}
    assert [each.id for each in server.client().models.list().data] == [server.model]


def answers_at_once_are_those_of_generate(server, stock):
    expected = [replied(stock, text, 9) for text in TEXTS]
    assert len(set(expected)) == len(TEXTS) and all(expected)
    with ThreadPoolExecutor(MOST) as threads:
        for stream in (False, True):
            answers = [threads.submit(answer, server, text, 9, stream) for text in TEXTS]
            assert [each.result() for each in answers] == expected


def a_prompt_without_a_template(server, stock):
    done = server.client().completions.create(model=server.model, prompt="once upon", max_tokens=7)
    assert done.choices[0].text == generated(stock, "once upon", 7)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (9, 7)


BAD = (
    ({"messages": []}, "messages=[]: expected a list of at least one message"),
    ({"messages": user(5)}, "messages[0].content=5: expected text"),
    ({"max_tokens": 0}, "max_tokens=0: expected an integer of at least 1"),
    ({"n": 3}, "n=3: this server cannot do that"),
    ({"temperature": 0.7}, "temperature=0.7: requests of one batch are sampled alike"),
    ({"messages": user("x" * ROOM)}, f"expected fewer than {ROOM}"),
    ({"model": "another"}, "requested 'another'"),
    ({"extra_body": {"chat_template_kwargs": 5}}, "chat_template_kwargs=5: expected an object"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "KeyError: "),
)


def bad_requests_are_told_why(server, stock):
    for given, told in BAD:
        given = {"model": server.model, "messages": user("x"), **given}
        with pytest.raises(openai.BadRequestError) as error:
            server.client().chat.completions.create(**given)
        assert told in str(error.value) and error.value.type == "invalid_request_error"
    for body in (b"{", b"[1]", b"", b"\xff"):
        status, told = post(server, "/v1/chat/completions", body)
        assert 400 <= status < 500 and json.loads(told)["error"]["message"]


def streams_say_that_they_end(server, stock):
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": user("x")}),
    ):
        _, told = post(server, path, json.dumps({**asked, "max_tokens": 2, "stream": True}).encode())
        *_, last, end = filter(None, told.split("\n"))
        assert (
            json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] and end == "data: [DONE]"
        )


def routes_that_would_change_models_are_not_there(server, stock):
    for path in ("/reset", "/load_model", "/v1/responses"):
        assert post(server, path, b"{}")[0] == 404


def ids_of_requests_are_their_own(server, stock):
    body = json.dumps({"prompt": "once upon", "max_tokens": 300}).encode()
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(post, server, "/v1/completions", body, **{"x-request-id": "mine"})
            for _ in range(2)
        ]
        statuses = sorted(each.result()[0] for each in asked)
    assert statuses == [200, 409]
    short = json.dumps({"prompt": "once upon", "max_tokens": 2}).encode()
    assert post(server, "/v1/completions", short, **{"x-request-id": "mine"})[0] == 200


def begun(server):
    """The stream, or why there is none."""
    try:
        return begin(server)
    except openai.RateLimitError as error:
        return str(error)


def too_many_at_once_are_refused_and_those_who_leave_make_room(server, stock):
    with ThreadPoolExecutor(MOST + 3) as clients:  # in turns, the first would have ended before the last asks
        answers = list(clients.map(begun, [server] * (MOST + 3)))
    refused = [each for each in answers if isinstance(each, str)]
    streams = [each for each in answers if not isinstance(each, str)]
    assert refused and all("takes no more at once" in each for each in refused)
    assert len(streams) >= MOST
    assert get(server, "/health") == {"status": "ok"}
    for each in streams:
        each.close()  # in the middle of its answer
    deadline = time.monotonic() + 60
    while True:
        try:
            assert answer(server, "x", 4, False) == replied(stock, "x", 4)
            return
        except openai.RateLimitError:
            assert time.monotonic() < deadline, server.printed
            time.sleep(0.2)


def told_to_end_it_ends(server, stock):
    """Also while an answer is on its way."""
    stream = begin(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0, server.printed
    stream.close()


STORY = (
    layers_are_patched_before_the_first_request,
    health_and_models,
    answers_at_once_are_those_of_generate,
    a_prompt_without_a_template,
    bad_requests_are_told_why,
    streams_say_that_they_end,
    routes_that_would_change_models_are_not_there,
    ids_of_requests_are_their_own,
    too_many_at_once_are_refused_and_those_who_leave_make_room,
    told_to_end_it_ends,
)


def test_a_server(server, stock, subtests):
    for part in STORY:
        with subtests.test(part.__name__):
            part(server, stock)
