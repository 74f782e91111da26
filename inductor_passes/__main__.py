"""`python -m inductor_passes explain --model PATH`: what the passes make of a model of transformers.

PATH is a directory with a config.json. Weights are loaded where there are some, and drawn where there are none.
"""

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inductor_passes import _compat
from inductor_passes.explain import explain
from inductor_passes.report import Report
from inductor_passes.stories import Verdict
from inductor_passes.text import amount

_PATCH = "layers.huggingface:patch"
"""By name, because this package imports nothing of `layers`: whoever asks for it has it."""
_WEIGHTS = ("*.safetensors", "*.bin")
_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, 1 where `--check` found something."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        model = _model(arguments).train(arguments.train)
        inputs = _inputs(model, arguments)
    except Exception as error:  # as various as what can be wrong with a folder
        parser.error(_in_a_line(error, arguments))
    report = _explain(model, inputs, arguments)
    sys.stdout.write(f"{report}\n")
    if arguments.html:
        try:
            sys.stdout.write(f"page: {report.to_html(arguments.html)}\n")
        except OSError as error:
            parser.error(f"--html {arguments.html}: {error.strerror}")
    return int(arguments.check and not _is_clean(report))


def _in_a_line(error: Exception, arguments: argparse.Namespace) -> str:
    told = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError, ImportError)):
        return told
    return f"--model {arguments.model}: {type(error).__name__}: {told}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inductor_passes", description=__doc__)
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "explain", help="what is fused, what is not and why, what breaks a graph or a capture"
    )
    option = command.add_argument
    option("--model", required=True, type=Path, metavar="PATH", help="a directory with a config.json")
    option("--tokens", type=_positive, default=16, help="tokens of each sequence (16); 1 for decode")
    option("--batch", type=_positive, default=1, help="sequences (1)")
    option("--layers", type=_positive, help="only so many layers of the model")
    option("--dtype", choices=_DTYPES, help="of weights; that of the config where it is not given")
    option("--device", type=_device, default=torch.device("cpu"), help="cpu, cuda, cuda:1, ...")
    option("--experts", metavar="NAME", help="transformers' experts_implementation: eager, grouped_mm, ...")
    option("--patch", action="store_true", help=f"call {_PATCH.replace(':', '.')} on the model first")
    option("--dynamic", action="store_true", help="the graph for any number of tokens")
    option("--train", action="store_true", help="the training graph")
    option("--html", type=_page, metavar="FILE", help="write a page as well")
    option("--check", action="store_true", help="exit with 1 unless all is fused, without break or hazard")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # the second where PyTorch is built without CUDA
        expected = "expected one that PyTorch finds here, such as cpu"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from error


def _page(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file in a folder that is there")
    return path


def _explain(model: nn.Module, inputs: dict[str, Tensor], arguments: argparse.Namespace) -> Report:
    if arguments.patch:
        sys.stdout.write(f"{pkgutil.resolve_name(_PATCH)(model)}\n")
    with torch.set_grad_enabled(arguments.train):
        return explain(model, **inputs)


def _inputs(model: Any, arguments: argparse.Namespace) -> dict[str, Tensor]:
    vocab_size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if vocab_size is None:
        raise ValueError(f"--model {arguments.model} has no vocab_size: expected a model of text")
    names = ["input_ids"] + ["decoder_input_ids"] * bool(model.config.is_encoder_decoder)
    shape = (arguments.batch, arguments.tokens)
    inputs = {name: torch.randint(vocab_size, shape, device=arguments.device) for name in names}
    if arguments.dynamic:
        for ids in inputs.values():
            _compat.maybe_mark_dynamic(ids, 1)
    return inputs


def _model(arguments: argparse.Namespace) -> nn.Module:
    folder = arguments.model
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {folder}: expected a directory with a config.json")
    import transformers

    config = _config(transformers, arguments)
    name = next(iter(config.architectures or ()), "")
    kind: Any = getattr(transformers, name, transformers.AutoModelForCausalLM)
    options = {"experts_implementation": arguments.experts} if arguments.experts else {}
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        options |= {"dtype": config.dtype, "local_files_only": True}
        return kind.from_pretrained(folder, config=config, **options).to(arguments.device)
    make = getattr(kind, "from_config", None) or kind._from_config  # of an Auto class, of a model's own
    with torch.device("meta"):
        _expect_room(make(config), arguments)
    with arguments.device:
        return make(config, dtype=config.dtype, **options)


def _config(transformers: Any, arguments: argparse.Namespace) -> Any:
    config = transformers.AutoConfig.from_pretrained(arguments.model, local_files_only=True)
    text_config = config.get_text_config(decoder=True)
    text_config.use_cache = False
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else config.dtype or torch.float32
    config.dtype = text_config.dtype = dtype
    if arguments.layers:
        text_config.num_hidden_layers = min(arguments.layers, text_config.num_hidden_layers)
        kinds = getattr(text_config, "layer_types", None)
        if kinds:
            text_config.layer_types = kinds[: text_config.num_hidden_layers]
    return config


def _expect_room(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Refuses to draw more weights than fit."""
    dtype = getattr(model, "dtype", torch.float32)
    wanted = sum(each.numel() for each in model.parameters()) * dtype.itemsize
    if arguments.device.type == "cuda":
        room = torch.cuda.get_device_properties(arguments.device).total_memory
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > room:
        raise ValueError(
            f"--model {arguments.model} has {amount(wanted, 'B')} of weights, more than the {amount(room, 'B')} of "
            f"{arguments.device}: expected fewer, as with --layers 2"
        )


def _is_clean(report: Report) -> bool:
    fused = all(story.verdict is Verdict.FUSED for story in report.stories)
    return fused and not report.graph_breaks and not report.capture_hazards


if __name__ == "__main__":
    sys.exit(main())
