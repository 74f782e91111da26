"""`python -m benchmarks COMMAND`: everything in this repository that measures."""

import argparse
import sys

from benchmarks import (
    compile_bench,
    cpu_bench,
    demo,
    gpu_proof,
    host_bench,
    invariance_bench,
    kernels_bench,
    loading,
    moe_bench,
    options_bench,
    parallel_bench,
    parallel_demo,
    published_bench,
    quantised_bench,
    serving_bench,
    soak_bench,
    stock_bench,
    training_bench,
    tune,
)

COMMANDS = {
    "demo": demo,
    "demo-parallel": parallel_demo,
    "parallel": parallel_bench,
    "kernels": kernels_bench,
    "moe": moe_bench,
    "cpu": cpu_bench,
    "loading": loading,
    "host": host_bench,
    "options": options_bench,
    "invariance": invariance_bench,
    "quantised": quantised_bench,
    "published": published_bench,
    "serving": serving_bench,
    "soak": soak_bench,
    "stock": stock_bench,
    "training": training_bench,
    "tune": tune,
    "compile-time": compile_bench,
    "gpu": gpu_proof,
}


def main() -> int:
    """Parses the command line and runs one command; each is a module with `add_arguments` and `main`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args()
    return COMMANDS[arguments.command].main(arguments)


if __name__ == "__main__":
    sys.exit(main())
