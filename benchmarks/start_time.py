"""Seconds from the start of the process of `dmjd pretrain` to the end of its first training step, and from SIGTERM to
the end of the process, by phase.

    python benchmarks/start_time.py experiment=dmjd_convvit_large_hog batch_size=64 engine.compile=model [key=value] ...

Trains three steps on generated photographs in new processes: `cold` with empty compiler caches, then `warm` with what
the first has left (--warm N times, 2 by default). Prints a JSON object per start; --json FILE appends them. The caches
lie in a temporary folder, so that those of the user are neither read nor filled; --caches FOLDER keeps them. Python's
bytecode is one of them, since a warm start has the bytecode that pip compiles.

Phases, in order: python (interpreter, command line, configuration), imports, resolve (process group, data set),
build (model, engine), open (lock, checkpoint, log), data (wait for the first batch), first_forward and first_backward
(with compilation and, on CUDA, until the device is done), first_update. Their sum is `seconds`. `second` and `third`:
the steps after it. `graphs` and `misses` count what torch.compile traced and what its caches did not hold; `bypassed`
graphs are never cached. `compiler` has torch.compile's own times: bytecode_tracing is the trace of the Python code,
which no cache saves.

--stop ends each start by SIGTERM after its third step, in which the run saves, and `stop` has the phases: step (until
the step that ends the run is done), save (until the state is copied), write (until all files are written), commit
(flushed, hashed, renamed), close (until the run has ended), exit (of the process). A last start, `resumed`, continues
from that checkpoint. `bytes` is the checkpoint's size, `disk` the GB/s at which 1 GiB is written and flushed there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHILD = "--child"
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "PYTHONPYCACHEPREFIX": "python",
}
"""Variable -> folder of the caches."""


def now() -> float:
    """Seconds on a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_start() -> float:
    """When this process began, on that clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


class Phases:
    """Seconds of consecutive phases since ``begin``."""

    def __init__(self, begin: float) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = begin

    def end(self, phase: str) -> None:
        """Add the time since the phase before ended to ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now() - self._ended
        self._ended = now()


def around(owner: Any, name: str, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
    """Call ``before`` and ``after`` around the function ``name`` of ``owner``."""
    inner = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = inner(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, timed)


def start(overrides: list[str], target: Path, stop: bool) -> None:
    """Run `dmjd pretrain` in this process, and write its phases to ``target``."""
    began = process_start()
    phases = Phases(began)
    from dmjd.cli import main
    from dmjd.compose import compose
    from dmjd.parallel.environment import prepare_imports

    compose("pretrain", overrides)
    phases.end("python")
    prepare_imports()  # as the command does
    import torch

    from dmjd.builders.step import Step
    from dmjd.parallel.single import SingleEngine
    from dmjd.train import loop

    phases.end("imports")
    steps: list[float] = []
    stopping: list[Phases] = []

    def ends(phase: str) -> Callable[[], None]:
        def act() -> None:
            if len(steps) == 0:
                if torch.cuda.is_available() and torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                phases.end(phase)

        return act

    def stepped() -> None:
        ends("first_update")()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steps.append(now())
        if stop and len(steps) == 3:
            stopping.append(Phases(now()))
            os.kill(os.getpid(), signal.SIGTERM)

    around(loop, "resolved", None, ends("resolve"))
    around(loop.Trainer, "__init__", None, ends("build"))
    around(loop.Trainer, "start", None, ends("open"))
    around(Step, "forward_backward", ends("data"), None)
    around(SingleEngine, "backward", ends("first_forward"), ends("first_backward"))
    around(Step, "update", None, stepped)
    if stop:
        _time_stop(stopping)
    code = main(["pretrain", *overrides])
    assert code == 0, f"dmjd pretrain ended with {code}"
    if stop:
        stopping[0].end("close")
    from torch._dynamo import utils

    counters, metrics = utils.counters, utils.compilation_time_metrics
    row = {
        "seconds": steps[0] - began,
        "phases": phases.seconds,
        "second": steps[1] - steps[0],
        "third": steps[2] - steps[1],
        "graphs": counters["stats"]["unique_graphs"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"] + counters["inductor"]["fxgraph_cache_miss"],
        "bypassed": counters["aot_autograd"]["autograd_cache_bypass"] + counters["inductor"]["fxgraph_cache_bypass"],
        "compiler": {name: round(sum(seconds), 3) for name, seconds in metrics.items() if sum(seconds) >= 0.1},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "stop": stopping[0].seconds if stop else None,
        "ended": now(),
    }
    target.write_text(json.dumps(row))


def _time_stop(stopping: list[Phases]) -> None:
    """Make the parts of the save after the signal phases of ``stopping[0]``, which is there from the signal on."""
    from dmjd.runs import checkpoint
    from dmjd.runs.saver import Saver
    from dmjd.train import loop

    def ends(phase: str) -> Callable[[], None]:
        return lambda: stopping[0].end(phase)

    commit = checkpoint.commit

    def timed(draft: Path, write: Callable[[], list[Path]], *arguments: Any) -> Path:
        def timed_write() -> list[Path]:
            files = write()
            stopping[0].end("write")
            return files

        return commit(draft, timed_write, *arguments)

    around(loop.Trainer, "save_checkpoint", ends("step"), None)
    around(Saver, "save", None, ends("save"))
    checkpoint.commit = timed
    around(checkpoint, "commit", None, ends("commit"))


@dataclass(frozen=True)
class Bench:
    """Starts of `dmjd pretrain` with ``overrides``, each in a process of its own; files of runs lie in ``scratch``."""

    overrides: list[str]
    caches: Path
    scratch: Path
    stop: bool

    def measure(self, name: str, run: Path) -> dict[str, Any]:
        """The row of one start."""
        target = self.scratch / f"{name}.json"
        environment = os.environ | {variable: str(self.caches / folder) for variable, folder in CACHES.items()}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, __file__, CHILD, str(target), str(self.stop), *self.overrides, f"run={run}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        ended = now()
        if not target.is_file():
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        row: dict[str, Any] = json.loads(target.read_text())
        exited = ended - row.pop("ended")
        if self.stop:
            row["stop"]["exit"] = exited
            (newest,) = (run / "checkpoints").iterdir()
            row["stop"] |= {"seconds": sum(row["stop"].values())}
            row |= {"bytes": sum(file.stat().st_size for file in newest.iterdir()), "disk": disk_speed(run)}
        return {"start": name, "overrides": self.overrides, **row, "date": date.today().isoformat()}


def disk_speed(folder: Path) -> float:
    """GB/s at which 1 GiB is written and flushed in ``folder``."""
    part, begin = os.urandom(1 << 24), now()
    with (folder / "speed").open("wb") as file:
        for _ in range(64):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    seconds = now() - begin
    (folder / "speed").unlink()
    return 64 * len(part) / 1e9 / seconds


def main() -> None:
    if sys.argv[1:2] == [CHILD]:
        start(sys.argv[4:], Path(sys.argv[2]), sys.argv[3] == str(True))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=2, help="starts with the caches of the first; default 2")
    parser.add_argument("--stop", action="store_true", help="end each start by SIGTERM, and continue the last run")
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
        ending = ["epochs=10", "keep_checkpoints=1"] if options.stop else ["epochs=1", "checkpoint_async=false"]
        caches = options.caches or scratch / "caches"
        caches.mkdir(parents=True, exist_ok=True)
        bench = Bench([*overrides, "optim.warmup_epochs=0", *ending], caches, scratch, options.stop)
        names = ["warm-0" if any(caches.iterdir()) else "cold", *(f"warm-{n + 1}" for n in range(options.warm))]
        rows = []
        for name in names + ["resumed"] * options.stop:
            if name != "resumed":
                shutil.rmtree(scratch / "run", ignore_errors=True)
            rows.append(bench.measure(name, scratch / "run"))
            print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        before = json.loads(options.json.read_text()) if options.json.is_file() else []
        options.json.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
