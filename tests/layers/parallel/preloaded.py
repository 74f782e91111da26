"""What the server that ranks are forked from imports, once for all of them."""

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

assert layers and inductor_passes and torch
