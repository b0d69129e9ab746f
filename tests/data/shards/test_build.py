from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from dmjd.data.folder import ImageFolder
from dmjd.data.held_out import HeldOut
from dmjd.data.shards.build import PARTS, build_shards
from dmjd.data.shards.in_place import index_tars
from dmjd.data.shards.index import load, load_splits
from dmjd.data.shards.part import REJECTS
from dmjd.data.shards.sample import image_bytes
from dmjd.data.shards.sources import find_source
from dmjd.data.shards.tar import TarWriter
from dmjd.data.stream.tars import tar_images
from dmjd.errors import DataError, StorageError

# webdataset leaves files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]

Photo = Callable[..., bytes]
Launch = Callable[..., BaseProcess]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def labels(folder: Path) -> list[int]:
    return load(folder).records["label"].tolist()


def foreign_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1_700_000_000
            tar.addfile(info, io.BytesIO(content))
    return path


# What a build is


def test_shards_hold_what_the_folder_holds_in_its_order(photos: Path, finished: Path) -> None:
    for split, name in (("train", "train"), ("test", "val")):
        folder = ImageFolder(str(photos), split, channels=3, check="none")  # type: ignore[arg-type]
        good = [index for index in range(len(folder)) if not folder.name(index).endswith("page.jpg")]
        shards = load(finished / name)
        assert shards.manifest.classes == folder.classes == ("ant", "bee")
        assert shards.manifest.samples == len(good)
        assert shards.records["label"].tolist() == [folder.label(index) for index in good]
        for number, index in enumerate(good):
            with Image.open(io.BytesIO(image_bytes(shards, number))) as image:
                np.testing.assert_array_equal(np.asarray(image), folder.image(index))


def test_tars_have_about_the_size_asked_for(finished: Path) -> None:
    shards = load(finished / "train").manifest.shards
    assert len(shards) > 3
    assert all(shard.bytes < 7_000 + 2 * 10_240 for shard in shards)
    assert [shard.url for shard in shards] == [f"train-{number:06d}.tar" for number in range(len(shards))]


def test_what_cannot_be_used_is_listed(photos: Path, finished: Path) -> None:
    (line,) = (finished / "train" / "rejects.jsonl").read_text().splitlines()
    reason = "is not an image: it begins with b'<!DOCTYPE ht'"
    assert json.loads(line) == {"name": str(photos / "train/ant/page.jpg"), "kind": "magic", "reason": reason}
    assert not (finished / "val" / "rejects.jsonl").exists()


def test_webdataset_reads_the_tars(finished: Path) -> None:
    shards = load(finished / "train")
    urls = [shards.location(number) for number in range(len(shards.manifest.shards))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [int(sample["cls"]) for sample in samples] == shards.records["label"].tolist()
    assert [sample["jpg"] for sample in samples] == [image_bytes(shards, number) for number in range(len(samples))]
    assert samples[0]["__key__"] == "000000000_00"
    assert len({sample["__key__"] for sample in samples}) == len(samples)


@pytest.mark.usefixtures("small_tars")
def test_equal_builds_have_equal_bytes_and_a_finished_one_is_left_alone(
    photos: Path, finished: Path, tmp_path: Path
) -> None:
    first = build_shards(str(photos), str(tmp_path / "again"), workers=1, shard_mb=1)
    assert content_of(tmp_path / "again") == content_of(finished)
    assert [(saved.samples, dict(saved.rejects)) for saved in first] == [(24, {"magic": 1}), (4, {})]
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").rglob("*")}
    assert build_shards(f"{photos}/", str(tmp_path / "again"), workers=1, shard_mb=1) == first, (
        "as a shell completes it"
    )
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "again").rglob("*")} == times


@pytest.mark.usefixtures("small_tars")
def test_processes_change_nothing(photos: Path, finished: Path, tmp_path: Path) -> None:
    build_shards(str(photos), str(tmp_path / "shards"), workers=3, shard_mb=1)
    assert content_of(tmp_path / "shards") == content_of(finished)


# Interruptions

# Every commit of a build is a rename; this ends the process, as SIGKILL does, just before the one of a given number.
KILL_BEFORE_RENAME = """
import os, signal
from pathlib import Path
import dmjd.data.shards.build as module
module.MEGABYTE = 25_000
rename, left = Path.replace, [{number}]
def replace(self, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return rename(self, target)
Path.replace = replace
"""


# In order: the recipe, three tars with a note each, the report, an index and a manifest for each of two splits.
RENAMES = 12
FIRST_OF_THEIR_KIND = (0, 1, 2, 7, 8, 9)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(FIRST_OF_THEIR_KIND, id="the first of each kind"),
        pytest.param(sorted({*range(RENAMES)} - {*FIRST_OF_THEIR_KIND}), id="the others", marks=pytest.mark.long),
    ],
)
def test_a_build_killed_before_any_commit_continues_to_the_same_bytes(
    numbers: Sequence[int], photos: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.data.shards.build.MEGABYTE", 25_000)
    finished = tmp_path / "finished"
    build_shards(str(photos), str(finished), workers=1, shard_mb=1)
    tars = sum(len(shards.manifest.shards) for shards in load_splits(finished).values())
    assert 1 + 2 * tars + 1 + 2 * 2 == RENAMES
    for number in numbers:
        folder = tmp_path / str(number)
        words = ["shards", "build", str(photos), str(folder), "workers=1", "shard_mb=1"]
        process = launch(words, KILL_BEFORE_RENAME.format(number=number))
        process.join()
        assert process.exitcode == -signal.SIGKILL, number
        assert not all((folder / split / "manifest.json").exists() for split in ("train", "val"))
        build_shards(str(photos), str(folder), workers=1, shard_mb=1)
        assert content_of(folder) == content_of(finished), number


def test_a_build_by_several_processes_killed_amid_them_continues_to_the_same_bytes(
    photo: Photo, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.data.shards.build.MEGABYTE", 250_000)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(60):
        (source / f"{number:03d}.bmp").write_bytes(photo(number, "BMP", (200, 200)))
    folders = tmp_path / "killed", tmp_path / "left alone"
    words = ["shards", "build", str(source), str(folders[0]), "workers=2", "shard_mb=1"]
    process = launch(words, "import dmjd.data.shards.build as module; module.MEGABYTE = 250_000")
    limit = time.monotonic() + 60
    while len(list(folders[0].glob("*.tar"))) < 2 and process.is_alive():
        assert time.monotonic() < limit
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not (folders[0] / "manifest.json").exists(), "killed too late to tell anything"
    for folder in folders:
        build_shards(str(source), str(folder), workers=1, shard_mb=1)
    assert content_of(folders[0]) == content_of(folders[1])


@pytest.mark.usefixtures("small_tars")
def test_a_full_disk_is_one_sentence_and_the_build_continues(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, left = TarWriter.add, [9]

    def full(self: TarWriter, *sample: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return add(self, *sample)

    monkeypatch.setattr(TarWriter, "add", full)
    with pytest.raises(StorageError, match=r"cannot write .*\.tar: No space left on device; finished tars stay"):
        build_shards(str(photos), str(tmp_path / "shards"), workers=1, shard_mb=1)
    assert not list(tmp_path.rglob("*.tmp"))
    left[0] = 1 << 30
    build_shards(str(photos), str(tmp_path / "shards"), workers=1, shard_mb=1)
    assert content_of(tmp_path / "shards") == content_of(finished)


@pytest.mark.usefixtures("small_tars")
def test_a_build_whose_twin_ends_first_says_so_and_the_set_is_whole(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shards"

    def overtaken(*arguments: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr("dmjd.data.shards.build.MEGABYTE", 7_000)
        build_shards(str(photos), str(folder), workers=1, shard_mb=1)
        replace(*arguments)

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", overtaken)
    with pytest.raises(StorageError, match="another process may build there as well"):
        build_shards(str(photos), str(folder), workers=1, shard_mb=1)
    build_shards(str(photos), str(folder), workers=1, shard_mb=1)
    assert content_of(folder) == content_of(finished)


@pytest.mark.usefixtures("small_tars")
def test_a_disk_that_is_full_only_when_the_tar_is_to_be_safe_leaves_no_tar(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)  # where a network disk says so
    with pytest.raises(StorageError, match=r"cannot write .*\.tar: Disk quota exceeded; finished tars stay"):
        build_shards(str(photos), str(tmp_path / "shards"), workers=1, shard_mb=1)
    assert not [path for ending in ("tar", "part", "tmp") for path in tmp_path.rglob(f"*.{ending}")]


@pytest.mark.usefixtures("small_tars")
def test_a_finished_tar_that_is_damaged_is_made_again(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dmjd.data.shards.build.save_parts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_shards(str(photos), str(tmp_path / "shards"), workers=1, shard_mb=1)
    tars = sorted((tmp_path / "shards" / "train").glob("*.tar"))
    tars[0].unlink()
    tars[1].write_bytes(tars[1].read_bytes()[:-1])
    note = tmp_path / "shards" / PARTS / f"{tars[2].stem}.part"
    note.write_bytes(note.read_bytes()[:200])
    build_shards(str(photos), str(tmp_path / "shards"), workers=1, shard_mb=1)
    assert content_of(tmp_path / "shards") == content_of(finished)


# Sources


def test_a_flat_folder_has_no_labels_and_its_files_are_what_they_hold(photo: Photo, tmp_path: Path) -> None:
    files = {"a.png": photo(0), "b.jpg": photo(1, "PNG"), "c.tiff": photo(2, "WEBP"), "d.jpeg": b""}
    (tmp_path / "source").mkdir()
    for name, content in files.items():
        (tmp_path / "source" / name).write_bytes(content)
    (saved,) = build_shards(str(tmp_path / "source"), str(tmp_path / "shards"), workers=1)
    shards = load(tmp_path / "shards")
    assert (saved.folder, dict(saved.rejects)) == (tmp_path / "shards", {"empty": 1})
    assert (labels(tmp_path / "shards"), shards.manifest.classes) == ([-1] * 3, ())
    with tarfile.open(shards.location(0)) as tar:
        assert tar.getnames() == ["000000000_a.jpg", "000000001_b.png", "000000002_c.jpg"]


def test_names_become_keys_that_webdataset_understands(photo: Photo, tmp_path: Path) -> None:
    for name in ("__meta__.jpg", "a.b.c.jpg", "ünï cödé.jpg", f"{'long' * 50}.jpg"):
        (tmp_path / "source" / "a.class").mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / "a.class" / name).write_bytes(photo())
    build_shards(str(tmp_path / "source"), str(tmp_path / "shards"), workers=1)
    samples = list(webdataset.WebDataset(str(tmp_path / "shards" / "train-000000.tar"), shardshuffle=False))
    assert [sorted(sample) for sample in samples] == [["__key__", "__local_path__", "__url__", "cls", "jpg"]] * 4


def test_tars_are_sharded_anew(photo: Photo, tmp_path: Path) -> None:
    members = {
        "x/1.jpg": photo(1),
        "x/1.cls": b"2\n",
        "x/2.cls": b"0",
        "x/2.json": b"{}",
        "x/2.seg.png": photo(2, "PNG"),
        "x/3.jpg": photo(3),
        "x/4.txt": b"no image",
        "x/5.jpg": photo(5),
        "x/5.cls": b"cat",
        "x/6.jpg": photo(6),
        "x/6.cls": b"999999999",  # every class has a name
    }
    for split, names in (("train", list(members)), ("val", ["x/1.jpg", "x/1.cls"])):
        foreign_tar(tmp_path / "source" / split / "0.tar", {name: members[name] for name in names})
    train, val = build_shards(str(tmp_path / "source"), str(tmp_path / "shards"), workers=1)
    assert (labels(train.folder), labels(val.folder)) == ([2, 0, -1], [2])
    assert dict(train.rejects) == {"missing": 1, "label": 2}
    assert load(train.folder).manifest.classes == load(val.folder).manifest.classes == ("0", "1", "2")
    assert image_bytes(load(train.folder), 1) == members["x/2.seg.png"]


@pytest.mark.usefixtures("small_tars")
def test_no_image_of_a_tar_is_left_out_in_silence(photo: Photo, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "dotted.tar", "w") as tar:
        for number, name in enumerate(("img.jpg", "img.depth.png", "img.png")):  # one sample of one image
            info = tarfile.TarInfo(name)
            info.size = len(photo(number))
            tar.addfile(info, io.BytesIO(photo(number)))
        for name, kind in (("hard.jpg", tarfile.LNKTYPE), ("soft.png", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "img.jpg"
            tar.addfile(link)
    (built,) = build_shards(str(tmp_path / "dotted.tar"), str(tmp_path / "shards"), workers=1)
    (indexed,) = index_tars([str(tmp_path / "dotted.tar")], str(tmp_path / "index"), workers=1)
    for saved in (built, indexed):
        assert (saved.samples, dict(saved.rejects)) == (1, {"extra": 4})
        names = [json.loads(line)["name"] for line in (saved.folder / REJECTS).read_text().splitlines()]
        members = ("img.depth.png", "img.png", "hard.jpg", "soft.png")
        assert names == [f"{tmp_path / 'dotted.tar'}: {member}" for member in members]


def test_names_with_several_dots_keep_their_images_and_labels(photo: Photo, tmp_path: Path) -> None:
    names = ["a/img.v0", "a/img.v1", "b/x.1.2", "b/x.1.3", "c/plain"]  # keys that end at the last dot
    members: dict[str, bytes] = {}
    for number, name in enumerate(names):
        members |= {f"{name}.jpg": photo(number), f"{name}.cls": str(number).encode()}
    members |= {"d/one.left.jpg": photo(5), "d/one.right.jpg": photo(6), "d/one.cls": b"7"}  # a label for both
    members |= {"e/img.jpg": photo(7), "e/img.v1.jpg": photo(8), "e/img.v1.cls": b"2"}  # one has its own
    members |= {"f/gone.v0.cls": b"1", "f/gone.v1.jpg": photo(9), "g/._1.jpg": b"of another system"}
    foreign_tar(tmp_path / "dotted.tar", members)
    (built,) = build_shards(str(tmp_path / "dotted.tar"), str(tmp_path / "shards"), workers=1)
    (indexed,) = index_tars([str(tmp_path / "dotted.tar")], str(tmp_path / "index"), workers=1)
    images = [content for name, content in members.items() if name.endswith("jpg") and "._" not in name]
    for saved in (built, indexed):
        shards = load(saved.folder)
        assert dict(saved.rejects) == {"missing": 1}
        assert labels(saved.folder) == [0, 1, 2, 3, 4, 7, 7, -1, 2, -1]
        assert [image_bytes(shards, index) for index in range(10)] == images
    streamed = list(tar_images(str(tmp_path / "dotted.tar"), stall=9))
    assert [image.data for image in streamed] == images
    assert [image.name.partition(": ")[2] for image in streamed[:7]] == [*names, "d/one.left", "d/one.right"]


def test_a_build_holds_out_what_a_folder_does(photo: Photo, tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "source" / name).mkdir(parents=True)
        for number in range(12):
            (tmp_path / "source" / name / f"{number}.jpg").write_bytes(photo(number + 12 * (name == "bee")))
    rule = HeldOut(25, seed=4)
    source = str(tmp_path / "source")
    built = build_shards(source, str(tmp_path / "shards"), workers=1, held_out=rule)
    for saved, split in zip(built, ("train", "test"), strict=True):
        folder = ImageFolder(source, split, channels=3, held_out=rule)  # type: ignore[arg-type]
        shards = load(saved.folder)
        assert saved.folder.name == {"train": "train", "test": "val"}[split]
        assert shards.manifest.classes == folder.classes == ("ant", "bee")
        assert labels(saved.folder) == [folder.label(index) for index in range(len(folder))]
        for index in range(len(folder)):
            assert image_bytes(shards, index) == Path(folder.name(index)).read_bytes()
    assert load(built[0].folder).manifest.source == f"folder, 25 % held out with val_seed=4: {source}"
    assert build_shards(source, str(tmp_path / "shards"), workers=1, held_out=rule) == built
    with pytest.raises(DataError, match="has another build: source was folder, 25 % held out with val_seed=4: "):
        build_shards(source, str(tmp_path / "shards"), workers=1)
    # The tars of a set can be split too, and a set that is split cannot be again.
    whole = str(tmp_path / "whole")
    build_shards(source, whole, workers=1)
    train, val = build_shards(whole, str(tmp_path / "again"), workers=1, held_out=rule)
    assert train.samples + val.samples == 24
    assert val.samples > 0
    with pytest.raises(DataError, match="has a held-out split"):
        build_shards(str(tmp_path / "shards"), str(tmp_path / "more"), workers=1, held_out=rule)
    with pytest.raises(DataError, match="holds out 0 of the 24 images"):
        build_shards(source, str(tmp_path / "none"), workers=1, held_out=HeldOut(1e-7))


def test_shards_are_sharded_anew_with_their_classes(finished: Path, tmp_path: Path) -> None:
    build_shards(str(finished), str(tmp_path / "one"), workers=1, shard_mb=100)
    few, many = load(tmp_path / "one" / "train"), load(finished / "train")
    assert len(few.manifest.shards) == 1
    assert few.manifest.classes == ("ant", "bee")
    for column in ("size", "label", "crc32", "height", "width"):
        np.testing.assert_array_equal(few.records[column], many.records[column])


def test_a_pattern_picks_tars(photo: Photo, tmp_path: Path) -> None:
    for name in ("train-1", "train-0", "validation-0"):
        foreign_tar(tmp_path / "source" / f"{name}.tar", {f"{name}.jpg": photo(len(name))})
    (saved,) = build_shards(str(tmp_path / "source" / "train-*.tar"), str(tmp_path / "shards"), workers=1)
    assert saved.samples == 2


@pytest.mark.parametrize("below", [".", "images"])
def test_coco_is_what_its_annotations_list(photo: Photo, tmp_path: Path, below: str) -> None:
    source = tmp_path / "coco"
    for split, names in (("train2017", ["2.jpg", "1.jpg"]), ("val2017", ["3.jpg"])):
        (source / below / split).mkdir(parents=True)
        for name in names:
            (source / below / split / name).write_bytes(photo(int(name[0])))
        listed = [{"file_name": name, "id": int(name[0])} for name in [*names, *["9.jpg"] * (split == "train2017")]]
        (source / "annotations").mkdir(exist_ok=True)
        (source / "annotations" / f"instances_{split}.json").write_text(json.dumps({"images": listed, "x": [0] * 99}))
        (source / "annotations" / f"captions_{split}.json").write_text(json.dumps({"images": listed}))
    (source / below / "train2017" / "stray.jpg").write_bytes(photo(7))
    train, val = build_shards(str(source), str(tmp_path / "shards"), workers=1)
    assert (train.samples, dict(train.rejects), val.samples) == (2, {"missing": 1}, 1)
    assert image_bytes(load(train.folder), 0) == photo(1)
    assert (labels(train.folder), load(train.folder).manifest.classes) == ([-1, -1], ())


@pytest.mark.parametrize("scenes", [True, False])
def test_ade_is_labelled_by_its_scenes(photo: Photo, tmp_path: Path, scenes: bool) -> None:
    source = tmp_path / "ade"
    names = {"training": ["ADE_train_1", "ADE_train_2", "ADE_train_3"], "validation": ["ADE_val_1"]}
    for split, stems in names.items():
        for kind in ("images", "annotations"):
            (source / kind / split).mkdir(parents=True)
            for number, stem in enumerate(stems):
                content = photo(number) if kind == "images" else photo(number, "PNG")
                (source / kind / split / f"{stem}.{'jpg' if kind == 'images' else 'png'}").write_bytes(content)
    if scenes:
        (source / "sceneCategories.txt").write_text("ADE_train_1 street\nADE_train_2 attic\nADE_val_1 pub\n")
    train, val = build_shards(str(source), str(tmp_path / "shards"), workers=1)
    assert (labels(train.folder), labels(val.folder)) == (([2, 0, -1], [1]) if scenes else ([-1] * 3, [-1]))
    assert load(val.folder).manifest.classes == (("attic", "pub", "street") if scenes else ())


# Mistakes


def refuse(sentence: str, src: Path, dst: Path, **options: Any) -> None:
    before = content_of(dst) if dst.is_dir() else {}
    with pytest.raises(DataError, match=sentence) as caught:
        build_shards(str(src), str(dst), workers=1, **options)
    assert "\n" not in str(caught.value)
    assert (content_of(dst) if dst.is_dir() else {}) == before, "nothing is half written"


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    dst = tmp_path / "shards"
    refuse("is neither a folder nor a tar", tmp_path / "nowhere", dst)
    (tmp_path / "empty").mkdir()
    refuse("holds no images", tmp_path / "empty", dst)


def test_a_source_without_a_good_image_leaves_nothing(tmp_path: Path) -> None:
    for name in ("train/ant/1.jpg", "val/ant/2.jpg"):
        (tmp_path / "source" / name).parent.mkdir(parents=True)
        (tmp_path / "source" / name).write_bytes(b"words")
    refuse(
        "none of the 1 images of train can be used, the first, .*1.jpg, is not an image",
        tmp_path / "source",
        tmp_path / "d",
    )
    (tmp_path / "mine").mkdir()
    refuse("none of the 1 images", tmp_path / "source", tmp_path / "mine")


@pytest.mark.parametrize("cut", [0, 512, 700, 1536, -1024, -512])
def test_a_truncated_tar_is_refused(photo: Photo, tmp_path: Path, cut: int) -> None:
    path = foreign_tar(tmp_path / "source" / "0.tar", {"1.jpg": photo(1), "2.jpg": photo(2)})
    content = path.read_bytes()
    end = len(content.rstrip(b"\0")) + 512  # within the padding of the last member's block
    path.write_bytes(content[:cut] if cut >= 0 else content[: end - end % 512])
    refuse("0.tar is truncated", tmp_path / "source", tmp_path / "shards")


def test_a_compressed_tar_is_refused(photo: Photo, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("1.jpg"), io.BytesIO())
    refuse("is compressed with gzip, so samples cannot be read by offset", tmp_path / "0.tar", tmp_path / "shards")


def test_damaged_annotations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    (tmp_path / "coco" / "annotations" / "instances_train2017.json").write_text('{"images": [{"id": 3}]}')
    refuse("instances_train2017.json is damaged", tmp_path / "coco", tmp_path / "shards")


def test_a_destination_of_something_else_is_refused(photos: Path, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    refuse("has files that are not of a shard build", photos, tmp_path)
    refuse("is a file", photos, tmp_path / "thesis.tex")
    refuse("is inside the source", photos, photos / "train" / "shards")
    copy = shutil.copytree(finished, tmp_path / "copy")
    refuse("has another build: shard_mb was 1, now 2", photos, copy, shard_mb=2)


@pytest.mark.usefixtures("small_tars")
def test_a_source_that_has_changed_is_refused(photos: Path, photo: Photo, tmp_path: Path) -> None:
    source = shutil.copytree(photos, tmp_path / "source")
    build_shards(str(source), str(tmp_path / "shards"), workers=1)
    (source / "train" / "bee" / "99.jpg").write_bytes(photo(99))
    refuse("has another build: the list of source files changed", source, tmp_path / "shards")
    assert not (tmp_path / "shards" / PARTS).exists()


@pytest.mark.usefixtures("small_tars")
@pytest.mark.parametrize("source", ["folder", "tars", "pattern"])
def test_a_source_is_the_same_however_it_is_written(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    real, ending = {
        "folder": (photos, ""),
        "tars": (finished, ""),
        "pattern": (finished / "train", "/train-0*.tar"),
    }[source]
    place = tmp_path / "a [1]"  # which a pattern would take for a1
    place.mkdir()
    (place / "source").symlink_to(real)
    (tmp_path / "b").symlink_to(place)
    monkeypatch.setenv("HOME", str(place))
    shards = str(tmp_path / "shards")
    monkeypatch.chdir(tmp_path / "b")
    first = build_shards(f"source{ending}", shards, workers=1, shard_mb=1)
    before = content_of(tmp_path / "shards")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*")}
    for number, (folder, src) in enumerate(
        [
            (tmp_path, f"{real}{ending}"),
            (tmp_path, "~/source" + ending),
            (place, f"./source/{ending}"),
            (real, f"../{real.name}{ending}"),
            (tmp_path, f"b/../{place.name}/source" if not ending else f"{real}/.{ending}"),
        ]
    ):
        monkeypatch.chdir(folder)
        assert build_shards(src, shards, workers=1, shard_mb=1) == first, src
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*")} == times, src
        next((tmp_path / "shards").rglob("manifest.json")).unlink()  # a build that goes on
        assert build_shards(src, shards, workers=1, shard_mb=1) == first, src
        assert content_of(tmp_path / "shards") == before, number
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*")}
    shutil.copytree(real, tmp_path / "other")
    with pytest.raises(DataError, match="has another build: source was "):
        build_shards(f"{tmp_path / 'other'}{ending}", shards, workers=1, shard_mb=1)


def test_a_named_pipe_in_the_place_of_annotations_is_not_waited_for(tmp_path: Path) -> None:
    annotations = tmp_path / "coco" / "annotations"
    annotations.mkdir(parents=True)
    os.mkfifo(annotations / "instances_train2017.json")

    def ring(number: int, frame: object) -> None:
        raise TimeoutError("the build waits for the pipe")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    try:
        with pytest.raises(
            DataError, match=r"instances_train2017.json is damaged or not a COCO list of images"
        ) as caught:
            find_source(str(tmp_path / "coco"))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not isinstance(caught.value.__cause__, TimeoutError)
