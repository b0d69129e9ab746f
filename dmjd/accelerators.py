"""GPUs: peak throughput and memory.

Peaks are those of NVIDIA's data sheets of each product, and of the tables in its architecture papers: "NVIDIA Ampere
GA102 GPU Architecture" (RTX 30, A6000), "NVIDIA Ada GPU Architecture" (RTX 40) and "NVIDIA RTX Blackwell GPU
Architecture" (RTX 50). For cards that these leave out (RTX 3060, 4060, 4070) the peak is twice that of float32 on the
shader cores, as it is for every GeForce RTX card that they list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One kind of GPU.

    pattern: regular expression for the device name of CUDA.
    tflops: peak of dense matrix products in bfloat16 with float32 accumulation, from the data sheet.
    memory_gib: memory available to a process in GiB, slightly below the nominal size.
    bf16: whether its tensor cores compute in bfloat16; if not, the peak is that of float16.
    hopper: whether it runs the kernels for Hopper.
    """

    pattern: str
    tflops: float
    memory_gib: float
    bf16: bool = True
    hopper: bool = False


ACCELERATORS = {
    "b200": Accelerator(r"\bB200\b", 2250, 178),
    "gh200": Accelerator(r"\bGH200\b", 989, 94, hopper=True),
    "h200": Accelerator(r"\bH200\b", 989, 139, hopper=True),
    "h100-pcie": Accelerator(r"\bH100 PCIe\b", 756, 79, hopper=True),
    "h100-nvl": Accelerator(r"\bH100 NVL\b", 835, 93, hopper=True),
    "h100": Accelerator(r"\bH[18]00\b", 989, 79, hopper=True),
    "a100-40": Accelerator(r"\bA100\b.*\b40GB", 312, 39),
    "a100-80": Accelerator(r"\bA[18]00\b", 312, 79),
    "a10g": Accelerator(r"\bA10G\b", 70, 22),
    "a10": Accelerator(r"\bA10\b", 125, 22),
    "a30": Accelerator(r"\bA30\b", 165, 23.5),
    "a40": Accelerator(r"\bA40\b", 150, 44),
    "l40s": Accelerator(r"\bL40S\b", 362, 44),
    "l40": Accelerator(r"\bL40\b", 181, 44),
    "l4": Accelerator(r"\bL4\b", 121, 22),
    "v100-16": Accelerator(r"\bV100\b.*\b16GB", 125, 15.7, bf16=False),
    "v100-32": Accelerator(r"\bV100\b", 125, 31.7, bf16=False),
    "t4": Accelerator(r"\bT4\b", 65, 14.6, bf16=False),
    "rtx5090": Accelerator(r"\bRTX 5090(?! \w)", 209.5, 31.3),
    "rtx5080": Accelerator(r"\bRTX 5080(?! \w)", 112.6, 15.4),
    "rtx4090": Accelerator(r"\bRTX 4090(?! \w)", 165.2, 23.5),
    "rtx4080": Accelerator(r"\bRTX 4080(?! \w)", 97.5, 15.6),
    "rtx4070": Accelerator(r"\bRTX 4070(?! \w)", 58.3, 11.6),
    "rtx4060": Accelerator(r"\bRTX 4060(?! \w)", 30.2, 7.6),
    "rtx3090": Accelerator(r"\bRTX 3090(?! \w)", 71, 23.5),
    "rtx3080": Accelerator(r"\bRTX 3080(?! \w)", 59.5, 9.6),
    "rtx3070": Accelerator(r"\bRTX 3070(?! \w)", 40.6, 7.6),
    "rtx3060": Accelerator(r"\bRTX 3060(?! \w)", 25.5, 11.6),
    "a6000": Accelerator(r"\bRTX A6000\b", 154.8, 47),
    "a5000": Accelerator(r"\bRTX A5000\b", 111.1, 23.5),
}
"""By the name for ``dmjd plan gpu=...``. The first pattern that matches a device counts."""


def accelerator_of(device_name: str) -> Accelerator | None:
    """The entry of a ``torch.cuda.get_device_name``; None if there is none."""
    return next((gpu for gpu in ACCELERATORS.values() if re.search(gpu.pattern, device_name)), None)
