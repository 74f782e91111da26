"""Everything that measures: `python -m benchmarks --help`."""
