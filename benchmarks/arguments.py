"""Types of options: what a command cannot measure is told in a line before anything runs, not after minutes of it."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def whole(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return int(text)


def number(text: str) -> float:
    """A number above 0, or inf."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """One of these names."""
    names = tuple(known)

    def checked(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r}: expected names from {', '.join(names)}")
        return text

    return checked


def known_device(text: str) -> str:
    """cpu, or cuda where PyTorch finds it."""
    if one_of(("cpu", "cuda"))(text) == "cuda" and not torch.cuda.is_available():
        raise ArgumentTypeError(f"{text!r}: PyTorch finds no GPU here")
    return text


def listed(one: Callable[[str], Any]) -> Callable[[str], str]:
    """A comma list of what `one` takes, as text."""

    def checked(text: str) -> str:
        for part in text.split(","):
            one(part)
        return text

    return checked


def to_write(text: str) -> Path:
    """A file to be written, whose folder is made now."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{text!r}: no folder can be made there, {error.strerror}") from error
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r}: expected a file, it is a folder")
    return path


def to_read(text: str) -> Path:
    """A file that is there."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text!r}: expected a file that is there")
    return Path(text)
