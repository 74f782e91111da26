"""Whether transformers' continuous batching computes what the model does, told before anybody is answered.

It hands a model other masks, positions and caches than `generate` does. A model that has none of its layers' kinds of
cache fails; one that makes masks of its own, such as Doge, answers, and mixes requests up.
"""

from typing import Any

import torch
from transformers import GenerationConfig

from layers.serve.batching import answers, small

_LENGTHS = (1, 2, 7, 40)  # of prompts
_ANSWER = 3
_ROUNDING = 1.0  # standard deviations of a token's logits


@torch.no_grad()
def expect_answers_alike(model: Any) -> None:
    """Raises RuntimeError unless tokens of a batch, uncompiled, are the likeliest ones for the model alone too.

    Up to rounding, which may make any token of nearly the highest logit the likeliest one, and in bfloat16 send one to
    another expert: of one prompt everything passes.
    """
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [[(7 * i + 3 * length) % vocabulary for i in range(length)] for length in _LENGTHS]
    together = zip(prompts, _together(model, prompts), strict=True)
    *_, second, _ = sorted(_short_of_the_likeliest(model, prompt, answer) for prompt, answer in together)
    if second > _ROUNDING:
        raise RuntimeError(
            "to several requests at once it answers what it does not answer to each alone: tokens whose logits are "
            f"{second:.1f} standard deviations below the highest"
        )


def _together(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=small())
    manager.start()
    try:
        return answers(manager, prompts, _ANSWER)
    finally:
        manager.stop(block=True, timeout=2, hard_stop=True)


def _short_of_the_likeliest(model: Any, prompt: list[int], answer: list[int]) -> float:
    ids = torch.tensor([prompt + answer[:-1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    given = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
    return ((logits.amax(1) - given) / logits.std(1)).max().item()
