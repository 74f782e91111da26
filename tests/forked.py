"""Python processes forked from one that has imported torch and its compiler: of a short process that is most.

For what is asked of a process of its own: what an import does, a first compile, what a later process finds in a cache.
Not for what torch reads when it is imported (TORCH_LOGS, whether there is Triton).
"""

import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path


def run_python(
    code: str,
    *arguments: str,
    cwd: Path | str = ".",
    env: Mapping[str, str] = os.environ,
    hash_seed: str = "random",
) -> subprocess.CompletedProcess[str]:
    """`python -c code *arguments`, with what it wrote. Those of one `hash_seed` have the same, whichever it is."""
    server = _server(hash_seed)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        request = code, arguments, str(cwd), dict(env), [*map(str, outputs)]
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that forks others has ended"
        return subprocess.CompletedProcess(arguments, int(answer), *(each.read_text() for each in outputs))


@functools.cache
def _server(hash_seed: str) -> subprocess.Popen[str]:
    """It ends with this process, whose end of the pipe is closed then."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONHASHSEED"] = hash_seed
    return subprocess.Popen([sys.executable, "-P", __file__], env=environment, text=True, **pipes)


def _serve() -> None:
    import torch._inductor.compile_fx  # noqa: F401  (what processes are forked for)

    runpy.run_path(str(Path(__file__).with_name("spared.py")))["spare"]()
    gc.collect()
    gc.freeze()  # as tests/conftest.py does: no process need look at all this again
    gc.set_threshold(100_000, 50, 100)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(code: str, arguments: list[str], cwd: str, environment: dict[str, str], outputs: list[str]) -> None:
    for stream, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except Exception:
        traceback.print_exc()
        status = 1
    for each in (sys.stdout, sys.stderr):
        each.flush()
    os._exit(status)  # an interpreter with all of torch takes half a second to end


if __name__ == "__main__":
    _serve()
