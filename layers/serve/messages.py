"""What of an answer is text and what a tool call, where transformers' parser would fail or tell of the prompt."""

import re
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser

_NO_CALL = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_QUESTION = "a question"


def tell_answers_alone(tokenizer: PreTrainedTokenizerBase, model: Any) -> None:
    """Lets answers be plain text where transformers' way to read those of such a model does not fit the chat template.

    It knows by a mark in the prompt where an answer begins, and tells of the whole prompt where that is missing.
    """
    template, asked = get_response_template(tokenizer, model), [{"role": "user", "content": _QUESTION}]
    if template is None or tokenizer.chat_template is None:
        return
    try:
        prompt: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    except (TemplateError, *_NO_CALL):
        return  # it wants more than that, which who asks is told
    told = response_events_to_chunks(ResponseParser(template, prefix=prompt).initial_events)
    if any(_QUESTION in str(each) for each in told):
        tokenizer.response_template = plain_template(tokenizer)


def plain_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """By which all of an answer is text, but for special tokens."""
    special = "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))
    text = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
    close = {"close_pattern": special} if special else {}
    return {"start_anchor_pattern": r"\Z", "fields": {"content": {**text, **close}}}


class Careful:
    """A streaming parser of transformers that tells as text what was begun as a tool call and is none."""

    def __init__(self, parser: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._parser, self._tokenizer = parser, tokenizer
        self.initial_events = parser.initial_events
        self._untold = ""  # text of which no event was yet, but for delimiters

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Events of more text."""
        self._untold += text
        try:
            return self._told(self._parser.feed(text))
        except _NO_CALL:
            return self._as_text()

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The last events. The message is not kept: streams do not read it."""
        try:
            return {}, self._told(self._parser.finalize()[1])
        except _NO_CALL:
            return {}, [*self._as_text(), *self._parser.finalize()[1]]

    def _told(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rest = self._untold
        for event in events:
            if event["type"] == "region_chunk" and not event.get("dirty"):
                rest = rest.partition(event["text"])[2]
            elif event["type"] == "region_close":
                _expect_call(event["field"], event["value"])
                rest = rest if event["field"] == "content" else ""
        self._untold = rest
        return events

    def _as_text(self) -> list[dict[str, Any]]:
        """The call that is none, and from now on all that comes."""
        self._parser, text = ResponseParser(plain_template(self._tokenizer), prefix=""), self._untold
        self._untold = ""
        return self._parser.feed(text)


def _expect_call(field: str, value: Any) -> None:
    called = response_events_to_chunks([{"type": "region_close", "field": field, "value": value}])
    if not all(isinstance(each.name, str) for each in called):
        raise TypeError(f"{field}={value!r}: expected the name of a function")


class Reader:
    """A tokenizer that reads an answer which is not streamed as carefully."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def parse_response(self, ids: list[int], template: Any, *, prefix: str, **more: Any) -> dict[str, Any]:
        """The message by its fields."""
        try:
            message: Any = self._tokenizer.parse_response(ids, template, prefix=prefix, **more)
            for value in message.get("tool_calls") or []:
                _expect_call("tool_calls", value)
            return message
        except _NO_CALL:
            parser = ResponseParser(template, prefix=prefix, **more)
            return _message(Careful(parser, self._tokenizer), self._tokenizer.decode(ids))


def _message(parser: Careful, text: Any) -> dict[str, Any]:
    events = [*parser.initial_events, *(event for letter in text for event in parser.feed(letter))]
    message: dict[str, Any] = {}
    for event in [*events, *parser.finalize()[1]]:
        field = event["field"]
        if event["type"] == "region_chunk" and not event.get("dirty"):
            message[field] = message.get(field, "") + event["text"]
        elif event["type"] == "region_close" and field == "tool_calls":
            message.setdefault(field, []).append(event["value"])
    return message
