"""A training step of every family of methods on one GPU: images/s, MFU, memory and the estimate of `dmjd plan`.

    python benchmarks/family_steps.py [--only FAMILY ...] [--first] [--limit SECONDS] [--json FILE]
    python benchmarks/family_steps.py --plan       afterwards, on any machine: `dmjd plan` beside the measured peaks
    python benchmarks/family_steps.py --table      rows of Markdown

Steps are those of `dmjd pretrain` and `dmjd finetune` with engine.compile=model in bfloat16, timed by pretrain_step.py
over images that are on the device. Each family is measured at its preset's batch divided by 8 GPUs; then, unless
--first is given, with twice the images each time until the rate grows by less than 2 % or twice as many do not fit.
Targets that need a file of weights (dVAE, CLIP) get random ones of the same shapes.

Rows are written one by one, and those that FILE holds of this card and torch are not measured again, except with
--again; no other row is begun after SECONDS. Most of the time is compilation: several processes with --first, each
with its own --only and FILE, fill torch's cache, which a second call with another FILE reads. --tiny tries all
families with small models, without a GPU too.
"""

from __future__ import annotations

import argparse
import tempfile
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pretrain_step import STEPS, measure
from step_record import Deadline, Record, best, card_gib, measured, next_images, parse

from dmjd.builders.plan import Plan
from dmjd.compose import compose
from dmjd.errors import ConfigError
from dmjd.targets.codebook import DVaeEncoder

GPUS = 8
"""GPUs that share the batch of a preset."""
COMMAND = {"experiment": "pretrain", "preset": "finetune"}
RECOMPUTED = ("engine.activation_checkpointing=mlp",)


class Family(NamedTuple):
    """title: in the table. preset: ``experiment=NAME`` of `dmjd pretrain` or ``preset=NAME`` of `dmjd finetune`. keys:
    further overrides."""

    title: str
    preset: str
    keys: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return COMMAND[self.preset.partition("=")[0]]

    @property
    def name(self) -> str:
        """What --only matches."""
        return f"{self.command}:{self.preset.partition('=')[2]}"


FAMILIES = (
    Family("DMJD ConvViT-B", "experiment=dmjd_convvit_base_hog", RECOMPUTED),
    Family("MAE ViT-B", "experiment=mae_vit_base"),
    Family("MAE ViT-L", "experiment=mae_vit_large"),
    Family("DMJD ConvViT-L", "experiment=dmjd_convvit_large_hog", RECOMPUTED),
    Family("DMJD ViT-B", "experiment=dmjd_vit_base_hog"),
    Family("SimMIM ViT-B", "experiment=simmim_vit_base"),
    Family("SimMIM Swin-B", "experiment=simmim_swin_base"),
    Family("BEiT ViT-B", "experiment=beit_vit_base"),
    Family("data2vec ViT-B", "experiment=data2vec_vit_base"),
    Family("MaskFeat ViT-B", "experiment=maskfeat_vit_base"),
    Family("ConvMAE ConvViT-B", "experiment=convmae_base", RECOMPUTED),
    Family("MVP ViT-B", "experiment=mvp_vit_base"),
    Family("fine-tuning ViT-B", "preset=mae_vit_base"),
    Family("fine-tuning ConvViT-B", "preset=convmae_base"),
    Family("fine-tuning Swin-B", "preset=simmim_swin_base"),
    Family("fine-tuning ViT-L", "preset=mae_vit_large"),
    Family("DMJD ViT-L", "experiment=dmjd_vit_base_hog", ("backbone=vit_large",)),
)
"""The most important first."""

TINY = {
    "vit": ("backbone.embed_dim=32", "backbone.depth=2", "backbone.num_heads=2"),
    "convvit": (
        *("backbone.embed_dim=32", "backbone.depth=2", "backbone.num_heads=2"),
        *("backbone.conv_stages.embed_dims=[4,8]", "backbone.conv_stages.depths=[1,1]"),
    ),
    "swin": ("backbone.embed_dim=64", "backbone.windows.depths=[1,1,2,1]", "backbone.windows.num_heads=[1,1,2,2]"),
}


def keys_of(family: Family, tiny: bool) -> list[str]:
    keys = [family.preset, *family.keys]
    if not tiny:
        return keys
    config = compose(family.command, [*keys, *(["init=null"] if family.command == "finetune" else [])])
    keys += [*TINY[config.backbone.name], "engine.device=cpu"]
    if family.command == "pretrain":
        keys += ["method.decoder.dim=16", "method.decoder.depth=1", "method.decoder.num_heads=2", "target.layers=2"]
    return keys


def name_of(family: Family) -> str:
    return ", ".join([family.name, *(key for key in family.keys if key.startswith("backbone="))])


def write_weights(target: Any, folder: Path, tiny: bool) -> str | None:
    """A file in ``folder`` of random weights for the network of a target; None for targets without a file.

    Raises:
        ConfigError: if the network's package is missing.
    """
    file = folder / f"{target.name}.pt"
    torch.manual_seed(0)
    if target.name == "dvae":
        torch.save(DVaeEncoder(target.codes, *((8, 1) if tiny else ())).state_dict(), file)
    elif target.name == "clip":
        try:
            import open_clip
        except ImportError as error:
            raise ConfigError("target.name=clip needs open_clip: pip install 'dmjd[clip]'") from error
        torch.save(open_clip.create_model(target.model).state_dict(), file)
    else:
        return None
    return str(file)


def row_of(family: Family, images: int, tiny: bool) -> dict[str, Any]:
    keys = [*keys_of(family, tiny), f"batch_size={images}", f"engine.compile={'none' if tiny else 'model'}"]
    more = ["init=null"] if family.command == "finetune" else []
    with tempfile.TemporaryDirectory() as folder:
        if family.command == "pretrain":
            weights = write_weights(compose("pretrain", keys).target, Path(folder), tiny)
            more += [f"target.weights={weights}"] if weights else []
        return {"keys": keys, **measure(compose(family.command, [*keys, *more]), 2 if tiny else STEPS)}


def first_images(family: Family, tiny: bool) -> int:
    more = ["init=null"] if family.command == "finetune" else []
    return 2 if tiny else int(compose(family.command, [family.preset, *family.keys, *more]).batch_size) // GPUS


def rows_of(record: Record, family: Family) -> list[dict[str, Any]]:
    return [row for row in record.rows if row["family"] == name_of(family)]


def plan(record: Record) -> None:
    """Print and store the estimate for each row, computed on the CPU."""
    for family in FAMILIES:
        for row in rows_of(record, family):
            if row.get("out_of_memory") or row["peak_gib"] is None:
                continue
            config = compose(f"plan_{family.command}".replace("plan_pretrain", "plan"), [*row["keys"], "images=1000"])
            mode = config.engine.activation_checkpointing
            row["plan_gib"] = Plan(config).peak("single", mode, row["images"]) / 2**30
            error = 100 * (row["plan_gib"] / row["peak_gib"] - 1)
            text = f"{family.title:24} {row['images']:5} images: {row['peak_gib']:6.2f} GiB measured, "
            print(f"{text}{row['plan_gib']:6.2f} planned, {error:+5.1f} %", flush=True)
            record.write()


def table(record: Record) -> None:
    """Print the preset's batch and the best of each family."""
    print(
        "| step | images | ms | images/s | MFU % | peak GiB | plan GiB | best: images | images/s | MFU % | peak GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for family in FAMILIES:
        rows = rows_of(record, family)
        most = best(rows)
        if most is None:
            continue
        first = min((row for row in rows if not row.get("out_of_memory")), key=lambda row: row["images"])
        cells = [family.title, str(first["images"]), f"{first['step_ms']:.1f}", *_rates(first)]
        cells.append(f"{first['plan_gib']:.1f}" if "plan_gib" in first else "")
        cells += [str(most["images"]), *_rates(most)] if len(rows) > 1 else [""] * 4
        print(f"| {' | '.join(cells)} |")


def _rates(row: dict[str, Any]) -> list[str]:
    numbers = ((row["mfu_percent"], ".1f"), (row["peak_gib"], ".1f"))
    return [
        f"{row['images_per_second']:.0f}",
        *("" if value is None else format(value, form) for value, form in numbers),
    ]


def report(title: str, row: dict[str, Any]) -> None:
    if row.get("out_of_memory"):
        print(f"{title:24} {row['images']:5} images: out of memory", flush=True)
        return
    text = f"{title:24} {row['images']:5} images {row['step_ms']:8.1f} ms {row['images_per_second']:7.0f} images/s"
    if row["peak_gib"] is not None:
        text += f" {row['peak_gib']:6.2f} GiB, MFU {row['mfu_percent'] or 0:.1f} %"
    print(f"{text}, preparation {row['prepare_ms']:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="FAMILY", help="such as pretrain:mae_* finetune:*")
    parser.add_argument("--first", action="store_true", help="the preset's batch alone")
    options, device, file = parse(parser, "family_steps")
    deadline = Deadline(options.limit)
    if options.plan or options.table:
        (plan if options.plan else table)(Record.read(file))
        return
    record = Record(file, "family_steps", device)
    families = [each for each in FAMILIES if any(fnmatch(name_of(each), one) for one in options.only)]
    if options.again:
        record.rows = [row for row in record.rows if row["family"] not in map(name_of, families)]
    for search in (False,) if options.first else (False, True):  # first all families at their preset's batch
        for family in families:
            first = first_images(family, options.tiny)
            while (images := next_images(rows_of(record, family), first, card_gib())) is not None:
                if images > first and not search:
                    break
                if deadline.over:
                    print(
                        f"{options.limit:.0f} s are over; the same command goes on with {family.title}, {images} images"
                    )
                    return
                try:
                    row = measured(partial(row_of, family, tiny=options.tiny), images)
                except ConfigError as error:
                    print(f"{family.title:24} left out: {error}", flush=True)
                    break
                record.add({"family": name_of(family), **row}, "family", "images")
                report(family.title, row)


if __name__ == "__main__":
    main()
