from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data

from dmjd.data.decode import check_header
from dmjd.data.folder import ImageFolder
from dmjd.errors import BadImage, DataError

PHOTO = data.astronaut()[:64, :80]


def save(path: Path, image: Image.Image | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.fromarray(PHOTO)).save(path)
    return path


def names(folder: ImageFolder, root: Path) -> list[str]:
    return [os.path.relpath(folder.name(index), root) for index in range(len(folder))]


def labels(folder: ImageFolder) -> list[int]:
    return [folder.label(index) for index in range(len(folder))]


def truncated_jpeg(path: Path) -> Path:
    buffer = io.BytesIO()
    Image.fromarray(PHOTO).save(buffer, "JPEG")
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    return path


def test_class_folders_are_numbered_by_sorted_name_and_files_sorted_within(tmp_path: Path) -> None:
    for name in ("zebra/2.png", "zebra/10.png", "ant/b.JPG", "ant/deep/a.png", "ant/.hidden.png", ".cache/x.png"):
        save(tmp_path / name)
    (tmp_path / "zebra" / "readme.txt").write_text("not an image")
    folder = ImageFolder(str(tmp_path), "train", channels=3)
    assert names(folder, tmp_path) == ["ant/b.JPG", "ant/deep/a.png", "zebra/10.png", "zebra/2.png"]
    assert labels(folder) == [0, 0, 1, 1]
    assert folder.num_classes == 2


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for name in ("b.png", "a.webp", "c.TIFF", "d.bmp"):
        save(tmp_path / name)
    folder = ImageFolder(str(tmp_path), "train", channels=3)
    assert names(folder, tmp_path) == ["a.webp", "b.png", "c.TIFF", "d.bmp"]
    assert (labels(folder), folder.num_classes) == ([-1] * 4, 0)


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_splits_share_the_class_numbers_of_training(tmp_path: Path, held_out: str) -> None:
    for name in ("train/ant/1.png", "train/bee/1.png", "train/cow/1.png", f"{held_out}/cow/9.png"):
        save(tmp_path / name)
    train, test = (ImageFolder(str(tmp_path), split, channels=3) for split in ("train", "test"))
    assert names(train, tmp_path) == ["train/ant/1.png", "train/bee/1.png", "train/cow/1.png"]
    assert names(test, tmp_path) == [f"{held_out}/cow/9.png"]
    assert (labels(test), test.num_classes) == ([2], 3)


def test_a_test_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "train/ant/1.png")
    save(tmp_path / "val/bee/1.png")
    with pytest.raises(DataError, match="bee does not exist in the training split"):
        ImageFolder(str(tmp_path), "test", channels=3)


def test_no_test_split_is_invented(tmp_path: Path) -> None:
    save(tmp_path / "ant/1.png")
    with pytest.raises(DataError, match="has no test split; put held-out images into its folder val/ or test/"):
        ImageFolder(str(tmp_path), "test", channels=3)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "holds no images; files must end in .jpg, .jpeg, .png"),
        (["notes/readme.txt"], "holds no images"),
        (["cover.png", "ant/1.png"], "mixes class folders with images beside them (cover.png)"),
        (["val/ant/1.png"], "has a folder val/ but no train/"),
    ],
)
def test_other_layouts_are_refused(tmp_path: Path, files: list[str], sentence: str) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(DataError) as caught:
        ImageFolder(str(tmp_path), "train", channels=3, check="none")
    assert sentence in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        ImageFolder(str(tmp_path / "nowhere"), "train", channels=3)


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere/1.png")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/ant").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "root")
    folder = ImageFolder(str(tmp_path / "root"), "train", channels=3)
    assert names(folder, tmp_path / "root") == ["ant/1.png"]


def test_names_survive_any_bytes_and_negative_indices(tmp_path: Path) -> None:
    for name in (b"\xff\xfe.png", "ünï.png".encode(), b"a b.png"):
        (tmp_path / os.fsdecode(name)).touch()
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="none")
    assert {os.fsencode(name) for name in names(folder, tmp_path)} == {b"\xff\xfe.png", "ünï.png".encode(), b"a b.png"}
    assert folder.name(-1) == folder.name(2)
    with pytest.raises(IndexError):
        folder.name(3)


def test_bytes_that_are_no_image_are_named_once_with_a_count(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(b"<html>moved</html>")
    save(tmp_path / "good.png")
    with pytest.raises(DataError, match=r"0\.png cannot be read as an image \(not a supported format\), and 2 more"):
        ImageFolder(str(tmp_path), "train", channels=3)


def test_a_truncated_jpeg_passes_headers_fails_decode_and_is_named_when_read(tmp_path: Path) -> None:
    path = truncated_jpeg(tmp_path / "cut.jpg")
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="header")
    with pytest.raises(BadImage, match=r"cut\.jpg cannot be read as an image \(") as caught:
        folder.image(0)
    assert caught.value.kind == "truncated"
    with pytest.raises(DataError, match=r"cut\.jpg cannot be read as an image \("):
        ImageFolder(str(tmp_path), "train", channels=3, check="decode")
    path.unlink()
    with pytest.raises(DataError, match=r"cut\.jpg cannot be read as an image \(No such file"):
        folder.image(0)


def test_an_image_smaller_than_the_crop_is_refused_with_sizes_and_ways_out(tmp_path: Path) -> None:
    save(tmp_path / "exact.png", Image.new("RGB", (32, 32)))
    ImageFolder(str(tmp_path), "train", channels=3, min_size=(32, 32))
    save(tmp_path / "small.png", Image.new("RGB", (40, 20)))
    with pytest.raises(DataError) as caught:
        ImageFolder(str(tmp_path), "train", channels=3, min_size=(32, 32))
    for part in ("small.png (20x40) cannot fill the 32x32 crop", "data.image_size", "data.check=none"):
        assert part in str(caught.value)
    assert len(ImageFolder(str(tmp_path), "train", channels=3, check="none", min_size=(32, 32))) == 2


@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_image_is_converted_to_the_channels_asked_for(tmp_path: Path, channels: int) -> None:
    grey = PHOTO[..., 0]
    rgba = np.dstack([PHOTO, np.full(grey.shape, 7, np.uint8)])
    palette = Image.fromarray(grey).convert("P")
    kinds = {
        "grey": (Image.fromarray(grey), np.dstack([grey] * 3)),
        "rgba": (Image.fromarray(rgba), PHOTO),
        "rgb": (Image.fromarray(PHOTO), PHOTO),
        "palette": (palette, np.asarray(palette.convert("RGB"))),
        "sixteen": (Image.fromarray(grey.astype(np.uint16) * 256 + 9), np.dstack([grey] * 3)),
    }
    for name, (image, _) in kinds.items():
        save(tmp_path / f"{name}.png", image)
    palette.save(tmp_path / "transparent.png", transparency=bytes(range(256)))
    kinds["transparent"] = kinds["palette"]
    folder = ImageFolder(str(tmp_path), "train", channels=channels, check="decode")  # type: ignore[arg-type]
    assert len(folder) == len(kinds)
    for index in range(len(folder)):
        pixels = folder.image(index)
        _, rgb = kinds[Path(folder.name(index)).stem]
        assert pixels.dtype == np.uint8
        assert pixels.shape == (64, 80, channels)
        if channels == 3:
            np.testing.assert_array_equal(pixels, rgb)
        else:  # ITU-R 601 luma, as Pillow documents it
            luma = rgb @ np.array([299, 587, 114]) / 1000
            assert np.abs(pixels[..., 0] - luma).max() <= 1


def test_pixels_of_32_bits_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "float.tiff", Image.fromarray(PHOTO[..., 0].astype(np.float32)))
    with pytest.raises(DataError, match=r"float\.tiff cannot be read as an image \(its pixels have 32 bits"):
        ImageFolder(str(tmp_path), "train", channels=1)


def test_the_exif_orientation_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to show"
    Image.fromarray(PHOTO).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(ImageFolder(str(tmp_path), "train", channels=3).image(0), PHOTO)


def test_state_that_grows_with_the_data_set_is_numpy(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index}.png").touch()
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="none")
    assert folder.bad == {}  # grows with what is tolerated only
    grown = [value for value in vars(folder).values() if not isinstance(value, (str, int, tuple, dict))]
    assert len(grown) == 3
    assert all(isinstance(value, np.ndarray) and value.dtype != object for value in grown)


def test_every_kind_of_bad_file_is_told_apart_and_the_reason_given(tmp_path: Path) -> None:
    truncated_jpeg(tmp_path / "cut.jpg")
    save(tmp_path / "deleted.png")
    (tmp_path / "empty.jpg").touch()
    save(tmp_path / "loop.png")
    save(tmp_path / "small.png", Image.new("RGB", (30, 20)))
    (tmp_path / "text.png").write_text("not found")
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="header", min_size=(24, 24), max_bad_percent=50)
    (tmp_path / "deleted.png").unlink()
    (tmp_path / "loop.png").unlink()
    (tmp_path / "loop.png").symlink_to("loop.png")
    expected = [
        ("truncated", "cannot be read as an image ("),
        ("missing", "cannot be read as an image (No such file or directory)"),
        ("truncated", "cannot be read as an image (the file is empty)"),
        ("unreadable", "cannot be read as an image (Too many levels of symbolic links)"),
        ("too small", "(20x30) cannot fill the 24x24 crop (height x width)"),
        ("undecodable", "cannot be read as an image (not a supported format)"),
    ]
    for index, (kind, fault) in enumerate(expected):
        with pytest.raises(BadImage) as caught:
            folder.image(index)
        assert (caught.value.kind, caught.value.name) == (kind, folder.name(index))
        assert str(caught.value).startswith(f"{folder.name(index)} {fault}")
    assert {index: bad.kind for index, bad in folder.bad.items()} == {
        2: "truncated",
        4: "too small",
        5: "undecodable",
    }


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "webp", "tiff"])
def test_a_file_cut_anywhere_is_a_bad_image_or_still_decodes(tmp_path: Path, ending: str) -> None:
    whole = save(tmp_path / f"cut.{ending}").read_bytes()
    folder = ImageFolder(str(tmp_path), "train", channels=3)
    kinds = []
    for length in np.linspace(0, len(whole) - 1, 12).astype(int):
        (tmp_path / f"cut.{ending}").write_bytes(whole[:length])
        try:
            assert folder.image(0).shape == (64, 80, 3)
        except BadImage as bad:
            kinds.append(bad.kind)
    assert kinds[0] == "truncated"
    assert len(kinds) >= 10
    assert set(kinds) <= {"truncated", "undecodable"}


@pytest.mark.parametrize("check", ["header", "decode"])
def test_the_check_stops_above_the_rate_and_keeps_what_it_tolerates(tmp_path: Path, check: str) -> None:
    for index in range(50):
        save(tmp_path / f"{index:02d}.bmp", Image.new("RGB", (4, 4)))
    for name in ("07", "31"):
        (tmp_path / f"{name}.bmp").write_text("not found")

    def folder(percent: float) -> ImageFolder:
        return ImageFolder(str(tmp_path), "train", 3, check, max_bad_percent=percent)  # type: ignore[arg-type]

    tolerated = folder(4.0)
    assert len(tolerated) == 50
    assert {index: bad.name for index, bad in tolerated.bad.items()} == {i: tolerated.name(i) for i in (7, 31)}
    with pytest.raises(DataError) as caught:
        folder(3.9)
    for part in (
        "07.bmp cannot be read as an image (not a supported format), and 1 more",
        "or raise data.max_bad_percent=3.9",
    ):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_small_images_are_judged_by_the_same_rate(tmp_path: Path) -> None:
    for index in range(10):
        save(tmp_path / f"{index}.bmp", Image.new("RGB", (8, 8) if index % 4 else (8, 7)))
    assert list(ImageFolder(str(tmp_path), "train", 3, min_size=(8, 8), max_bad_percent=30).bad) == [0, 4, 8]
    with pytest.raises(DataError, match=r"0\.bmp \(7x8\) cannot fill the 8x8 crop .*, and 2 more; lower data"):
        ImageFolder(str(tmp_path), "train", 3, min_size=(8, 8), max_bad_percent=29)
    unchecked = ImageFolder(str(tmp_path), "train", 3, "none", min_size=(8, 8))
    assert unchecked.image(0).shape == (7, 8, 3)


def test_what_is_no_file_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ant/1.png", "bee/2.png"):
        save(tmp_path / name)
    os.mkfifo(tmp_path / "ant/pipe.png")
    os.mkfifo(tmp_path / "bee/pipe.jpg")
    (tmp_path / "ant/self.png").symlink_to("self.png")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "bee/gone.png").symlink_to("nowhere")
    (tmp_path / "bee/up").symlink_to(tmp_path)
    (tmp_path / "ant/null.png").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "ant/socket.png"))
        with caplog.at_level("WARNING", logger="dmjd"):
            folder = ImageFolder(str(tmp_path), "train", channels=3, check="decode")
    assert names(folder, tmp_path) == ["ant/1.png", "bee/2.png"]
    kinds = "dangling link: 1, device: 1, link to a folder above it: 1, link to itself: 2, named pipe: 2, socket: 1"
    assert caplog.messages == [f"{tmp_path}: skipped 8 entries ({kinds})"]


def test_a_file_that_becomes_a_pipe_is_a_bad_image_and_nobody_waits(tmp_path: Path) -> None:
    save(tmp_path / "1.png")
    folder = ImageFolder(str(tmp_path), "train", channels=3)
    (tmp_path / "1.png").unlink()
    os.mkfifo(tmp_path / "1.png")
    for read in (lambda: folder.image(0), lambda: check_header(folder.name(0), (1, 1))):
        with pytest.raises(BadImage, match=r"cannot be read as an image \(a named pipe\)") as caught:
            read()
        assert caught.value.kind == "unreadable"
