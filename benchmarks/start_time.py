"""Seconds from the start of the process of `dmjd pretrain` to the end of its first training step, by phase.

    python benchmarks/start_time.py experiment=dmjd_convvit_large_hog batch_size=64 engine.compile=model [key=value] ...

Trains three steps on generated photographs in new processes: `cold` with empty compiler caches, then `warm` with what
the first has left (--warm N times, 2 by default). Prints a JSON object per start; --json FILE appends them. The caches
lie in a temporary folder, so that those of the user are neither read nor filled; --caches FOLDER keeps them.

Phases, in order: python (interpreter, command line, configuration), imports, resolve (process group, data set),
build (model, engine), open (lock, checkpoint, log), data (wait for the first batch), first_forward and first_backward
(with compilation and, on CUDA, until the device is done), first_update. Their sum is `seconds`. `second` and `third`:
the steps after it. `graphs` and `misses` count what torch.compile traced and what its caches did not hold; `bypassed`
graphs are never cached. `trace_seconds` of the first step are torch.compile's own trace of the Python code, which no
cache saves, `load_seconds` the load of cached code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHILD = "--child"


def process_age() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Phases:
    """Seconds of consecutive phases since the process began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = 0.0

    def end(self, phase: str) -> None:
        """Add the time since the phase before ended to ``phase``."""
        now = process_age()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._ended
        self._ended = now


def start(overrides: list[str], target: Path) -> None:
    """Run `dmjd pretrain` in this process, and write its phases to ``target``."""
    phases = Phases()
    from dmjd.cli import main
    from dmjd.compose import compose

    compose("pretrain", overrides)
    phases.end("python")
    import torch

    from dmjd.builders.step import Step
    from dmjd.parallel.single import SingleEngine
    from dmjd.train import loop

    phases.end("imports")
    steps: list[float] = []

    def ends(owner: Any, name: str, after: Callable[[], None], before: Callable[[], None] = lambda: None) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before()
            result = inner(*args, **kwargs)
            after()
            return result

        setattr(owner, name, timed)

    def done(phase: str) -> Callable[[], None]:
        def act() -> None:
            if len(steps) == 0:
                if torch.cuda.is_available() and torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                phases.end(phase)

        return act

    def stepped() -> None:
        done("first_update")()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steps.append(process_age())

    ends(loop, "resolved", done("resolve"))
    ends(loop.Trainer, "__init__", done("build"))
    ends(loop.Trainer, "start", done("open"))
    ends(Step, "forward_backward", lambda: None, before=done("data"))
    ends(SingleEngine, "backward", done("first_backward"), before=done("first_forward"))
    ends(Step, "update", stepped)
    code = main(["pretrain", *overrides])
    assert code == 0, f"dmjd pretrain ended with {code}"
    from torch._dynamo import utils

    counters, metrics = utils.counters, utils.compilation_time_metrics
    row = {
        "seconds": steps[0],
        "phases": phases.seconds,
        "second": steps[1] - steps[0],
        "third": steps[2] - steps[1],
        "graphs": counters["stats"]["unique_graphs"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"] + counters["inductor"]["fxgraph_cache_miss"],
        "bypassed": counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"],
        "trace_seconds": sum(metrics.get("bytecode_tracing", [])),
        "load_seconds": sum(metrics.get("AOTAutogradCache.inductor_load", [])),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    target.write_text(json.dumps(row))


def measure(overrides: list[str], caches: Path, scratch: Path, name: str) -> dict[str, Any]:
    """One start in a process of its own."""
    target = scratch / f"{name}.json"
    cached = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
    environment = os.environ | {variable: str(caches / folder) for variable, folder in cached.items()}
    command = [sys.executable, __file__, CHILD, str(target), *overrides, f"run={scratch / name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not target.is_file():
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    row: dict[str, Any] = json.loads(target.read_text())
    return {"start": name, "overrides": overrides, **row, "date": date.today().isoformat()}


def main() -> None:
    if sys.argv[1:2] == [CHILD]:
        start(sys.argv[3:], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=2, help="starts with the caches of the first; default 2")
    parser.add_argument("--caches", type=Path, help="folder of the caches; kept, so that a later call is warm at once")
    parser.add_argument("--json", type=Path, help="file to append the rows to")
    options, overrides = parser.parse_known_args()
    from dmjd.compose import compose

    config = compose("pretrain", overrides)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        if config.data.root is None:
            from photographs import photograph_of

            images = scratch / "images/photograph"
            images.mkdir(parents=True)
            files = [photograph_of(number) for number in range(min(64, config.batch_size))]
            for number in range(3 * config.batch_size):
                (images / f"{number:06}.jpg").write_bytes(files[number % len(files)])
            overrides = [*overrides, f"data.root={images.parent}"]
        overrides = [*overrides, "epochs=1", "optim.warmup_epochs=0", "checkpoint_async=false"]
        caches = options.caches or scratch / "caches"
        caches.mkdir(parents=True, exist_ok=True)
        rows = []
        for number in range(1 + options.warm):
            name = f"warm-{number}" if number or any(caches.iterdir()) else "cold"
            rows.append(measure(overrides, caches, scratch, name))
            print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        before = json.loads(options.json.read_text()) if options.json.is_file() else []
        options.json.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
