"""What the server that ranks are forked from imports, once for all of them."""

import gc
import os

os.environ.setdefault(
    "TORCHINDUCTOR_COMPILE_THREADS", "1"
)  # a pool of processes for each rank costs more than it gives

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import inductor_passes
import layers
from tests import spared

assert layers and inductor_passes and torch
# As in tests/conftest.py, and ranks collect behind each test that makes a group: each looked at all this for 0.1 s.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)
spared.spare()
