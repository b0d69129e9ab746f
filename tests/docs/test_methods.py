from __future__ import annotations

import re
from pathlib import Path

from dmjd.resources import configs_dir

DOCS = Path(__file__).parents[2] / "docs"
SYSTEMS = (  # of the paper's tables
    "MAE, SimMIM, BEiT, MaskFeat, ConvMAE, DMJD, SplitMask, MoCo v3, DINO, CAE, PeCo, mc-BEiT, iBOT, SdAE, "
    "data2vec, MVP"
)


def test_every_system_has_a_status_and_every_preset_named_exists() -> None:
    systems = (DOCS / "comparison.md").read_text().partition("\n## ")[0].splitlines()
    rows = [line.split("|")[1:5] for line in systems if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows[1:]]
    names = {re.split(r"[,+]", row[0])[0].strip() for row in rows}
    assert names >= set(SYSTEMS.split(", "))
    existing = {path.stem for path in (configs_dir() / "experiment").glob("*.yaml")}
    for system, status, reason, source in rows:
        assert status in ("preset", "checkpoint", "figure"), system
        assert reason, system
        assert source.startswith(("code", "README", "abstract", "review", "the paper's text", "nothing")), system
        if status == "preset":
            for name in re.findall(r"`([a-z0-9_*]+)`", reason):
                assert any(Path(one).match(name) for one in existing), f"{system}: {name}"
        for name in re.findall(r"backbone=([a-z0-9_]+)", reason):
            assert (configs_dir() / "backbone" / f"{name}.yaml").is_file(), f"{system}: {name}"
