"""Goodput of a run in a simulated year of preemptions: the share of a machine's time that becomes training kept.

    python benchmarks/goodput.py --json benchmarks/results/start_h200.json
    python benchmarks/goodput.py --start 20 --stop 6 --stall 0.1 --commit 5

Machines are taken away after times drawn from an exponential distribution of mean M, and the next one is there at once:
waiting for a machine is not a cost of the run. Each launch trains after `start` seconds. Either SIGTERM comes first,
and the run saves and ends within `stop` seconds, which count as the machine's time; or the run is killed, and training
since the last committed checkpoint is lost. A checkpoint every `interval` seconds of training stops it for `stall`
seconds and is committed `commit` seconds after it began. --json takes the seconds from the last row of
benchmarks/start_time.py --stop, a launch that continued.

Beside each simulated number is that of the formula: by SIGTERM M exp(-start / M) / (M + stop), the share of time
between saves aside; by SIGKILL Daly's complete model (Future Generation Computer Systems 22, 2006, eq. 20),
interval / (M exp(R / M) (exp((interval + stall) / M) - 1)), where the restart R includes the time of a commit. Young's
interval is sqrt(2 stall M), and at least `commit`, since one save ends before the next begins.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

YEAR = 365 * 24 * 3600.0
MEANS = {"4 h": 4 * 3600.0, "1 h": 3600.0, "20 min": 1200.0}
DEFAULT = 15 * 60.0
"""Seconds between checkpoints, of checkpoint_minutes."""


@dataclass(frozen=True)
class Seconds:
    """See above."""

    start: float
    stop: float
    stall: float
    commit: float

    def simulate(self, mean: float, interval: float, warned: bool) -> float:
        """Goodput of a year."""
        draw, used, kept = np.random.default_rng(0), 0.0, 0.0
        while used < YEAR:
            taken = draw.exponential(mean)
            used += taken + self.stop * warned
            clock, done = self.start, 0.0
            while clock < taken:
                if clock + interval >= taken:  # no further save begins
                    kept += done if not warned else done + taken - clock
                    break
                clock += interval
                if warned or clock + self.commit < taken:
                    done += interval
                clock += self.stall
            else:
                kept += done  # taken in a stall or in the start
        return kept / used

    def formula(self, mean: float, interval: float, warned: bool) -> float:
        if warned:
            busy = interval / (interval + self.stall)
            return busy * mean * math.exp(-self.start / mean) / (mean + self.stop)
        restart = self.start + self.commit - self.stall
        return interval / (mean * math.exp(restart / mean) * math.expm1((interval + self.stall) / mean))

    def young(self, mean: float) -> float:
        return max(math.sqrt(2 * self.stall * mean), self.commit)


def measured(path: Path) -> Seconds:
    row = json.loads(path.read_text())[-1]
    stop = row["stop"]
    return Seconds(row["seconds"], stop["seconds"], stop["save"], stop["save"] + stop["write"] + stop["commit"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("start", "stop", "stall", "commit"):
        parser.add_argument(f"--{name}", type=float, metavar="SECONDS")
    parser.add_argument("--json", type=Path, help="rows of start_time.py --stop, in place of the four")
    options = parser.parse_args()
    if options.json is not None:
        seconds = measured(options.json)
    else:
        seconds = Seconds(options.start, options.stop, options.stall, options.commit)
    print(
        f"start {seconds.start:.1f} s, stop {seconds.stop:.1f}, stall {seconds.stall:.2f}, commit {seconds.commit:.1f}"
    )
    print("\n| mean time to a preemption | SIGTERM | SIGKILL, a checkpoint every 15 min | SIGKILL, Young's interval |")
    print("|---|---|---|---|")
    for name, mean in MEANS.items():
        cases = (DEFAULT, True), (DEFAULT, False), (seconds.young(mean), False)
        cells = [
            f"{seconds.simulate(mean, *case):.2%} ({seconds.formula(mean, *case):.2%})".replace("%", " %")
            for case in cases
        ]
        print(f"| {name} | {' | '.join(cells)}, {cases[2][0]:.0f} s |")


if __name__ == "__main__":
    main()
