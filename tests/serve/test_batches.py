"""One batch for everybody: begun by answering, and nobody in it waits for what never comes. Uncompiled, in process."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch
from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving.utils import CBWorkerDeadError

from benchmarks.checkpoints import small_qwen3_moe
from layers.serve.batching import _turned_alike, batching_config, begun, capture, room
from layers.serve.generation import Batches, _told
from layers.serve.options import ServeOptions
from tests.coverage import cases

BLOCKS, PAGE, STEP = 16, 16, 160
GREEDY = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=8)
OPTIONS = ServeOptions("", backend=None, max_batch_tokens=STEP, num_blocks=BLOCKS, page_size=PAGE)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return small_qwen3_moe(vocab_size=64, max_position_embeddings=200).eval()


@pytest.fixture
def batches(model):
    """Answering."""
    each = Batches(batching_config(OPTIONS))
    each.begin(model, GREEDY)
    yield each
    each.stop()


class Letters:
    """A tokenizer of which a stream needs this much."""

    all_special_tokens = ("~",)

    def __init__(self):
        from tokenizers import Tokenizer, models

        self._tokenizer = Tokenizer(models.WordLevel({chr(48 + i): i for i in range(64)}, chr(48)))

    def decode(self, ids, **options):
        return "".join(chr(48 + i) for i in ids)


def streamed(batches, model, prompt, request_id="one", tokens=8, **more):
    config = GenerationConfig(max_new_tokens=tokens, eos_token_id=-1)
    inputs = {"input_ids": prompt}
    return batches.generate_streaming(model, Letters(), inputs, config, request_id=request_id, **more)


async def read(queue):
    pieces = []
    while (piece := await asyncio.wait_for(queue.get(), 30)) is not None:
        pieces.append(piece)
    return "".join(pieces).replace(" ", "")


def test_a_stream_goes_on_where_its_parser_fails(batches, model):
    def fed(text):
        raise ValueError("no JSON")

    async def asked():
        expected = await read(streamed(batches, model, [3, 5, 7])[0])
        parser = SimpleNamespace(initial_events=[], feed=fed)
        assert await read(streamed(batches, model, [3, 5, 7], response_parser=parser)[0]) == expected

    asyncio.run(asked())


@pytest.mark.parametrize("several", [False, True])
def test_an_answer_that_ends_with_its_last_token_is_not_cut(batches, model, several):
    def config(**more):
        return GenerationConfig(max_new_tokens=3, **more)

    async def asked():
        inputs = {"input_ids": [3, 5, 7]}
        cut = config(eos_token_id=-1)
        *_, tokens = await batches.generate_non_streaming(model, Letters(), inputs, cut, request_id="cut")
        end = tokens[-1]
        assert cut.max_new_tokens == 3 and end not in tokens[:-1]
        whole, stream = (config(eos_token_id=[99, end] if several else end) for _ in range(2))
        await batches.generate_non_streaming(model, Letters(), inputs, whole, request_id="whole")
        queue, _ = batches.generate_streaming(model, Letters(), inputs, stream, request_id="stream")
        assert whole.max_new_tokens is None and await read(queue) and stream.max_new_tokens is None

    asyncio.run(asked())


def test_before_the_first_request_several_were_answered(batches, model):
    manager = batches._cb
    assert manager.is_running() and manager.output_router.output_queue.empty()
    assert manager.current_batch >= 3
    assert room(manager) == 200  # positions; the cache has more


def managed(family, options, **config):
    """Of a small model: not started."""
    model = cases.stock_model(family, use_cache=True, max_position_embeddings=4096, **config)
    manager = model.init_continuous_batching(
        generation_config=GREEDY, continuous_batching_config=batching_config(options)
    )
    manager.batch_processor = manager._create_batch_processor()
    return manager


def test_a_request_of_all_the_room_there_is_has_a_place():
    """Layers of two kinds take sectors of the cache, and what is over in each is lost."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 2
    options = ServeOptions("", backend=None, max_batch_tokens=64, num_blocks=7, page_size=16)
    manager = managed("gpt_oss", options, num_hidden_layers=5, layer_types=kinds, sliding_window=512)
    most = room(manager)
    assert 64 <= most <= 7 * 16
    manager.start()
    try:
        manager.add_request([5] * (most - 1), max_new_tokens=1, eos_token_id=-1)
        assert len(manager.get_result(timeout=60).generated_tokens) == 1
    finally:
        manager.stop(block=True, timeout=2, hard_stop=True)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("family", ["phimoe", "qwen3_moe"])
def test_no_request_is_so_long_that_others_are_turned_otherwise(family):
    more = {"original_max_position_embeddings": 32, "short_mscale": 1.0, "long_mscale": 1.3}
    assert room(managed(family, OPTIONS, rope_parameters={**LONG, **more})) == 32
    assert _turned_alike(SimpleNamespace(rope_parameters={"full_attention": {**LONG, **more}})) == [32]
    assert _turned_alike(SimpleNamespace(rope_parameters={"rope_type": "yarn", **more})) == []


def test_what_is_done_to_logits_and_left_out_of_a_batch_is_told(model):
    sampling = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
    with pytest.raises(ValueError, match="asks for RepetitionPenaltyLogitsProcessor, which"):
        begun(model, sampling, batching_config(OPTIONS))


def test_a_batch_that_samples(model):
    sampling = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, eos_token_id=-1)
    manager = begun(model, sampling, batching_config(OPTIONS))
    manager.stop(block=True, timeout=2, hard_stop=True)
    assert manager.current_batch >= 3


def test_a_model_that_fails_is_told_at_the_start(model, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no such layer")

    monkeypatch.setattr(model.model, "forward", broken)
    with pytest.raises(RuntimeError, match="the model did not answer: no such layer"):
        begun(model, GREEDY, batching_config(OPTIONS))


def test_steps_of_every_number_of_tokens_are_run_before(model):
    manager = model.init_continuous_batching(
        generation_config=GREEDY, continuous_batching_config=batching_config(OPTIONS)
    )
    manager.batch_processor = manager._create_batch_processor()
    runner, seen = manager.batch_processor.model_runner, []
    runner.pad_inputs = True
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    capture(manager)
    hook.remove()
    assert seen == [STEP, 64, 128]


def test_both_sets_of_buffers_are_captured():
    """As transformers has them where it prepares a step while another runs."""
    seen, pairs = [], ["first", "second"]
    buffers = SimpleNamespace(io_pairs=tuple(pairs), swap_io_pairs=pairs.reverse)
    runner = SimpleNamespace(
        pad_inputs=True,
        inputs_and_outputs=buffers,
        run_one_warmup=lambda model, tokens, cached: seen.append((pairs[0], tokens, cached)),
    )
    batch = SimpleNamespace(model_runner=runner, cache=SimpleNamespace(max_batch_tokens=160))
    config = batching_config(OPTIONS)
    config.q_padding_interval_size = 64
    manager = SimpleNamespace(
        model=None, batch_processor=batch, continuous_batching_config=config, warmup=lambda: None
    )
    capture(manager)
    assert seen == [(pair, tokens, PAGE) for pair in ("first", "second") for tokens in (64, 128)]
    assert pairs[0] == "first"


def test_what_was_generated_before_the_handler_was_there_comes_first(batches, model):
    async def story():
        add, router = batches._add, batches._cb.output_router
        seen, deliver = [], router.deliver_batch

        def delivered(outputs):
            deliver(outputs)
            seen.extend(outputs)

        def added(*args, **kwargs):
            router.deliver_batch = delivered
            taken = add(*args, **kwargs)
            while not (seen and seen[-1].is_finished()):
                time.sleep(0.001)  # until all of it is there
            return taken

        expected = await read(streamed(batches, model, [3, 5, 7])[0])
        batches._add = added
        assert await read(streamed(batches, model, [3, 5, 7])[0]) == expected
        assert len(expected) == 8
        assert batches._cb.output_router.result_handlers == {}

    asyncio.run(story())


def test_nobody_waits_for_a_batch_that_has_ended(batches, model):
    async def story():
        batches._cb.stop(block=True, hard_stop=True)
        for _ in range(2):
            with pytest.raises(CBWorkerDeadError, match="stopping"):
                streamed(batches, model, [1, 2])
        config = GenerationConfig(max_new_tokens=8, eos_token_id=-1)
        with pytest.raises(CBWorkerDeadError, match="stopping"):
            await batches.generate_non_streaming(
                model, Letters(), {"input_ids": [1]}, config, request_id="two"
            )
        assert "one" not in batches._cb.output_router.result_handlers

    asyncio.run(story())


def test_who_waits_is_told_when_the_model_fails(batches, model, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("out of it")

    async def story():
        queue, _ = streamed(batches, model, [1, 2], tokens=150)
        await queue.get()
        monkeypatch.setattr(model.model, "forward", broken)
        while isinstance(piece := await asyncio.wait_for(queue.get(), 30), str):
            pass
        assert piece.msg == "out of it"
        batches._cb.join(0.0, timeout=30)
        assert not batches.is_alive()
        with pytest.raises(CBWorkerDeadError, match="out of it"):
            streamed(batches, model, [1, 2], request_id="another")

    asyncio.run(story())


def test_a_request_that_was_left_is_forgotten(batches, model):
    async def story():
        _, streamer = streamed(batches, model, [1, 2], tokens=150)
        with pytest.raises(HTTPException) as error:
            streamed(batches, model, [1, 2])
        assert error.value.status_code == 409
        streamer.cancel()
        assert batches._cb.output_router.result_handlers == {}
        queue, _ = streamed(batches, model, [1, 2], request_id="another")
        assert len(await read(queue)) == 8

    asyncio.run(story())


@pytest.mark.parametrize("error", [ValueError("x"), TypeError("x"), KeyError("x"), AttributeError("x")])
def test_what_cannot_be_read_is_a_bad_request(error):
    async def answer():
        raise error

    with pytest.raises(HTTPException) as told:
        asyncio.run(_told(answer()))
    assert told.value.status_code == 400
    assert told.value.detail.startswith(type(error).__name__)


def test_what_is_no_fault_of_a_request_is_not_told_as_one():
    async def answer():
        raise CBWorkerDeadError("x")

    with pytest.raises(CBWorkerDeadError):
        asyncio.run(_told(answer()))


def test_ending_waits_for_nobody():
    given = {}
    batches = Batches()
    batches._cb = SimpleNamespace(stop=lambda **options: given.update(options))
    batches.stop()
    assert given["hard_stop"] is True
