"""`python -m layers.serve MODEL`: transformers' OpenAI-compatible server with a patched and compiled model inside.

The server, its continuous batching and its CUDA graphs are transformers' own (`transformers.cli.serving`). What is here
is the seam: the model is patched, its kernels are loaded and its graphs captured before the first request, and requests
that transformers would answer in another way than they ask for are refused.
"""
