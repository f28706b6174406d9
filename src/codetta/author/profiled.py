"""The process that ``ncu`` watches: one kernel, launched between the marks that it looks for.

python -m codetta.author.profiled < kernel.json
"""

from __future__ import annotations

import json
import sys

RUNS = 4  # before the launch that counts


def main() -> None:
    import torch

    from codetta.backends.cuda.launch import CUDA
    from codetta.language.program import Program
    from codetta.tuning.space import Problem, arrays

    given = json.load(sys.stdin)
    program = Program.parse(given["program"])
    sizes = given["m"], given["n"], given["k"]
    problem = Problem(program, *sizes, "nt", given["operand"], tuple(given["dtypes"]))
    a, b, operands = arrays(problem, "cuda")

    def run() -> None:
        if given["plain"]:
            torch.matmul(a, b)
        else:
            CUDA.gemm(program, a, b, operands, None, True)

    for _ in range(RUNS):
        run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
