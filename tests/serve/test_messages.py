"""What a model writes reaches a chat whole: no prompt, and no tool call that is none."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving.utils import ResponseParser, get_response_template, response_events_to_chunks

from benchmarks.checkpoints import small_qwen3_moe
from layers.serve.generation import Chat
from layers.serve.messages import Careful, plain_template, tell_answers_alone
from layers.serve.options import ServeOptions
from layers.serve.server import _application

CHATML = (
    "{% for m in messages %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
ANOTHER = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Assistant:"
MODEL = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_moe"))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
NO_CALLS = (
    '<tool_call>{"name": "f", "arg',  # cut by max_tokens
    '<tool_call>{"name": "f"}</tool_call>',
    "<tool_call>{bad}</tool_call>",
    "<tool_call>[1]</tool_call>",
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    "<tool_call>" + "[" * 3000 + "</tool_call>",
)


def tokenizer_of(chat_template):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="</s>")
    fast.chat_template = chat_template
    return fast


def prompt_of(tokenizer):
    return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def whole(tokenizer, text):
    """The message of an answer that is not streamed."""

    class Manager:
        async def generate_non_streaming(self, *args, **kwargs):
            return text, 1, tokenizer(text)["input_ids"]

    inputs = {"input_ids": tokenizer(prompt_of(tokenizer))["input_ids"]}
    config = SimpleNamespace(max_new_tokens=None)
    reply = Chat(None, None)._non_streaming("one", MODEL, tokenizer, "m", inputs, config, Manager())
    return json.loads(asyncio.run(reply).body)["choices"][0]["message"]


def streamed(tokenizer, text):
    """What a stream says, with names of what is called."""
    template = get_response_template(tokenizer, MODEL)
    parser = Careful(ResponseParser(template, prefix=prompt_of(tokenizer)), tokenizer)
    events = [*parser.initial_events]
    for letter in text:
        events += parser.feed(letter)
    chunks = response_events_to_chunks([*events, *parser.finalize()[1]])
    return "".join(getattr(each, "name", each) for each in chunks)


@pytest.mark.parametrize("text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_a_tool_call_that_is_none_is_text(text):
    tokenizer = tokenizer_of(CHATML)
    message = whole(tokenizer, f"a{text}b<|im_end|>")
    assert message["content"] == f"a{text}b" and not message.get("tool_calls")
    assert streamed(tokenizer, f"a{text}b<|im_end|>") == f"a{text}b"


def test_calls_before_one_that_is_none_stay():
    tokenizer, text = tokenizer_of(CHATML), f"<think>hm</think>{CALL}<tool_call>{{bad}}</tool_call>"
    message = whole(tokenizer, text)
    assert message["content"] == "<tool_call>{bad}</tool_call>" and message["reasoning_content"] == "hm"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["f"]
    assert streamed(tokenizer, text) == "hmf<tool_call>{bad}</tool_call>"


def test_other_answers_are_as_transformers_reads_them():
    tokenizer = tokenizer_of(CHATML)
    text = f"<think>hm</think>one < two {CALL}<|im_end|>"
    message = whole(tokenizer, text)
    assert (message["content"], message["reasoning_content"]) == ("one < two", "hm")
    assert streamed(tokenizer, text) == "hmone < twof"


def test_a_prompt_without_the_mark_of_an_answer_is_not_part_of_it():
    tokenizer = tokenizer_of(ANOTHER)
    assert whole(tokenizer, "yes")["content"] == f"{prompt_of(tokenizer)}yes"  # as transformers reads it
    tell_answers_alone(tokenizer, MODEL)
    assert tokenizer.response_template == plain_template(tokenizer)
    assert whole(tokenizer, "yes<|im_end|> no</s>")["content"] == "yes no"
    assert streamed(tokenizer, " yes<|im_end|> no</s>") == " yes no"


@pytest.mark.parametrize("template", [CHATML, None, "{{ raise_exception('no') }}", "{{ 1 + messages }}"])
def test_other_tokenizers_stay(template):
    tokenizer = tokenizer_of(template)
    tell_answers_alone(tokenizer, MODEL)
    assert getattr(tokenizer, "response_template", None) is None
    tell_answers_alone(tokenizer_of(ANOTHER), SimpleNamespace(config=SimpleNamespace(model_type="mixtral")))


def test_a_server_looks_at_its_template():
    model, tokenizer = small_qwen3_moe(vocab_size=64).eval(), tokenizer_of(ANOTHER)
    models = SimpleNamespace(process_model_name=str, load_model_and_processor=lambda name: (model, tokenizer))
    _application(models, SimpleNamespace(begin=lambda *given: None), ServeOptions("", greedy=True))
    assert tokenizer.response_template == plain_template(tokenizer)


def test_without_special_tokens_all_is_text():
    parser = ResponseParser(plain_template(SimpleNamespace(all_special_tokens=[])), prefix="asked")
    assert parser.initial_events == [] and response_events_to_chunks(parser.feed(" a")) == [" a"]
