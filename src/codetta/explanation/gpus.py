"""Roofline figures of GPUs.

Dense figures without sparsity, from NVIDIA's data sheets: "NVIDIA H100 Tensor Core GPU" (SXM5 and
PCIe), "NVIDIA H200 Tensor Core GPU" (SXM) and "NVIDIA HGX B200". Sheets state the tensor core rates
with 2:4 sparsity; half of them is the dense rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from codetta.errors import UnknownGpu


@dataclass(frozen=True)
class Gpu:
    """Peak rates.

    Attributes:
        name: as on the data sheet.
        bandwidth: of device memory, in bytes per second.
        matrix: dense tensor core rate by bytes of an operand's element, in operations per second:
            8 is fp64, 4 is TF32, 2 is bf16 and fp16.
    """

    name: str
    bandwidth: float
    matrix: dict[int, float]

    def seconds(self, bytes_moved: float, flops: float, itemsize: int) -> float:
        """The roofline: the longer of moving the bytes and doing the arithmetic."""
        return max(bytes_moved / self.bandwidth, flops / self.matrix[max(itemsize, 2)])


GPUS = {
    "h100": Gpu("H100 SXM", 3.35e12, {8: 67e12, 4: 494.7e12, 2: 989.4e12}),
    "h100-pcie": Gpu("H100 PCIe", 2.0e12, {8: 51e12, 4: 378e12, 2: 756e12}),
    "h200": Gpu("H200 SXM", 4.8e12, {8: 67e12, 4: 494.7e12, 2: 989.4e12}),
    "b200": Gpu("B200 SXM", 8.0e12, {8: 37e12, 4: 1.1e15, 2: 2.25e15}),
}


def gpu(name: str) -> Gpu:
    """The GPU of that name. Raises UnknownGpu."""
    if name not in GPUS:
        raise UnknownGpu(given=name, allowed=", ".join(GPUS))
    return GPUS[name]
