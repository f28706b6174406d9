"""Compile every kernel (or what contains the second argument), one line per kernel; a script.

python tests/cuda/compiler.py 90 swiglu
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from kernel_jobs import library

from codetta.tuning.compile_only import Compiler


def main() -> None:
    sm, wanted = sys.argv[1], " ".join(sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(sm, Path(folder))
        for name, job in library(sm).items():
            if wanted in name:
                start = time.perf_counter()
                found = compiler.compile(job)
                print(f"{name}: {found} {time.perf_counter() - start:.1f} s", flush=True)
        compiler.close()


if __name__ == "__main__":
    main()
