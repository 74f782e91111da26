"""What a request may ask for, before any model is asked."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import UNUSED_CHAT_COMPLETION_FIELDS
from transformers.cli.serving.completion import UNUSED_LEGACY_COMPLETION_FIELDS

from layers.serve.generation import Chat
from layers.serve.requests import problem

GREEDY = GenerationConfig(do_sample=False)
SAMPLED = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
ASKED = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 1, "stop": [], "logit_bias": {}, "response_format": {"type": "text"}, "presence_penalty": 0.0},
        {"max_tokens": 1, "max_completion_tokens": None},
        {"temperature": 0, "top_p": 1, "seed": 5},
        {"tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "reasoning_effort": None},
        {"store": False, "service_tier": "auto", "modalities": ["text"], "user": "x", "metadata": {"a": "b"}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": False}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        {"chat_template_kwargs": None},
        {"chat_template_kwargs": {"enable_thinking": False, "documents": [{"text": "x"}]}},
    ],
)
def test_taken(more):
    assert problem({**ASKED, **more}, GREEDY, "messages") is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"messages": None}, "messages=None: expected a list of at least one message"),
        ({"messages": ["x"]}, "messages[0]='x': expected an object with a role"),
        ({"messages": [{"content": "x"}]}, "messages[0]={'content': 'x'}: expected an object with a role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content=None: expected text"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "messages[0].content='\\ud800': expected text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "messages[0].content[0]={'type': 'text', 'text': '\\ud800'}: expected a part of type 'text'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": 3}]},
            "messages[0].tool_calls=3: expected a list of objects",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [5]}]},
            "messages[0].tool_calls=[5]: expected a list of objects",
        ),
        (
            {"messages": [{"role": "\ud800", "content": "x"}]},
            "messages[0]={'role': '\\ud800', 'content': 'x'}: expected an object with a role",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]={'type': 'image_url'}: expected a part of type 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]},
            "messages[0].content[0]={'type': 'image', 'text': 'x'}: expected a part of type 'text'",
        ),
        ({"max_tokens": True}, "max_tokens=True: expected an integer of at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens=-1: expected an integer of at least 1"),
        ({"stop": ["x"]}, "stop=['x']: this server cannot do that"),
        ({"logprobs": True}, "logprobs=True: this server cannot do that"),
        ({"logprobs": 0}, "logprobs=0: this server cannot do that; expected False or nothing"),
        ({"n": True}, "n=True: this server cannot do that; expected 1 or nothing"),
        ({"suffix": "."}, "suffix='.': this server cannot do that; expected '' or nothing"),
        ({"stream": "no"}, "stream='no': expected true or false"),
        ({"chat_template_kwargs": [["a", 1]]}, "chat_template_kwargs=[['a', 1]]: expected an object"),
        (
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs['chat_template']='{{ 1 }}': expected names that the checkpoint's template reads",
        ),
        ({"chat_template_kwargs": {"max_length": 10**9}}, "chat_template_kwargs['max_length']=1000000000: "),
        (
            {"tool_choice": "none"},
            "tool_choice='none': this server cannot do that; expected 'auto' or nothing",
        ),
        (
            {"parallel_tool_calls": False},
            "parallel_tool_calls=False: this server cannot do that; expected True",
        ),
        (
            {"functions": [{"name": "f"}]},
            "functions=[{'name': 'f'}]: this server cannot do that; expected []",
        ),
        (
            {"reasoning_effort": "high"},
            "reasoning_effort='high': this server cannot do that; expected nothing",
        ),
        ({"temperature": 1.0}, "temperature=1.0: requests of one batch are sampled alike; expected 0.0"),
        ({"temperature": "hot"}, "temperature='hot': requests of one batch"),
        ({"temperature": False}, "temperature=False: requests of one batch"),
        ({"top_p": True}, "top_p=True: requests of one batch"),
        ({"seed": "x"}, "seed='x': expected an integer"),
        ({"seed": True}, "seed=True: expected an integer"),
        ({"top_p": 0.5}, "top_p=0.5: requests of one batch are sampled alike; expected 1.0"),
    ],
)
def test_refused(more, told):
    assert told in problem({**ASKED, **more}, GREEDY, "messages")


def test_a_server_that_samples_takes_what_it_was_started_with():
    assert problem({**ASKED, "temperature": 0.6, "top_p": 0.9}, SAMPLED, "messages") is None
    assert "expected 0.6" in problem({**ASKED, "temperature": 0.0}, SAMPLED, "messages")
    assert "expected 0.9" in problem({**ASKED, "top_p": 1.0}, SAMPLED, "messages")


def test_seeds_are_refused_where_something_is_drawn():
    told = problem({**ASKED, "seed": 5}, SAMPLED, "messages")
    assert told == "seed=5: requests of one batch share a generator; expected nothing"
    assert problem({**ASKED, "seed": None}, SAMPLED, "messages") is None


def test_a_greedy_server_seeds_nothing():
    body = {**ASKED, "seed": 5}
    Chat(None, SimpleNamespace(sampling=GREEDY))._validate_request(body)
    assert body == ASKED


def test_nothing_for_a_template_is_nothing():
    body = {**ASKED, "chat_template_kwargs": None}
    Chat(None, SimpleNamespace(sampling=GREEDY))._validate_request(body)
    assert body == ASKED


def test_the_longer_name_of_a_length_is_read_by_every_transformers():
    body = {**ASKED, "max_completion_tokens": 5}
    Chat(None, SimpleNamespace(sampling=GREEDY))._validate_request(body)
    assert body["max_tokens"] == 5


def test_every_field_that_transformers_passes_over_is_looked_at():
    for fields in (UNUSED_CHAT_COMPLETION_FIELDS, UNUSED_LEGACY_COMPLETION_FIELDS):
        for name in fields - {"user", "metadata", "max_completion_tokens"}:
            told = problem({**ASKED, name: "something else"}, GREEDY, "messages")
            assert told.startswith(f"{name}='something else': this server cannot do that")


@pytest.mark.parametrize("prompt", [None, "", 5, ["x"]])
def test_prompts(prompt):
    assert problem({"prompt": "x"}, GREEDY, "prompt") is None
    assert f"prompt={prompt!r}: expected a text" in problem({"prompt": prompt}, GREEDY, "prompt")
