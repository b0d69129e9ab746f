from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import EvenSubset
from dmjd.data.folder import ImageFolder
from dmjd.data.loader import StepBatches, make_loader
from dmjd.data.quarantine import Quarantine, exceeds
from dmjd.data.substitution import Substitution
from dmjd.errors import BadImage, DataError, StorageError

FAULT = "cannot be read as an image (cut)"


def bad(number: int, kind: str = "truncated") -> BadImage:
    return BadImage(f"{number}.png", kind, FAULT)


def swap(number: int, kind: str = "truncated") -> Substitution:
    return Substitution(number, bad(number, kind), f"{number + 1000}.png")


def folder(root: Path) -> ImageFolder:
    return ImageFolder(str(root), "train", channels=3, min_size=(16, 16), max_bad_percent=25)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quarantine.jsonl"


@pytest.mark.parametrize(
    ("total", "percent", "most"),
    [(100, 1.0, 1), (3000, 2.3, 69), (1000, 0.7, 7), (199, 1.0, 1), (200, 1.0, 2), (50, 0.0, 0), (7, 100.0, 7)],
)
def test_the_rate_is_exact(total: int, percent: float, most: int) -> None:
    assert not exceeds(most, total, percent)
    assert exceeds(most + 1, total, percent)


def test_nothing_is_written_while_nothing_is_bad(path: Path) -> None:
    held = Quarantine(path, 100, 0)
    held.admit({})
    held.add(0, [])
    assert not path.exists()
    assert held.counts == {}


def test_a_line_says_what_was_bad_what_took_its_place_and_when(path: Path) -> None:
    held = Quarantine(path, 100, 100)
    held.admit({9: bad(9, "too small")})
    held.add(41, [swap(3, "missing")])
    assert rows(path) == [
        {"kind": "too small", "name": "9.png", "sample_id": 9, "substitute": None, "step": None, "fault": FAULT},
        {"kind": "missing", "name": "3.png", "sample_id": 3, "substitute": "1003.png", "step": 42, "fault": FAULT},
    ]


def test_an_image_is_listed_counted_and_warned_of_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = Quarantine(path, 100, 100)
    with caplog.at_level(logging.WARNING, logger="dmjd"):
        for step in (0, 7, 9):
            held.add(step, [swap(3), swap(4, "missing")])
    assert [row["name"] for row in rows(path)] == ["3.png", "4.png"]
    assert held.counts == {"truncated": 1, "missing": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"step 1: {name}.png cannot be read as an image (cut); {cure}; substituted by {substitute}.png"
        for name, substitute, cure in ((3, 1003, "remove or replace it"), (4, 1004, "restore it"))
    ]


def test_what_the_start_found_is_one_warning_and_stays_silent_when_met_or_after_a_restart(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {number: bad(number) for number in range(5)}
    with caplog.at_level(logging.WARNING, logger="dmjd"):
        for _ in range(2):
            held = Quarantine(path, 100, 5)
            held.admit(found)
            held.add(3, [swap(2)])
    assert len(rows(path)) == 5
    assert len(caplog.records) == 1
    assert "the check at the start found 5 bad image(s), the first: 0.png cannot" in caplog.records[0].getMessage()


def test_distinct_images_beyond_the_rate_stop_the_run(path: Path) -> None:
    held = Quarantine(path, 300, 1)
    for step, number in enumerate([5, 5, 6, 5, 7, 6]):
        held.add(step, [swap(number, "missing" if number == 7 else "truncated")])
    with pytest.raises(DataError) as caught:
        held.add(6, [swap(8)])
    assert str(caught.value) == (
        "4 of 300 images are bad (3 truncated, 1 missing), more than data.max_bad_percent=1 allows, the first of them "
        f"5.png {FAULT}; repair what {path} lists and delete that list, or raise data.max_bad_percent"
    )
    with pytest.raises(DataError, match=r"the first of them 5\.png cannot be read as an image \(cut\); repair"):
        Quarantine(path, 300, 1)
    earlier = [{key: row[key] for key in row if key != "fault"} for row in rows(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    with pytest.raises(DataError, match=r"the first of them 5\.png; repair"):
        Quarantine(path, 300, 1)
    assert len(rows(path)) == 4  # the one that broke it is on the list


def test_a_rate_of_0_stops_at_the_first_and_one_of_100_never(path: Path) -> None:
    Quarantine(path, 4, 100).add(0, [swap(number) for number in range(4)])
    with pytest.raises(DataError, match=r"4 of 4 images are bad .*, more than data.max_bad_percent=0 allows"):
        Quarantine(path, 4, 0)
    path.unlink()
    with pytest.raises(DataError, match="1 of 4 images are bad"):
        Quarantine(path, 4, 0).add(0, [swap(2)])


def test_earlier_launches_count(path: Path) -> None:
    Quarantine(path, 300, 1).add(0, [swap(1), swap(2)])
    held = Quarantine(path, 300, 1)
    held.add(5, [swap(3)])
    with pytest.raises(DataError, match="4 of 300"):
        held.add(6, [swap(4)])
    with pytest.raises(DataError, match="4 of 300"):
        Quarantine(path, 300, 1)


@pytest.mark.parametrize("cut", range(1, 90, 11))
def test_a_line_torn_by_a_kill_costs_that_line_only(path: Path, cut: int) -> None:
    Quarantine(path, 300, 100).add(0, [swap(1), swap(2)])
    whole = path.read_bytes()
    assert len(whole.splitlines()[-1]) > 90
    path.write_bytes(whole[:-cut])
    held = Quarantine(path, 300, 100)
    held.add(1, [swap(2), swap(3)])
    held = Quarantine(path, 300, 100)
    held.add(2, [swap(1), swap(2), swap(3)])
    assert held.counts == {"truncated": 3}
    names = []
    for line in path.read_text().splitlines():
        try:
            names.append(json.loads(line)["name"])
        except ValueError:
            assert whole.splitlines()[1].startswith(line.encode())
    assert names in (["1.png", "2.png", "3.png"], ["1.png", "2.png", "2.png", "3.png"])


def test_processes_that_share_the_list_count_together(path: Path) -> None:
    ours, theirs = Quarantine(path, 300, 1), Quarantine(path, 300, 1)
    ours.add(0, [swap(1)])
    theirs.add(0, [swap(2)])
    ours.add(4, [swap(2)])  # in another epoch it is the other's turn to meet it
    theirs.add(5, [swap(3)])
    assert [row["name"] for row in rows(path)] == ["1.png", "2.png", "3.png"]
    with pytest.raises(DataError, match="4 of 300"):
        ours.add(6, [swap(4)])


def test_any_file_name_survives_the_list(path: Path) -> None:
    name = "\udcff\n\u2028ü.png"
    image = BadImage(name, "missing", "cannot be read as an image (gone)")
    for _ in range(2):
        Quarantine(path, 10, 100).add(0, [Substitution(0, image, "good.png")])
    assert [row["name"] for row in rows(path)] == [name]


def test_a_list_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    held = Quarantine(tmp_path / "absent" / "quarantine.jsonl", 10, 100)
    with pytest.raises(
        StorageError, match=r"cannot write .*quarantine\.jsonl: No such file or directory; repair the disk"
    ):
        held.add(0, [swap(1)])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_real_files_that_go_bad_before_and_after_the_start(tmp_path: Path, workers: int) -> None:
    root = tmp_path / "images"
    root.mkdir()
    rng = np.random.default_rng(0)
    for number in range(24):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(root / f"{number:02d}.jpg")
    before = StepBatches(folder(root), 4, RandomResizedCrop((16, 16)), seed=1)
    sound = [before[step] for step in range(12)]
    whole = (root / "03.jpg").read_bytes()
    (root / "03.jpg").write_bytes(whole[:-60])  # only decoding notices
    (root / "08.jpg").write_bytes(b"")
    (root / "15.jpg").unlink()
    (root / "15.png").write_text("<html>moved</html>")
    Image.new("RGB", (4, 4)).save(root / "16.jpg")
    dataset = folder(root)
    (root / "21.jpg").unlink()

    held = Quarantine(tmp_path / "quarantine.jsonl", len(dataset), 25)
    held.admit(dataset.bad)
    assert {row["sample_id"]: row["kind"] for row in rows(tmp_path / "quarantine.jsonl")} == {
        8: "truncated",
        15: "undecodable",
        16: "too small",
    }
    damaged = StepBatches(dataset, 4, RandomResizedCrop((16, 16)), seed=1)
    for got, expected in zip(make_loader(damaged, 0, 12, workers, False, held), sound, strict=True):
        assert torch.equal(got.sample_ids, expected.sample_ids)
        same = (got.images == expected.images).flatten(1).all(dim=1)
        assert set(got.sample_ids[~same].tolist()) == set(got.sample_ids.tolist()) & {3, 8, 15, 16, 21}
    assert held.counts == {"truncated": 2, "undecodable": 1, "too small": 1, "missing": 1}
    assert len(rows(tmp_path / "quarantine.jsonl")) == 5


def test_a_subset_knows_which_of_its_images_are_bad(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.png").write_text("not found")
    whole = ImageFolder(str(tmp_path), "train", channels=3, max_bad_percent=100)
    subset = EvenSubset(whole, 4)
    assert {index: image.name for index, image in subset.bad.items()} == {i: subset.name(i) for i in range(4)}


def test_a_list_of_gigabytes_is_not_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    with path.open("wb") as file:
        file.truncate(20 << 30)  # takes no place on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Quarantine(path, 1000, 1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
