"""What a serving benchmark replays: requests that arrive at random, with prompts and answers of mixed lengths."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        arrival: seconds after the trace began.
        prompt: token ids.
        answer: tokens to generate.
    """

    arrival: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Mix:
    """How long prompts and answers are.

    Args:
        prompts: (share, fewest, most) tokens of each kind of prompt; shares are weights.
        answers: (fewest, most) tokens.
    """

    prompts: tuple[tuple[float, int, int], ...]
    answers: tuple[int, int]

    @property
    def longest(self) -> int:
        """The most tokens, of prompt and answer, that a request can have."""
        return max(most for _, _, most in self.prompts) + self.answers[1]


def make_trace(requests: int, mix: Mix, vocabulary: int, seed: int) -> list[Request]:
    """A Poisson process of one request a second on average, the same for the same seed."""
    draw = random.Random(seed)
    arrival, made = 0.0, []
    shares = [share for share, _, _ in mix.prompts]
    for _ in range(requests):
        _, fewest, most = draw.choices(mix.prompts, shares)[0]
        prompt = tuple(draw.randrange(vocabulary) for _ in range(draw.randint(fewest, most)))
        made.append(Request(arrival, prompt, draw.randint(*mix.answers)))
        arrival += draw.expovariate(1.0)
    return made


def at_rate(trace: Sequence[Request], rate: float) -> list[Request]:
    """The same requests, `rate` of them a second on average; `inf` has all come at once."""
    return [replace(request, arrival=request.arrival / rate) for request in trace]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least so many percent of them do not exceed (nearest rank)."""
    return sorted(values)[max(ceil(len(values) * percent / 100), 1) - 1]
