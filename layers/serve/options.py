"""What a server is started with."""

from dataclasses import dataclass
from typing import Literal

from layers._checks import expect_choice, expect_positive, expect_type

Experts = Literal["float8", "int8", "mxfp4", "nvfp4", "int4"]
"""How experts are quantised: with a scale for each row, in 4 bits for each group of a row."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `python -m layers.serve`.

    Args:
        model: a folder that `save_pretrained` wrote, or a name on the hub.
        host, port: where to listen.
        device, dtype: where and in what the model runs; "auto" is a GPU if there is one, and what the checkpoint says.
        experts: what experts become while they are read; None leaves them as the checkpoint has them.
        backend: of `torch.compile` for prefill and decode; None runs them uncompiled.
        greedy: take the most likely token whatever the model's generation config says.
        max_requests: requests in work at once. More are answered 429.
        cuda_graphs: capture steps; None for what transformers finds right, which is where attention needs no mask.
        max_batch_tokens, num_blocks, page_size: tokens of a step, blocks of the cache and tokens of a block; None
            for what transformers finds right.

    Raises:
        TypeError, ValueError: an option of another type, a number that is not at least 1, or a port beyond 65535.
    """

    model: str
    host: str = "localhost"
    port: int = 8000
    device: str = "auto"
    dtype: str = "auto"
    experts: Experts | None = None
    backend: str | None = "moe_inductor"
    greedy: bool = False
    cuda_graphs: bool | None = None
    max_requests: int = 64
    max_batch_tokens: int | None = None
    num_blocks: int | None = None
    page_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("model", "host", "device", "dtype"):
            expect_type(name, getattr(self, name), str)
        for name, kind in {"backend": str, "cuda_graphs": bool}.items():
            expect_type(name, getattr(self, name), (kind, type(None)))
        if self.experts is not None:
            expect_choice("experts", self.experts, Experts)
        expect_type("greedy", self.greedy, bool)
        for name in ("port", "max_requests", "max_batch_tokens", "num_blocks", "page_size"):
            value = getattr(self, name)
            if value is not None or name in ("port", "max_requests"):
                expect_positive(name, value)
        if self.port > 65535:
            raise ValueError(f"port={self.port}: expected at most 65535")
