"""Compile kernels without a GPU and count the spills in their machine code; a script.

    python tests/cuda/compile_kernels.py 90 programs.json

Reads a list of [key, program text, dtype, ragged axes] and prints one JSON object: key ->
{"config", "spills", "tensor_ops"} or {"error"}. QuACK compiles for the architecture in its
environment and asks the driver only for launch metadata, which is answered here instead. On
Blackwell a kernel whose packed form crashes is tried without packing, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def pin_architecture() -> None:
    import quack.gemm_runtime.host as host
    from quack.cache.async_compile import _install_gpu_blind_device_attrs, _pin_dsl_arch

    _pin_dsl_arch(os.environ["CUTE_DSL_ARCH"])
    _install_gpu_blind_device_attrs()
    host.get_max_active_clusters = lambda clusters: 132 // clusters


def compiled(text: str, dtype: str, ragged: str, vectorize: bool) -> dict[str, object]:
    """Compile one program at aligned or ragged sizes; what its object file says."""
    import torch

    from codetta.backends.cuda import operations  # noqa: F401  (imports QuACK)
    from codetta.backends.cuda.assembly import describe
    from codetta.backends.cuda.configs import Configuration
    from codetta.language.program import Program

    program = Program.parse(text)
    m, n = (1000 if "m" in ragged else 1024), (1528 if "n" in ragged else 1536)
    while n % program.granule:
        n += 8
    before = objects()
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    # The shipped configurations are Hopper's; on Blackwell one that two CTAs share.
    config = None if os.environ["QUACK_ARCH"] == "90" else Configuration(256, 128, False)
    given = arrays(program, m, n, 512, types[dtype])
    call = describe(program, *given, config=config, vectorize=vectorize)
    (made,) = objects() - before
    code = disassembly(made)
    return {
        "config": str(call.config),
        "spills": len(re.findall(r"\bSTL\b", code)),
        "tensor_ops": len(re.findall(r"\b(?:HGMMA|UTCHMMA|UTCQMMA)\b", code)),
    }


def arrays(program, m: int, n: int, k: int, dtype):
    """Arrays without memory: a, b and the flat operands."""
    import torch

    from codetta.language.types import Kind

    def empty(*shape: int, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    operands = []
    for o in program.operands:
        cols = int(n * o.width)
        if o.kind is Kind.TILE:
            operands.append(empty(m, cols))
        elif o.kind is Kind.INDEX:
            operands.append(empty(m, 1, dtype=torch.int64))
        elif o.kind is Kind.ROTARY:
            dim = next(x.attr("rotary_dim") for x in program.nodes if x.op == "rotate")
            operands += [empty(64, dim, dtype=torch.float32), empty(m, dtype=torch.int64)]
        else:
            shape = {Kind.ROW: (1, cols), Kind.COL: (m, 1), Kind.SCALAR: (1, 1)}[o.kind]
            operands.append(empty(*shape, dtype=torch.float32))
    return empty(m, k), empty(k, n), operands


# ---------------------------------------------------------------------------------- object files
def objects() -> set[Path]:
    return set(Path(os.environ["QUACK_CACHE_DIR"]).rglob("*.o"))


def disassembly(file: Path) -> str:
    """Machine code of the GPU programs inside an object file."""
    code = []
    for image in gpu_images(file.read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(image)
            cubin.flush()
            done = subprocess.run(
                [disassembler(), "-c", cubin.name], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            code.append(done.stdout)
    assert code, f"no GPU program in {file}"
    return "\n".join(code)


def gpu_images(blob: bytes) -> Iterator[bytes]:
    """ELF images for NVIDIA GPUs (machine 190)."""
    start = blob.find(b"\x7fELF")
    while start >= 0:
        (machine,) = struct.unpack_from("<H", blob, start + 18)
        if machine == 190:
            programs, sections = struct.unpack_from("<QQ", blob, start + 32)
            size_p, count_p, size_s, count_s = struct.unpack_from("<HHHH", blob, start + 54)
            yield blob[
                start : start + max(programs + size_p * count_p, sections + size_s * count_s)
            ]
        start = blob.find(b"\x7fELF", start + 4)


def disassembler() -> str:
    """nvdisasm, which comes with the wheels of Triton and of CUDA."""
    for package in ("nvidia-cuda-nvdisasm", "triton"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "nvdisasm":
                return str(file.locate())
    raise FileNotFoundError("nvdisasm: install nvidia-cuda-nvdisasm or triton")


def alone(entry: list[str], vectorize: bool) -> dict[str, object]:
    """Compile in a fresh process, since the compiler may die."""
    command = [sys.executable, __file__, os.environ["QUACK_ARCH"], "-", str(int(vectorize))]
    done = subprocess.run(command, input=json.dumps(entry), capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip()[-300:] or "the compiler died"}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[2] == "-":
        pin_architecture()
        _, text, dtype, ragged = json.loads(sys.stdin.read())
        print(json.dumps(compiled(text, dtype, ragged, bool(int(sys.argv[3])))))
        return
    found: dict[str, object] = {}
    entries = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "90":
        pin_architecture()
    for entry in entries:
        key, text, dtype, ragged = entry
        if sys.argv[1] == "90":
            try:
                found[key] = compiled(text, dtype, ragged, True)
            except Exception as error:
                found[key] = {"error": f"{type(error).__name__}: {error}"}
        else:
            made = alone(entry, True)
            found[key] = alone(entry, False) | {"packed": False} if "error" in made else made
        print(key, found[key], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
