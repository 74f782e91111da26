"""What a request may ask for. Where transformers would answer in another way than asked, the answer here is 400."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

Body = Mapping[str, Any]

# Fields that transformers takes and passes over, and what they may say all the same: what is done anyway, of which the
# last is told. Those that ask nothing of an answer (`user`, `metadata`, hints to a cache) are not among them.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "stop": (None, [], ""),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "generation_config": (None,),
    "tool_choice": (None, "auto"),
    "parallel_tool_calls": (None, True),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "stream_options": (None, {}, {"include_usage": False}, {"include_usage": True}),  # it is told either way
}
_LENGTHS = ("max_tokens", "max_completion_tokens")
# What is no template's to read: another template, which may never end, or a length to pad to or to cut at.
_OF_TOKENIZER = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}


def problem(body: Body, sampling: GenerationConfig, needed: str) -> str | None:
    """Why a request cannot be answered as it asks, or None. `needed`: "messages" or "prompt"."""
    by_need = _message_problem if needed == "messages" else _prompt_problem
    parts = (by_need, _template_problem, _length_problem, _stream_problem, _ignored_problem)
    told = (part(body) for part in parts)
    return next((each for each in told if each is not None), None) or _sampling_problem(body, sampling)


def _message_problem(body: Body) -> str | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return f"messages={messages!r}: expected a list of at least one message"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not _is_text(message.get("role")):
            return f"messages[{index}]={message!r}: expected an object with a role"
        calls = message.get("tool_calls")
        if calls is not None and not _are_objects(calls):
            return f"messages[{index}].tool_calls={calls!r}: expected a list of objects"
        told = _content_problem(message.get("content"), "tool_calls" in message)
        if told is not None:
            return f"messages[{index}].content{told}"
    return None


def _content_problem(content: Any, may_lack: bool) -> str | None:
    if _is_text(content) or (content is None and may_lack):
        return None
    if not isinstance(content, list):
        return f"={content!r}: expected text"
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not _is_text(part.get("text")):
            return f"[{index}]={part!r}: expected a part of type 'text'"
    return None


def _template_problem(body: Body) -> str | None:
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        return f"chat_template_kwargs={given!r}: expected an object"
    for name in sorted(_OF_TOKENIZER & set(given)):
        return f"chat_template_kwargs[{name!r}]={given[name]!r}: expected names that the checkpoint's template reads"
    return None


def _prompt_problem(body: Body) -> str | None:
    prompt = body.get("prompt")
    return None if _is_text(prompt) and prompt else f"prompt={prompt!r}: expected a text that is not empty"


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _is_text(value: Any) -> bool:
    # JSON can hold half a surrogate pair, "\ud800", of which no tokenizer makes tokens.
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _length_problem(body: Body) -> str | None:
    for name in _LENGTHS:
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return f"{name}={value!r}: expected an integer of at least 1"
    return None


def _stream_problem(body: Body) -> str | None:
    value = body.get("stream")
    return None if value is None or isinstance(value, bool) else f"stream={value!r}: expected true or false"


def _ignored_problem(body: Body) -> str | None:
    for name, allowed in _WITHOUT_EFFECT.items():
        if not any(_is_said(body.get(name), each) for each in allowed):
            expected = "nothing" if allowed[-1] is None else f"{allowed[-1]!r} or nothing"
            return f"{name}={body[name]!r}: this server cannot do that; expected {expected}"
    return None


def _is_said(value: Any, allowed: Any) -> bool:
    # In Python 0 is False, and `logprobs: 0` asks for the log probability of each token.
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _sampling_problem(body: Body, sampling: GenerationConfig) -> str | None:
    given: dict[str, Callable[[], Any]] = {
        "temperature": lambda: (sampling.temperature or 1.0) if sampling.do_sample else 0.0,
        "top_p": lambda: (sampling.top_p or 1.0) if sampling.do_sample else 1.0,
    }
    for name, of_server in given.items():
        value = body.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not is_number or value != of_server()):
            told = f"{name}={value!r}: requests of one batch are sampled alike"
            return f"{told}; expected {of_server()}, with which the server was started, or nothing"
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        return f"seed={seed!r}: expected an integer"
    if sampling.do_sample and seed is not None:
        return f"seed={seed!r}: requests of one batch share a generator; expected nothing"
    return None
