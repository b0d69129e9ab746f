from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from dmjd.data.stream.tars import TarImage, tar_images
from dmjd.errors import BadImage, DataError

STALL = 10.0


def outcome(location: str) -> tuple[list[TarImage], BadImage | None]:
    """The images that came, and what was then said of the tar."""
    images = []
    try:
        for image in tar_images(location, STALL):
            images.append(image)
    except BadImage as bad:
        return images, bad
    return images, None


@pytest.fixture
def tar(tmp_path: Path, write_tar: Callable[..., Path]) -> Path:
    return write_tar(tmp_path / "a.tar", range(3))


def test_a_path_a_url_and_a_command_give_the_same(tar: Path) -> None:
    whole, bad = outcome(str(tar))
    assert bad is None
    assert [image.name for image in whole] == [f"{tar}: {number:05d}" for number in range(3)]
    for location in (f"file://{tar}", f"pipe:cat {tar}", f"pipe:gzip -c {tar} | gunzip"):
        images, bad = outcome(location)
        assert bad is None
        assert [image.data for image in images] == [image.data for image in whole]


def test_a_tar_cut_anywhere_is_noticed_unless_nothing_is_lost(tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    content, cut_tar = write_tar(tmp_path / "whole.tar", range(2)).read_bytes(), tmp_path / "cut.tar"
    whole = [image.data for image in outcome(f"{tmp_path}/whole.tar")[0]]
    written = len(content.rstrip(b"\0"))  # what follows is padding, the end mark and more padding
    for cut in (*range(0, written, 7), *range(written - 8, written + 2048, 3)):
        cut_tar.write_bytes(content[:cut])
        images, bad = outcome(str(cut_tar))
        assert [image.data for image in images] == whole[: len(images)]
        if bad is None:
            assert len(images) == len(whole)
            assert cut >= written + 1024
    assert bad is None


def test_what_is_wrong_is_said(tar: Path, tmp_path: Path) -> None:
    content = tar.read_bytes()
    for name, data in (
        ("packed", gzip.compress(content)),
        ("empty", b""),
        ("page", b"<html>" * 900),
        ("cut", content[:1600]),
        ("two", content + content),
        ("header", content[:2048] + b"\1" * 512 + content[2560:]),
    ):
        (tmp_path / name).write_bytes(data)
    for location, kind, said in (
        (f"{tmp_path}/packed", "unreadable", "is compressed with gzip"),
        (f"{tmp_path}/empty", "truncated", "is truncated or not a tar"),
        (f"{tmp_path}/page", "truncated", "is truncated or not a tar"),
        (f"{tmp_path}/cut", "truncated", "is truncated or not a tar (unexpected end of data)"),
        (f"{tmp_path}/two", "unreadable", "data follows after its end mark"),
        (f"{tmp_path}/header", "unreadable", "is damaged at byte 2048: data follows after its end mark"),
        (f"{tmp_path}/absent", "missing", "does not exist"),
        (f"{tmp_path}", "unreadable", "cannot be read (Is a directory)"),
        ("http://127.0.0.1:9/a.tar", "unreadable", "Connect call failed"),
        ("pipe:true", "truncated", "is truncated"),
        ("pipe:exit 4", "unreadable", "cannot be read (ended with exit code 4)"),
        (f"pipe:cat {tar}; exit 4", "unreadable", "cannot be read (ended with exit code 4)"),
    ):
        bad = outcome(location)[1]
        assert bad is not None, location
        assert (bad.name, bad.kind) == (location, kind)
        assert said in bad.fault
        assert "\n" not in str(bad)


def test_a_command_that_fails_has_given_what_it_gave(tar: Path) -> None:
    images, bad = outcome(f"pipe:cat {tar}; exit 4")
    assert len(images) == 3
    assert bad is not None


def test_a_protocol_that_there_is_not_is_no_bad_tar() -> None:
    with pytest.raises(DataError, match="gopher") as caught:
        list(tar_images("gopher://x/a.tar", STALL))
    assert not isinstance(caught.value, BadImage)


def test_of_members_with_one_name_the_first_counts(tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("a.jpg", b"1"), ("a.jpg", b"2"), ("a.left.png", b"3"), ("b.txt", b"4"), ("c.JPEG", b"5")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    images, bad = outcome(str(tmp_path / "a.tar"))
    assert bad is None
    assert [image.data for image in images] == [b"1", b"5"]
