"""GPUs: peak throughput and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One kind of GPU.

    pattern: regular expression for the device name of CUDA.
    tflops: peak of dense matrix products in bfloat16 with float32 accumulation, from the data sheet.
    memory_gib: memory available to a process in GiB, slightly below the nominal size.
    """

    pattern: str
    tflops: float
    memory_gib: float


ACCELERATORS = {
    "b200": Accelerator(r"\bB200\b", 2250, 178),
    "gh200": Accelerator(r"\bGH200\b", 989, 94),
    "h200": Accelerator(r"\bH200\b", 989, 139),
    "h100-pcie": Accelerator(r"\bH100 PCIe\b", 756, 79),
    "h100-nvl": Accelerator(r"\bH100 NVL\b", 835, 93),
    "h100": Accelerator(r"\bH[18]00\b", 989, 79),
    "a100-40": Accelerator(r"\bA100\b.*\b40GB", 312, 39),
    "a100-80": Accelerator(r"\bA[18]00\b", 312, 79),
    "a10g": Accelerator(r"\bA10G\b", 70, 22),
    "a10": Accelerator(r"\bA10\b", 125, 22),
    "a30": Accelerator(r"\bA30\b", 165, 23.5),
    "a40": Accelerator(r"\bA40\b", 150, 44),
    "l40s": Accelerator(r"\bL40S\b", 362, 44),
    "l40": Accelerator(r"\bL40\b", 181, 44),
    "l4": Accelerator(r"\bL4\b", 121, 22),
    # No bfloat16 in hardware: the peak is that of float16.
    "v100-16": Accelerator(r"\bV100\b.*\b16GB", 125, 15.7),
    "v100-32": Accelerator(r"\bV100\b", 125, 31.7),
}
"""By the name for ``dmjd plan gpu=...``. The first pattern that matches a device counts."""


def accelerator_of(device_name: str) -> Accelerator | None:
    """The entry of a ``torch.cuda.get_device_name``; None if there is none."""
    return next((gpu for gpu in ACCELERATORS.values() if re.search(gpu.pattern, device_name)), None)
