"""`python -m layers.serve MODEL`: an OpenAI-compatible server of one patched and compiled model."""

import argparse
import signal
import sys

from layers.serve.options import ServeOptions


def options_of(arguments: list[str]) -> ServeOptions:
    """The options that a command line names."""
    parser = argparse.ArgumentParser(prog="python -m layers.serve", description=__doc__)
    parser.add_argument("model", help="a folder that save_pretrained wrote, or a name on the hub")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--experts", help="float8, int8, mxfp4, nvfp4 or int4: read into fewer bits")
    parser.add_argument("--backend", default="moe_inductor", help="of torch.compile, or none")
    parser.add_argument("--greedy", action="store_true", help="whatever the checkpoint says of sampling")
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, help="or what transformers finds right"
    )
    parser.add_argument("--max-requests", type=int, default=64, help="in work at once; more are answered 429")
    parser.add_argument("--max-batch-tokens", type=int, help="tokens of a step")
    parser.add_argument("--num-blocks", type=int, help="blocks of the cache")
    parser.add_argument("--page-size", type=int, help="tokens of a block")
    given = vars(parser.parse_args(arguments))
    given["backend"] = None if given["backend"] == "none" else given["backend"]
    return ServeOptions(**given)


def main() -> int:
    """Serves until it is told to end. 2 for options or a model that cannot be served, with the reason."""
    try:
        options = options_of(sys.argv[1:])
        from layers.serve.server import serve

        serve(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"layers.serve: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"layers.serve: {error}; pip install moe-inductor[serve]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # Until it listens: threads that compile would go on, and say what they miss.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
