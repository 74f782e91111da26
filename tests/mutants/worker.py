"""A process that has imported torch and forks for every run of pytest: of a short test, importing is two thirds.

It reads a line for each run, a JSON list of pytest's arguments and the file for the output, and answers with two: the
child's process id, which is its process group too, and, when it has ended, its exit status, negative for a signal.
Nothing of the tree is imported before a fork.
"""

import json
import os
import sys


def main() -> None:
    import pytest
    import torch._dynamo  # noqa: F401

    for line in sys.stdin:
        arguments, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.exit(pytest.main(arguments))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
