"""Peak memory of training steps on one GPU, to compare with the estimates of `dmjd plan`.

    python benchmarks/plan_memory.py [benchmarks/results/plan_memory_h200.json]

Two to three minutes. Results are written after every case; tests/cluster/test_plan.py compares the plan with them.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from inputs import synthetic

from dmjd.builders.step import build_step
from dmjd.compose import compose

MAE_B = ("experiment=mae_vit_base",)
MAE_L = ("experiment=mae_vit_base", "backbone=vit_large")
CONVIT_B = ("experiment=dmjd_convvit_base_hog",)
MODES = ("none", "mlp", "selective", "full")

# (arguments, images of a step, mode, compile); each compiled case compiles anew, so there are few.
CASES = [
    *((overrides, images, mode, False) for overrides in (MAE_B, CONVIT_B) for images in (64, 128) for mode in MODES),
    *((MAE_L, images, mode, False) for images in (64, 128) for mode in ("none", "selective", "full")),
    (MAE_B, 128, "none", True),
    (MAE_B, 128, "full", True),
    (CONVIT_B, 128, "mlp", True),
]

STEPS = 4
"""The first makes optimizer state and, compiled, the kernels; the peak is that of the others."""


def measure(overrides: tuple[str, ...], images: int, mode: str, compiled: bool) -> dict[str, Any]:
    options = (f"engine.activation_checkpointing={mode}", f"engine.compile={'block' if compiled else 'none'}")
    config = compose("pretrain", [*overrides, f"batch_size={images}", *options])
    torch._dynamo.reset()
    step = build_step(config)
    batch = synthetic(config, images).to(step.engine.device)
    for number in range(STEPS):
        if number == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step.forward_backward(batch, number)
        step.update(1e-4)
    torch.cuda.synchronize()
    return {
        "words": list(overrides),
        "images": images,
        "mode": mode,
        "compile": compiled,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/plan_memory_h200.json")
    record: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "rows": [],
    }
    for case in CASES:
        row = measure(*case)
        gc.collect()
        torch.cuda.empty_cache()
        record["rows"].append(row)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{row['peak_bytes'] / 2**30:7.2f} GiB  {' '.join(case[0])} {case[1:]}", flush=True)


if __name__ == "__main__":
    main()
