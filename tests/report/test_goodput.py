"""The time accounts of a run on its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dmjd.report import write_report


def test_the_page_sums_up_where_the_time_went(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    accounts = {"training": 90.0, "start": 5.0, "data": 3.0, "checkpoint": 2.0, "evaluate": 0.0, "lost": 0.0}
    row = {"step": 11, "seconds": 100.0, **{f"{name}_seconds": spent for name, spent in accounts.items()}}
    (run / "timing.jsonl").write_text(json.dumps(row) + "\n")
    text = write_report(run).read_text()
    assert "90.0 %: 1 min 30 s training, 5.0 s start-up and compilation, 3.0 s waiting for data, 2.0 s waiting" in text
    assert "lost to crashes" not in text
