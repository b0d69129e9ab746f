from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from dmjd.data.shards.index import load
from dmjd.data.shards.network import Patience
from dmjd.data.shards.sample import image_bytes
from dmjd.data.shards.verify import verify
from tests.data.shards.http_server import Server

Command = Callable[..., tuple[int, str, str]]
Photo = Callable[..., bytes]


def test_help_shows_every_form(dmjd: Command) -> None:
    code, out, err = dmjd("shards", "--help")
    assert (code, err) == (0, "")
    usages = out.split("\n\n")[2].splitlines()
    forms = [line.split()[2] for line in usages if line.startswith("  dmjd")]
    assert forms == ["build", "index", "verify", "stat", "show"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "takes one of build, index, verify, stat, show"),
        (["biuld"], "takes one of build, index, verify, stat, show"),
        (["build", "here"], "usage: dmjd shards build SRC DST"),
        (["build", "a", "b", "wrkers=2"], "wrkers is not a key of dmjd shards build; did you mean workers?"),
        (["build", "a", "b", "workers=0"], "workers must be an integer of at least 1, got 0"),
        (["build", "a", "b", "workers=²"], "workers must be an integer of at least 1, got ²"),
        (["build", "a", "b", "val_percent=100"], "val_percent must be a number from 0 to below 100, got 100"),
        (["build", "a", "b", "val_percent=5", "val_seed=-1"], "val_seed must be an integer of at least 0, got -1"),
        (["build", "a", "b", "channels=4"], "channels must be 1 or 3, got 4"),
        (["verify", "nowhere"], "nowhere is not a shard set"),
        (["stat", "nowhere"], "nowhere is not a shard set"),
        (["show", "a", "many"], "how many samples to show, got many"),
        (["show", "a", "²"], "how many samples to show, got ²"),
        (["index", "nowhere.tar", "there"], "nowhere.tar is not a tar"),
    ],
)
def test_a_mistake_is_one_sentence(
    dmjd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dmjd("shards", *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err
    assert not (tmp_path / "there").exists()


def test_build_then_verify(dmjd: Command, photos: Path, tmp_path: Path) -> None:
    code, out, err = dmjd("shards", "build", str(photos), str(tmp_path / "shards"), "workers=1")
    assert (code, err) == (0, "")
    report = tmp_path / "shards" / "train" / "rejects.jsonl"
    assert out.splitlines() == [
        f"{tmp_path}/shards/train: 24 samples in 1 shard(s); rejected 1 image(s) (1 magic), listed in {report}",
        f"{tmp_path}/shards/val: 4 samples in 1 shard(s), no image rejected",
    ]
    code, out, err = dmjd("shards", "verify", str(tmp_path / "shards"), "workers=1", "decode=true")
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == f"{tmp_path}/shards/val: 4 samples in 1 shard(s), all intact"


def test_verify_fails_for_damage(dmjd: Command, finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished / "val", tmp_path / "val")
    code, out, err = dmjd("shards", "verify", str(copy), "decode=yes")
    assert (code, out, err) == (2, "", "error: decode must be true or false, got yes\n")
    tar = copy / "val-000000.tar"
    tar.write_bytes(tar.read_bytes()[:-1])
    code, out, err = dmjd("shards", "verify", str(copy), "workers=1")
    assert code == 2
    assert out.splitlines()[0] == f"{copy}: 4 samples in 1 shard(s), 1 fault(s)"
    assert len(out.splitlines()) == 2
    assert err.startswith(f"error: {copy} has 1 fault(s), the first: {tar} has ")


def test_stat_counts(dmjd: Command, finished: Path) -> None:
    code, out, err = dmjd("shards", "stat", str(finished))
    assert (code, err) == (0, "")
    train = out.split("\n\n")[0].splitlines()
    facts = dict(line.split(maxsplit=1) for line in train[1:8])
    records = load(finished / "train").records
    assert facts["samples"].startswith("24 in ")
    assert facts["labels"] == "2 classes of 12 to 12 samples"
    assert facts["formats"] == "JPEG 100.0 % (of 24)"
    assert facts["bytes"].startswith(f"{records['size'].min()} to {records['size'].max()}, ")
    assert facts["height"].startswith("40 to 51, median ")
    counts = [int(line.split()[1]) for line in train[10:] if line.split()[0] != "2048"]
    assert sum(counts) == counts[0] == 24


def test_show_writes_a_contact_sheet(
    dmjd: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sheets = []
    for name, output in (("a.png", tmp_path / "a.png"), ("b.png", "~/b.png")):
        code, out, err = dmjd("shards", "show", str(finished), "6", f"output={output}")
        assert (code, out.strip(), err) == (0, str(tmp_path / name), "")
        sheets.append((tmp_path / name).read_bytes())
    assert sheets[0] == sheets[1]
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.width > sheet.height > 300
        assert np.asarray(sheet.convert("L")).std() > 20
    code, _, err = dmjd("shards", "show", str(finished), "6", "split=test")
    assert (code, err) == (2, f"error: {finished} has no split test, only train and val; choose with split=\n")


def test_show_and_stat_name_a_sample_whose_bytes_are_others(dmjd: Command, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "train", tmp_path / "shards"))
    shards = load(folder)
    tar = Path(shards.location(0))
    content, place = bytearray(tar.read_bytes()), int(shards.records["offset"][0]) + 300
    content[place] ^= 1
    for damaged, fault in ((content, "has another crc32 than in the index"), (content[:place], "has 300 of")):
        tar.write_bytes(damaged)
        for words in (("show", str(folder), "3", f"output={tmp_path / 'x.png'}"), ("stat", str(folder))):
            code, _, err = dmjd("shards", *words)
            assert code == 2
            assert err.startswith(f"error: {shards.name(0)} {fault}")
    assert not (tmp_path / "x.png").exists()


@pytest.fixture
def foreign(photo: Photo, tmp_path: Path) -> Path:
    """Two tars that webdataset wrote, of four samples each, the last of which is damaged."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for tar in range(2):
        with webdataset.TarWriter(str(folder / f"{tar}.tar")) as writer:
            for number in range(4):
                content = photo(4 * tar + number, size=(30 + number, 50))
                writer.write({"__key__": f"k{number}", "jpg": content[: 300 if number == 3 else None], "cls": number})
    return folder


@pytest.mark.parametrize("inside", [True, False])
def test_foreign_tars_are_indexed_where_they_are(
    dmjd: Command, foreign: Path, photo: Photo, tmp_path: Path, inside: bool
) -> None:
    before = {path: path.read_bytes() for path in foreign.iterdir()}
    folder = foreign if inside else tmp_path / "index"
    code, out, err = dmjd("shards", "index", str(foreign / "*.tar"), str(folder), "workers=1")
    assert (code, err) == (0, "")
    assert "6 samples in 2 shard(s); rejected 2 image(s)" in out
    assert {path: path.read_bytes() for path in before} == before
    shards = load(folder)
    assert shards.manifest.shards[1].url == ("1.tar" if inside else str(foreign / "1.tar"))
    assert shards.records["label"].tolist() == [0, 1, 2] * 2
    assert shards.manifest.classes == ("0", "1", "2")
    assert shards.records["height"].tolist() == [30, 31, 32] * 2
    assert image_bytes(shards, 4) == photo(5, size=(31, 50))
    assert verify(shards, workers=1, decode=True) == []
    assert dmjd("shards", "index", str(foreign / "*.tar"), str(folder))[0] == 2, "an index is not written over"


def test_tars_behind_a_url_are_indexed_there(dmjd: Command, foreign: Path, tmp_path: Path) -> None:
    url = f"file://{foreign}/0.tar"
    assert dmjd("shards", "index", url, str(tmp_path / "index"))[0] == 0
    shards = load(tmp_path / "index")
    assert (shards.location(0), shards.manifest.samples) == (url, 3)
    assert verify(shards, workers=1) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_server_that_falters_is_asked_again(
    dmjd: Command, server: Server, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp, with which fsspec reads HTTP")
    quick = Patience(attempts=3, first_pause=0.01, longest_pause=0.02, stall=5)
    for module in ("location", "sample"):
        monkeypatch.setattr(f"dmjd.data.shards.{module}.PATIENCE", quick)
    server.root = finished
    shards, url = load(finished / "train"), server.url("train").rstrip("/")
    remote = load(url)
    assert load(url).manifest == shards.manifest
    server.faults = ["503", "cut"]
    assert verify(remote, workers=1) == []
    server.faults = ["503", "cut"]
    assert image_bytes(remote, 5) == image_bytes(shards, 5)
    tar = f"{url}/{shards.manifest.shards[0].url}"
    server.faults = ["cut", "503"]
    assert dmjd("shards", "index", tar, str(tmp_path / "index"))[0] == 0
    assert load(tmp_path / "index").manifest.shards[0].sha256 == shards.manifest.shards[0].sha256
    server.faults = ["503"] * 3
    code, _, err = dmjd("shards", "index", tar, str(tmp_path / "other"))
    assert (code, (tmp_path / "other").exists()) == (2, False)
    assert "cannot be fetched" in err.splitlines()[-1]


def test_a_disk_that_cannot_be_written_is_one_sentence(
    dmjd: Command, foreign: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, _, err = dmjd("shards", "index", str(foreign / "*.tar"), str(tmp_path / "file" / "index"), "workers=1")
    assert code == 2
    assert err.startswith(f"error: cannot write {tmp_path / 'file' / 'index'}: Not a directory; ")
    code, _, err = dmjd("shards", "show", str(finished), "2", f"output={tmp_path / 'nowhere' / 'x.png'}")
    assert code == 2
    assert err.startswith(f"error: cannot write {tmp_path / 'nowhere' / 'x.png'}: No such file or directory; ")


def test_a_tar_given_by_two_names_is_given_twice(dmjd: Command, foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(foreign)
    code, _, err = dmjd("shards", "index", str(foreign / "0.tar"), f"{tmp_path}/link/0.tar", str(tmp_path / "index"))
    assert (code, err) == (2, f"error: {foreign / '0.tar'} is given 2 times; give every tar once\n")


def test_a_set_may_be_all_held_out(dmjd: Command, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "val", tmp_path / "shards" / "val")
    code, _, err = dmjd("shards", "show", str(tmp_path / "shards"), "2")
    assert (code, err) == (2, f"error: {tmp_path / 'shards'} has no split train, only val; choose with split=\n")


def test_a_foreign_tar_cut_anywhere_is_refused(dmjd: Command, foreign: Path, tmp_path: Path) -> None:
    """webdataset itself says nothing at many of these places, and reads fewer samples."""
    path = foreign / "0.tar"
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))
    end += -end % 512 + 1024  # blocks after the end mark are padding
    for cut in sorted({*range(0, end, 512), *range(1, end, 311)}):
        path.write_bytes(content[:cut])
        code, out, err = dmjd("shards", "index", str(path), str(tmp_path / "index"), "workers=1")
        assert (code, out) == (2, ""), cut
        assert "is truncated" in err, cut
        assert not (tmp_path / "index").exists()
    path.write_bytes(content[:end])
    assert dmjd("shards", "index", str(path), str(tmp_path / "index"), "workers=1")[0] == 0
