"""GPU machine code inside the object files of compiled kernels."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

#: ELF's number for NVIDIA GPUs.
_CUDA = 190


def disassembly(file: Path) -> str:
    """Machine code of the GPU programs inside an object file, as text."""
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
    """ELF images for NVIDIA GPUs."""
    start = blob.find(b"\x7fELF")
    while start >= 0:
        (machine,) = struct.unpack_from("<H", blob, start + 18)
        if machine == _CUDA:
            programs, sections = struct.unpack_from("<QQ", blob, start + 32)
            size_p, count_p, size_s, count_s = struct.unpack_from("<HHHH", blob, start + 54)
            length = max(programs + size_p * count_p, sections + size_s * count_s)
            yield blob[start : start + length]
        start = blob.find(b"\x7fELF", start + 4)


def disassembler() -> str:
    """nvdisasm, which comes with the wheels of the CuTe DSL and of Triton."""
    for package in ("nvidia-cuda-nvdisasm", "triton"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "nvdisasm":
                return str(file.locate())
    raise FileNotFoundError("nvdisasm: install nvidia-cuda-nvdisasm or triton")
