"""Every MoE family of the installed transformers: `python -m tests.coverage` measures and writes docs/coverage.md."""
