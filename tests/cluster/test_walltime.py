"""A limit that leaves a launch no time is met before the queue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmjd.cluster.submit import plan
from dmjd.cluster.walltime import seconds_of_limit
from dmjd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("24:00:00", 86400),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("1-00:00:01", 86401),
        ("0", None),
        ("UNLIMITED", None),
        ("5m", None),
        ("1:2:3:4", None),
    ],
)
def test_seconds_as_slurm_counts_them(text: str, seconds: int | None) -> None:
    assert seconds_of_limit(text) == seconds


ONE_STEP = "is not above time_margin=300 seconds: each launch would stop after one step"
AT_ONCE = "is not above the 300 seconds of --signal=USR1@300: each launch would be stopped when it starts"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["time=5"], f"time=5 {ONE_STEP}"),
        (["time=0:04:59"], f"time=0:04:59 {ONE_STEP}"),
        (["time=1:00:00", "time_margin=3600"], "time=1:00:00 is not above time_margin=3600 seconds"),
        (["time=5", "time_budget=null"], f"time=5 {AT_ONCE}"),
        (["time=5", "time_margin=60"], f"time=5 {AT_ONCE}"),
    ],
)
def test_a_launch_needs_more_time_than_it_stops_before_its_end(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan("pretrain", ["experiment=demo", f"run={tmp_path}/run", *words])


def test_what_has_the_time_is_submitted(tmp_path: Path) -> None:
    site = tmp_path / "mine.env"
    site.write_text("SBATCH_TIMELIMIT=0:05:00\nSBATCH_SIGNAL=USR1@60\n")
    words = ["experiment=demo", f"run={tmp_path}/run"]
    for more in (["time=5:01"], ["time=0"], [f"site={site}", "time_margin=60"], ["time=2-0", "time_margin=86400"]):
        assert plan("pretrain", [*words, *more]).chain == 1
    assert plan("preflight", [*words, "time=3"]).chain == 1, "it is no launch that is told to stop"
    with pytest.raises(ConfigError, match="time=0:05:00 is not above time_margin=300"):
        plan("pretrain", [*words, f"site={site}"])
