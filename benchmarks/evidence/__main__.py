"""Studies of the paper's claims on Fashion-MNIST: many small trainings on one GPU, paired by seed.

    export PYTHONPATH=benchmarks
    python -m evidence run [--only a,e] [--limit SECONDS] [--at-once N]  trains what the record lacks, in order
    python -m evidence speed [--at-once 1,8]                             images per second of N trainings at once
    python -m evidence plan                                              trainings and GPU minutes of each study
    python -m evidence page                                              docs/evidence.md and its figures

A study is a YAML file in benchmarks/evidence/studies: arms, which are overrides of `dmjd pretrain`, and claims about
pairs of them. An arm that several studies have is trained once. The rate of each arm is the best of three by a training
of half length on nine tenths of the training images, scored on the others; then come the seeds.

Every finished training is a line of the record (benchmarks/results/evidence.jsonl), and later calls skip it: a call
that ends by --limit, or is killed, is continued by the same call with the same record.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from evidence.page import write_page
from evidence.pool import ON_GPU, Pool, card, mps, rates_at_once, write_data
from evidence.studies import FULL, HELD_OUT, Arm, Job, Plan, Rows

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPEED_EPOCHS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "speed", "plan", "page"))
    parser.add_argument("--studies", type=Path, default=HERE / "studies", help="folder of the YAML files")
    parser.add_argument("--only", default="", help="studies in the order to run them, such as a,e")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks/results/evidence.jsonl")
    parser.add_argument("--data", help="folder of Fashion-MNIST's files; default: found or downloaded")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds; later trainings are left to other calls"
    )
    parser.add_argument("--at-once", default=None, help="trainings of each GPU at once; speed: a list such as 1,8,12")
    parser.add_argument("--no-mps", action="store_true", help="do not start CUDA's Multi-Process Service")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--rate", type=float, default=100_000, help="plan: images per second of all trainings")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/evidence.md")
    options = parser.parse_args()
    plan = Plan.read(options.studies, [name for name in options.only.split(",") if name])
    rows = Rows.read(options.record)
    if options.command == "plan":
        print_plan(plan, rows, options.rate)
    elif options.command == "page":
        write_page(plan, rows, options.page, options.page.parent / "images", HELD_OUT)
    else:
        train(options, plan, rows)


def train(options: argparse.Namespace, plan: Plan, rows: Rows) -> None:
    device, _ = card()
    machine = () if device == "CPU" or options.eager else ON_GPU
    at_once = [int(each) for each in (options.at_once or ("2" if device == "CPU" else "8")).split(",")]
    with tempfile.TemporaryDirectory(prefix="evidence-") as name:
        folder = Path(name)
        write_data(plan.source, options.data, folder / "data")
        with mps(folder, device != "CPU" and not options.no_mps) as used:
            if options.command == "run":
                Pool(plan, rows, folder, at_once[0], options.limit, machine, used).run()
                print_plan(plan, rows, options.rate)
                return
            for number in at_once:
                pool = Pool(plan, Rows(folder / f"{number}.jsonl"), folder, number, options.limit, machine, used)
                jobs = list(trial_jobs(plan.studies[0].arms, number * pool.gpus))
                ended = pool.run(lambda jobs=jobs, pool=pool: (job for job in jobs if not pool.rows.has(job)))
                each = [row["images_per_second"] for row in ended]
                total, least = rates_at_once(ended)
                found = {
                    "at_once": number,
                    "mps": used,
                    "eager": options.eager,
                    "images_per_second": total,
                    "at_least": least,
                    "each": each,
                }
                waits = [row["data_wait_percent"] for row in ended]
                start = [row["seconds_before"] for row in ended]
                print(json.dumps({**found, "data_wait_percent": waits, "seconds_to_first_fifth": start}), flush=True)


def trial_jobs(arms: dict[str, Arm], count: int) -> Iterator[Job]:
    """``count`` short trainings of the second arm, one seed each."""
    arm = list(arms.values())[1]
    for seed in range(count):
        yield Job(replace(arm, keys={**arm.keys, "epochs": str(SPEED_EPOCHS)}), FULL, seed, 5e-4)


def print_plan(plan: Plan, rows: Rows, rate: float) -> None:
    """Trainings and minutes that each study lacks, those of earlier studies not counted again."""
    counted: set[str] = set()
    total = 0.0
    for study in plan.studies:
        images = trainings = 0
        for arm in study.arms.values():
            for job in missing_of(plan, rows, arm):
                if job[0] not in counted:
                    counted.add(job[0])
                    trainings, images = trainings + 1, images + job[1]
        total += images / rate / 60
        print(f"{study.name}: {study.title}: {trainings} trainings, {images / rate / 60:.1f} minutes")
    print(f"all: {total:.0f} minutes at {rate:.0f} images/s, start, scores and fine-tuning not counted")


def missing_of(plan: Plan, rows: Rows, arm: Arm) -> Iterator[tuple[str, int]]:
    """A name and the images of each training of ``arm`` that is missing, at an assumed rate before it is chosen."""
    done = len(rows.full(arm, plan.rates))
    for rate in plan.rates:
        job = Job(arm.tuned, "tune", plan.seeds[0], rate)
        if not rows.has(job):
            yield f"{arm.tuned.id} {rate}", plan.images(job)
    for seed in plan.seeds[done:]:
        yield f"{arm.id} seed {seed}", plan.images(Job(arm, FULL, seed, plan.rates[0]))


if __name__ == "__main__":
    main()
