"""A linker that reads next to nothing: of the half second that g++ takes for a kernel of a test it was a third.

binutils' older linker reads all of libtorch, gold a part. A library may leave symbols to whoever loads it, and that
process has libtorch, so empty libraries of its names do: what is linked with them needs the same and has the same code.
"""

import shutil
import subprocess
from pathlib import Path

_EMPTY = ("torch", "torch_cpu", "torch_python")
# Where the compiler asks for what is needed alone, an empty library never is.
_SCRIPT = """#!/bin/sh
for each do
    shift
    case $each in
        -ltorch*) set -- "$@" --no-as-needed "$each" --as-needed ;;
        *) set -- "$@" "$each" ;;
    esac
done
exec {linker} -L{libraries} "$@"
"""


def write_linker(folder: Path) -> bool:
    """Makes `folder` one for COMPILER_PATH; False where there is no gold, and it stays empty."""
    linker = shutil.which("ld.gold")
    if linker is None:
        return False
    libraries, nothing = folder / "libraries", folder / "nothing"
    libraries.mkdir()
    nothing.write_text("/* a script for the linker, or it says that it was given no file */")
    for name in _EMPTY:
        library = libraries / f"lib{name}.so"
        subprocess.run([linker, "-shared", "-soname", library.name, nothing, "-o", library], check=True)
    script = folder / "ld"
    script.write_text(_SCRIPT.format(linker=linker, libraries=libraries))
    script.chmod(0o755)
    return True
