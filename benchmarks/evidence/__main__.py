"""Studies of the paper's claims: many small trainings on one GPU, paired by seed.

    export PYTHONPATH=benchmarks
    python -m evidence run [--only a,e] [--limit SECONDS] [--at-once N]  trains what the record lacks, in order
    python -m evidence speed [--at-once 1,8] [--arm NAME]                images per second of N trainings at once
    python -m evidence steps [--only a]                                  time that a step takes of the GPU
    python -m evidence plan                                              trainings and GPU minutes of each study
    python -m evidence page                                              docs/evidence.md and its figures
    python -m evidence photographs --elpv FOLDER                         images of study j, from pip's elpv-dataset

A study is a YAML file in benchmarks/evidence/studies: arms, which are overrides of `dmjd pretrain`, and claims about
pairs of them. An arm that several studies have is trained once. The rate of each arm is the best of three by a training
of half length on a part of the training images, scored on the others; then come the seeds.

Study j needs photographs of solar cells: pip install --no-deps elpv-dataset (CC BY-NC-SA 4.0: for evidence only, no
part and no dependency of this project), then `photographs` writes 22.9 MB of JPEG files for `run --elpv FOLDER`.

Every finished training is a line of the record (benchmarks/results/evidence.jsonl), and later calls skip it: a call
that ends by --limit, or is killed, is continued by the same call with the same record. To repeat a study, give it other
--seeds and benchmarks/results/evidence_repeated.jsonl as --record: the page then has both.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dmjd.compose import compose
from evidence.elpv import CELLS, write_images
from evidence.pool import ON_GPU, Pool, card, commit, mps, rates_at_once, write_data
from evidence.studies import FULL, SOURCES, STEP, TUNE, Arm, Job, Plan, Rows, Study

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPEED_EPOCHS, SPEED_RATE = 8, 5e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "steps", "speed", "plan", "page", "photographs"))
    parser.add_argument("--studies", type=Path, default=HERE / "studies", help="folder of the YAML files")
    parser.add_argument("--only", default="", help="studies in the order to run them, such as a,e")
    parser.add_argument("--seeds", help="such as 5,6,7: in place of those of the studies, to repeat one")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks/results/evidence.jsonl")
    parser.add_argument("--data", help="folder of Fashion-MNIST's files; default: found or downloaded")
    parser.add_argument("--elpv", type=Path, help="folder that `photographs` writes; without it run leaves out study j")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds; later trainings are left to other calls"
    )
    parser.add_argument("--at-once", default=None, help="trainings of each GPU at once; speed: a list such as 1,8,12")
    parser.add_argument("--no-mps", action="store_true", help="do not start CUDA's Multi-Process Service")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--arm", default="k2", help="speed: an arm of the first study")
    parser.add_argument("--commit", help="commit of the working tree, where it is no git repository")
    parser.add_argument("--rate", type=float, default=100_000, help="plan: images per second of all trainings")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/evidence.md")
    options = parser.parse_args()
    if options.command == "photographs":
        if options.elpv is None:
            parser.error("photographs needs --elpv FOLDER")
        return write_images(options.elpv)
    plan = Plan.read(options.studies, [name for name in options.only.split(",") if name])
    if options.seeds is not None:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        plan.studies = [replace(study, seeds=seeds) for study in plan.studies]
    rows = Rows.read(options.record)
    if options.command == "plan":
        print_plan(plan, rows, options.rate)
    elif options.command == "page":
        from evidence.page import REPEATED, write_page  # matplotlib, which training does not need

        again = Rows.read(ROOT / REPEATED)
        write_page(plan, rows, again, options.page, options.page.parent / "images")
    elif options.command == "steps":
        measure_steps(options, plan, rows)
    else:
        train(options, plan, rows)


def train(options: argparse.Namespace, plan: Plan, rows: Rows) -> None:
    if options.elpv is not None and not (options.elpv / CELLS).is_file():
        raise SystemExit(f"--elpv={options.elpv} has no {CELLS}; write it with: python -m evidence photographs")
    device, gpus = card()
    machine = () if device == "CPU" or options.eager else ON_GPU
    at_once = [int(each) for each in (options.at_once or ("2" if device == "CPU" else "8")).split(",")]
    with tempfile.TemporaryDirectory(prefix="evidence-") as name:
        folder = Path(name)
        if options.elpv is None:
            for study in [study for study in plan.studies if study.source == "elpv"]:
                print(f"study {study.name} is left out: it needs --elpv FOLDER")
                plan.studies.remove(study)
        if not plan.studies:
            raise SystemExit("no study is left")
        for source in {study.source for study in plan.studies}:
            write_data(source, options.elpv if source == "elpv" else options.data, folder / "data" / source)
        with mps(folder, device != "CPU" and not options.no_mps) as used:
            host = {"commit": options.commit or commit(), "mps": used, "eager": options.eager}
            if options.command == "run":
                pool = Pool(plan, rows, folder, at_once[0], options.limit, machine, host)
                pool.run(lambda: plan.jobs(rows))
                print_plan(plan, rows, options.rate)
                if pool.failed:
                    raise SystemExit(f"{len(pool.failed)} trainings failed")
                return
            for number in at_once:
                measured = Rows(folder / f"speed-{number}.jsonl")
                jobs = speed_jobs(plan.studies[0].arms[options.arm], number * len(gpus))
                pool = Pool(plan, measured, folder, number, options.limit, machine, host)
                print(json.dumps({"arm": options.arm, **host, **speed_of(pool.run(partial(lacking, jobs, measured)))}))


def measure_steps(options: argparse.Namespace, plan: Plan, rows: Rows) -> None:
    """Store the time that each step of the studies which compare equal times takes of the GPU, which nothing else may
    use: the sum of its kernels, since the CPU can be the bound of a step this small."""
    from step_kernels import profiled  # seconds, which other commands leave to their processes

    device, _ = card()
    if device == "CPU":
        raise SystemExit("steps sums the kernels of a step, and there is no GPU")
    machine = () if options.eager else ON_GPU
    for arm in [arm for study in plan.studies for arm in study.timed() if rows.speed(arm) is None]:
        keys = {**arm.keys, **dict(key.split("=", 1) for key in machine)}
        config = compose("pretrain", [f"{key}={value}" for key, value in keys.items()])
        found = profiled(config)
        host = {"device": device, "torch": torch.__version__, "date": date.today().isoformat()}
        key = {"arm": arm.id, "label": arm.label, "stage": STEP, "seed": 0, "rate": 0.0}
        row = {**key, **host, "commit": options.commit or commit()}
        of_gpu = {"images_per_second": round(1000 * config.batch_size / found.busy_ms, 1), "kernels_ms": found.busy_ms}
        rows.add({**row, **of_gpu, "step_ms": found.step_ms})
        print(f"{arm.label}: kernels {found.busy_ms:.2f} ms, a step {found.step_ms:.2f} ms", flush=True)


def speed_jobs(arm: Arm, count: int) -> list[Job]:
    """``count`` short trainings of ``arm``, one seed each."""
    short = replace(arm, keys={**arm.keys, "epochs": str(SPEED_EPOCHS)})
    return [Job(short, FULL, seed, SPEED_RATE) for seed in range(count)]


def lacking(jobs: list[Job], rows: Rows) -> Iterator[Job]:
    return (job for job in jobs if not rows.has(job))


def speed_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rates of trainings that ran at once, and of each the seconds of its parts."""
    if not rows:
        raise SystemExit("no training has ended; the output above has the errors")
    total, least = rates_at_once(rows)
    names = ("images_per_second", "seconds_before", "data_wait_percent", "seconds")
    return {"total": total, "at_least": least, **{f"each_{name}": [row[name] for row in rows] for name in names}}


def print_plan(plan: Plan, rows: Rows, rate: float) -> None:
    """Trainings and minutes that each study lacks, those of earlier studies not counted again."""
    counted: set[str] = set()
    total = 0.0
    for study in plan.studies:
        images = trainings = 0
        for arm in study.arms.values():
            for job in missing_of(study, rows, arm):
                if job[0] not in counted:
                    counted.add(job[0])
                    trainings, images = trainings + 1, images + job[1]
        minutes = images * SOURCES[study.source].cost / rate / 60
        total += minutes
        print(f"{study.name}: {study.title}: {trainings} trainings, {minutes:.1f} minutes")
    print(
        f"all: {total:.0f} minutes at {rate:.0f} images/s of Fashion-MNIST, start, scores and fine-tuning not counted"
    )


def missing_of(study: Study, rows: Rows, arm: Arm) -> Iterator[tuple[str, int]]:
    """A name and the images of each training of ``arm`` that is missing, at an assumed rate before it is chosen."""
    done = len(rows.full(arm, study.rates))
    for rate in study.rates:
        job = Job(arm.tuned, TUNE, study.seeds[0], rate)
        if not rows.has(job):
            yield f"{arm.tuned.id} {rate}", job.images
    epochs = rows.epochs(arm)
    for seed in study.seeds[done:]:
        yield f"{arm.id} seed {seed}", Job(arm, FULL, seed, study.rates[0], time_epochs=epochs).images


if __name__ == "__main__":
    main()
