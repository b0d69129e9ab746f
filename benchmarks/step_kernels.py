"""The GPU time of a training step, kernel by kernel, from torch's profiler; batches are on the device.

    python benchmarks/step_kernels.py experiment=mae_vit_base batch_size=256 engine.compile=model [--top 40] ...

Takes the arguments of `dmjd pretrain`. Prints milliseconds a step of each kind of kernel, found by its name, then the
kernels that take longest.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import NamedTuple

import torch
from inputs import DIFFERENT, synthetic
from torch.profiler import ProfilerActivity, profile

from dmjd.builders.step import build_step
from dmjd.compose import compose
from dmjd.config import PretrainConfig

WARMUP, STEPS = 5, 4

# The first that a kernel's name matches.
KINDS = {
    "matrix products": r"^(nvjet|sm\d+_xmma_gemm|triton_tem)|^(?!.*cudnn).*(cutlass|gemm|splitK)",
    "LayerNorm with residuals (torch.compile)": r"^triton.*layer_norm",
    "GELU (torch.compile)": r"^triton.*(gelu|erf)",
    "other reductions (torch.compile)": r"^triton_(red|per)",
    "copies and other pointwise (torch.compile)": r"^triton",
    "products with GELU": r"gelu_hidden",
    "attention": r"attention|flash|fmha|sdpa|softmax",
    "convolutions": r"cudnn",
    "masked convolution": r"depthwise",
    "HOG": r"\bhog",
    "gathers, scatters, masks": r"copy_rows|scatter_|gather_|add_parts|masks|philox",
    "optimizer": r"multi_tensor|adam|foreach",
    "eager kernels of torch": r"at::native",
    "memory copies and sets": r"[Mm]em(cpy|set)",
}


class StepKernels(NamedTuple):
    """step_ms: of a profiled step; times: microseconds of every launch of the steps, by the kernel's name."""

    step_ms: float
    times: dict[str, list[float]]

    @property
    def busy_ms(self) -> float:
        """Milliseconds of all kernels of a step, those that run side by side counted each."""
        return sum(map(sum, self.times.values())) / STEPS / 1000


def profiled(config: PretrainConfig) -> StepKernels:
    """Profile :data:`STEPS` steps."""
    step = build_step(config)
    device = step.engine.device
    pool = [synthetic(config, config.batch_size, config.batch_size * index).to(device) for index in range(DIFFERENT)]

    def train(index: int) -> None:
        step.forward_backward(pool[index % DIFFERENT], 0)
        step.update(1e-4)

    for index in range(WARMUP):
        train(index)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start.record()
        for index in range(STEPS):
            train(index)
        end.record()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            kernels[event.name].append(event.time_range.elapsed_us())
    return StepKernels(start.elapsed_time(end) / STEPS, kernels)


def main() -> None:
    overrides, top = sys.argv[1:], 40
    if "--top" in overrides:
        at = overrides.index("--top")
        top = int(overrides[at + 1])
        del overrides[at : at + 2]
    found = profiled(compose("pretrain", overrides))
    kernels, kinds = found.times, defaultdict[str, float](float)
    for name, times in kernels.items():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")
        kinds[kind] += sum(times)
    print(f"step {found.step_ms:.2f} ms, in kernels {found.busy_ms:.2f} ms")
    for kind, total in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{total / STEPS / 1000:8.2f} ms  {kind}")
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:top]:
        print(f"{sum(times) / STEPS / 1000:8.3f} ms {len(times) / STEPS:6.1f} calls  {name[:150]}")


if __name__ == "__main__":
    main()
