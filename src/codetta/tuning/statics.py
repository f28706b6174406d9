"""What a compiled kernel says about itself: spilled registers, counted in its machine code."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path

_NVIDIA = 190  # ELF machine


def spills(file: Path) -> int:
    """Stores to local memory (``STL``) in the GPU programs of an object file."""
    return len(re.findall(r"\bSTL\b", disassembly(file)))


def disassembly(file: Path) -> str:
    """Machine code of the GPU programs inside an object file; ValueError if there is none."""
    code = []
    for image in gpu_images(file.read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(image)
            cubin.flush()
            command = [disassembler(), "-c", cubin.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            code.append(done.stdout)
    if not code:
        raise ValueError(f"no GPU program in {file}")
    return "\n".join(code)


def gpu_images(blob: bytes) -> Iterator[bytes]:
    """ELF images for NVIDIA GPUs."""
    start = blob.find(b"\x7fELF")
    while start >= 0:
        (machine,) = struct.unpack_from("<H", blob, start + 18)
        if machine == _NVIDIA:
            programs, sections = struct.unpack_from("<QQ", blob, start + 32)
            size_p, count_p, size_s, count_s = struct.unpack_from("<HHHH", blob, start + 54)
            end = max(programs + size_p * count_p, sections + size_s * count_s)
            yield blob[start : start + end]
        start = blob.find(b"\x7fELF", start + 4)


@lru_cache(maxsize=1)
def disassembler() -> str:
    """Path of nvdisasm, which comes with the wheels of Triton and of CUDA."""
    for package in ("nvidia-cuda-nvdisasm", "triton"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "nvdisasm":
                return str(file.locate())
    raise FileNotFoundError("nvdisasm: install nvidia-cuda-nvdisasm or triton")
