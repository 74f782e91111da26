"""What `test_by_address` runs, all in one process with a driver that launches nothing."""

import gc
import sys
import traceback

from tests.kernels import by_address, known_calls


def main() -> int:
    """Runs every check; prints those that hold, and what is wrong with the others."""
    gc.freeze()  # what is imported has no kernels, for which `know_all` looks at all objects
    for check in (*by_address.CHECKS, *known_calls.CHECKS):
        try:
            check()
            print(f"holds: {check.__name__}")
        except Exception:
            print(f"fails: {check.__name__}\n{traceback.format_exc()}")
        by_address.DRIVER.launched()
    return 0


if __name__ == "__main__":
    sys.exit(main())
