"""`python -m layers.serve` in a process of its own, for tests that ask it as any client does."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from tests import spared

PATIENCE = 300  # seconds, for a start that compiles on a busy machine


class Server:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen, log: Path, model: str, port: int) -> None:
        self.process, self.log, self.model = process, log, model
        self.url = f"http://localhost:{port}"

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@contextmanager
def running(model: Path, *options: str, folder: Path, device: str = "cpu") -> Iterator[Server]:
    """A server of `model` that is ready, ended behind the block if it has not ended within."""
    port, log = _free_port(), folder / "log"
    python = [sys.executable, "-P", str(Path(spared.__file__))]
    command = [*python, "layers.serve", str(model), "--port", str(port), "--device", device]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *options],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    server = Server(process, log, str(model), port)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while not re.search("^ready: ", server.printed, re.MULTILINE):
        assert server.process.poll() is None, server.printed
        assert time.monotonic() < deadline, server.printed
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("localhost", 0))
        return each.getsockname()[1]
