from __future__ import annotations

import hashlib
import io
import os
import re
import socket
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from skimage import data

from dmjd.compose import compose, from_yaml, to_yaml
from dmjd.config import DataConfig, PretrainConfig, first_difference
from dmjd.config.data import ENDINGS
from dmjd.data import decode
from dmjd.data.build import build_dataset, resolve_auto, training_source
from dmjd.data.decode import check_header
from dmjd.data.folder import ImageFolder
from dmjd.data.held_out import HeldOut, one_sided
from dmjd.errors import BadImage, ConfigError, DataError, NoSplit

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


@pytest.mark.parametrize("percent", [1e-7, 99.9999])
def test_a_percentage_that_works_is_named_where_one_side_is_empty(percent: float) -> None:
    paths = ["a/1.png", "b/1.png", "c/1.png"]
    rule = HeldOut(percent, seed=4)
    with pytest.raises(DataError, match="need at least one each; set ") as caught:
        rule.require_both(rule.sides(paths), paths, "photos")
    (named,) = re.findall(r"val_percent=(\S+) to hold out one", str(caught.value))
    assert sum(HeldOut(float(named), seed=4).sides(paths)) == 1


def test_a_test_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "train/ant/1.png")
    save(tmp_path / "val/bee/1.png")
    with pytest.raises(DataError, match="bee has no images in the training split"):
        ImageFolder(str(tmp_path), "test", channels=3)


def test_no_test_split_is_invented(tmp_path: Path) -> None:
    save(tmp_path / "ant/1.png")
    with pytest.raises(
        NoSplit,
        match=r"has no test split; set data\.val_percent=10 .*, or put held-out images into its folder val/ or test/",
    ):
        ImageFolder(str(tmp_path), "test", channels=3)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "holds no images; files must end in .jpg, .jpeg, .jpe"),
        (["notes/readme.txt", "a.CR2"], "holds no images (.cr2 files: 1, .txt files: 1, empty folders: 1); files"),
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
        folder = ImageFolder(str(tmp_path), "train", channels=3, check="decode")
    with caplog.at_level("INFO", logger="dmjd"):
        folder.report()
    assert names(folder, tmp_path) == ["ant/1.png", "bee/2.png"]
    kinds = (
        "links to themselves: 2, named pipes: 2, dangling links: 1, devices: 1, links to a folder above them: 1, "
        "sockets: 1"
    )
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


# Which files are found


def encoded(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PHOTO).save(buffer, kind, **options)
    return buffer.getvalue()


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    **{ending: ("JPEG", {}) for ending in ("jpe", "JFIF", "jif", "mpo")},
    **{"gif": ("GIF", {}), "dib": ("BMP", {}), "apng": ("PNG", {}), "ppm": ("PPM", {}), "TGA": ("TGA", {"rle": True})},
    **{"avif": ("AVIF", {"quality": 95}), "jp2": ("JPEG2000", {}), "j2k": ("JPEG2000", {"no_jp2": True})},
}


def test_files_of_all_common_formats_are_listed_and_read_by_content(tmp_path: Path) -> None:
    for number, (ending, (kind, options)) in enumerate(FILES.items()):
        (tmp_path / f"{number:02d}.{ending}").write_bytes(encoded(kind, **options))
    grey = PHOTO[..., 0].astype(">u2") * 256 + 9
    (tmp_path / "97.pgm").write_bytes(b"P5 80 64 65535\n" + grey.astype(">u2").tobytes())
    (tmp_path / "98.jpg").write_bytes(encoded("PNG"))  # a wrong ending
    (tmp_path / "99.png").write_bytes(encoded("GIF", save_all=True, append_images=[Image.new("RGB", (80, 64))]))
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="decode")
    assert len(folder) == len(FILES) + 3
    assert folder.skipped == {}
    for index in range(len(folder)):  # of the animation, the first picture
        expected = PHOTO[..., :1] if folder.name(index).endswith("97.pgm") else PHOTO
        error = np.abs(folder.image(index).astype(int) - expected).mean()
        assert error < (8 if folder.name(index).endswith((".gif", "99.png")) else 4), folder.name(index)


@pytest.mark.parametrize("name", ["photo.heic", "photo.HIF", "photo.jpg"])
def test_heic_is_read_with_its_package_and_names_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif, which decodes HEIC, is not installed")
    heif.register_heif_opener()
    (tmp_path / name).write_bytes(encoded("HEIF", quality=95))
    save(tmp_path / "other.png")
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="decode")
    (pixels,) = [folder.image(index) for index in (0, 1) if folder.name(index).endswith(name)]
    assert np.abs(pixels.astype(int) - PHOTO).mean() < 4
    monkeypatch.setattr(decode, "_missing", lambda kind: "pillow-heif" if kind == "HEIF" else None)
    with pytest.raises(DataError, match="pip install pillow-heif") as caught:
        ImageFolder(str(tmp_path), "train", 3)
    assert "\n" not in str(caught.value)
    config = DataConfig(name="folder", root=str(tmp_path), image_size=[8, 8], skip_undecodable=True)
    stored = resolve_auto(config).endings
    assert stored is not None
    assert set(ENDINGS) - set(stored.split()) == {".heic", ".heif", ".hif"}
    if name != "photo.jpg":
        skipping = build_dataset(replace(config, endings=stored), "train")
        assert (len(skipping), skipping.skipped) == (1, {f"{Path(name).suffix.lower()} files": 1})
        monkeypatch.undo()  # the package is installed later
        assert len(build_dataset(replace(config, endings=stored), "train")) == 1


@pytest.mark.parametrize("ending", ["gif", "avif", "jp2", "ppm", "tga"])
def test_a_file_of_another_format_cut_anywhere_is_a_bad_image(tmp_path: Path, ending: str) -> None:
    whole = encoded(*FILES.get(ending, ("TGA", {}))[:1])
    for length in np.linspace(0, len(whole) // 2, 6).astype(int):
        (tmp_path / f"cut.{ending}").write_bytes(whole[:length])
        with pytest.raises(BadImage) as caught:
            ImageFolder(str(tmp_path), "train", channels=3, check="none").image(0)
        assert caught.value.kind in ("truncated", "undecodable")


def test_what_is_skipped_is_counted_by_kind_and_is_no_class(tmp_path: Path) -> None:
    for name in ("bee/1.png", "ant/deep/2.PNG", "ant/@eaDir/3.png", "@eaDir/4.jpg", "__MACOSX/bee/._1.png", ".x/5.png"):
        save(tmp_path / name.replace("._1", "5"))
    (tmp_path / "__MACOSX/bee/5.png").rename(tmp_path / "__MACOSX/bee/._5.png")
    for name in ("Empty/deep/deeper", "videos", "ant/none"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("videos/a.MP4", "videos/b.mp4", "notes", "Thumbs.db", "a.\x1b[31m", "bee/.DS_Store", "a.tar.gz"):
        (tmp_path / name).touch()
    folder = ImageFolder(str(tmp_path), "train", channels=3)
    assert names(folder, tmp_path) == ["ant/deep/2.PNG", "bee/1.png"]
    assert folder.classes == ("ant", "bee")
    assert folder.skipped == {
        **{".mp4 files": 2, ".db files": 1, ".gz files": 1, "files of other endings": 2, "hidden files": 1},
        **{"empty folders": 3, "@eaDir folders": 2, "__MACOSX folders": 1, "hidden folders": 1},
    }


def test_classes_without_training_images_do_not_shift_the_labels_of_the_test_split(tmp_path: Path) -> None:
    for name in ("train/ant/1.png", "train/cow/a/b/1.png", "val/cow/1.png"):
        save(tmp_path / name)
    (tmp_path / "train/bee/none").mkdir(parents=True)
    (tmp_path / "extra").mkdir()
    save(tmp_path / "test/cow/2.png")
    train, test = (ImageFolder(str(tmp_path), split, channels=3) for split in ("train", "test"))
    assert train.classes == test.classes == ("ant", "cow")
    assert (labels(train), labels(test)) == ([0, 1], [1])
    unused = "unused test/ beside val/"
    assert train.skipped == {"empty folders": 1, "entries beside train": 1, unused: 1}


@pytest.mark.parametrize("splits", [("training", "validation"), ("Train", "Val"), ("Train", "dev", "TEST")])
def test_folders_that_are_named_as_splits_are_no_classes(tmp_path: Path, splits: tuple[str, ...]) -> None:
    for name in splits:
        save(tmp_path / name / "ant" / "1.png")
    with pytest.raises(DataError, match=rf"folders {', '.join(sorted(splits))}, which would be classes; name those"):
        ImageFolder(str(tmp_path), "train", channels=3)
    save(tmp_path / "dog" / "1.png")
    assert ImageFolder(str(tmp_path), "train", channels=3).classes == tuple(sorted({*splits, "dog"}))


def test_a_configuration_of_an_older_version_lists_what_that_version_did(tmp_path: Path) -> None:
    for name in ("ant/1.png", "ant/2.gif", "bee/3.jpg", "bee/@eaDir/4.jpg", "cow/5.jfif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    new = compose("pretrain", [f"data.root={tmp_path}", "data.check=none"])
    stored = replace(new, data=resolve_auto(new.data))
    text = to_yaml(stored)
    assert ".jfif" in yaml.safe_load(text)["data"]["endings"]
    assert from_yaml(PretrainConfig, text) == stored
    assert first_difference(stored, new) is None
    sections = yaml.safe_load(text)
    for key in ("endings", "skipped_folders", "skip_undecodable", "val_percent", "val_seed"):
        del sections["data"][key]
    old = from_yaml(PretrainConfig, yaml.safe_dump(sections))
    now, before = (build_dataset(config.data, "train") for config in (new, old))
    assert isinstance(now, ImageFolder)
    assert isinstance(before, ImageFolder)
    assert names(now, tmp_path) == ["ant/1.png", "ant/2.gif", "bee/3.jpg", "cow/5.jfif"]
    assert names(before, tmp_path) == ["ant/1.png", "bee/3.jpg", "bee/@eaDir/4.jpg"]
    paths = b"ant/1.pngbee/3.jpgbee/@eaDir/4.jpg"  # the fingerprint of that version
    ends = np.array([9, 18, 34], dtype=np.int64)
    assert before.fingerprint == hashlib.sha256(paths + ends.tobytes()).hexdigest()


# The held-out split


def held_out(paths: list[str], percent: float, seed: int = 0) -> set[str]:
    """The rule of docs/data.md, computed anew."""

    def fraction(path: str) -> float:
        return int(hashlib.sha256(f"{seed}/{path}".encode()).hexdigest()[:13], 16) / 16**13

    return {path for path in paths if 100 * fraction(path) < percent}


def split(root: Path, **values: object) -> tuple[ImageFolder, ImageFolder]:
    config = replace(DataConfig(name="folder", root=str(root), check="none", val_percent=25.0), **values)  # type: ignore[arg-type]
    train, test = build_dataset(config, "train"), build_dataset(config, "test")
    assert isinstance(train, ImageFolder)
    assert isinstance(test, ImageFolder)
    return train, test


def touch(root: Path, paths: list[str]) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


PATHS = [f"{kind}/{number}.jpg" for kind in ("ant", "bee", "ünï") for number in range(40)]


def test_a_split_is_that_of_the_documented_rule_and_each_image_is_on_one_side(tmp_path: Path) -> None:
    touch(tmp_path, PATHS)
    for seed, percent in ((0, 25.0), (3, 7.5)):
        train, test = split(tmp_path, val_percent=percent, val_seed=seed)
        assert set(names(test, tmp_path)) == held_out(PATHS, percent, seed)
        assert sorted(names(train, tmp_path) + names(test, tmp_path)) == sorted(PATHS)
        assert train.classes == test.classes == ("ant", "bee", "ünï")
        for side in (train, test):
            assert [side.classes[label] for label in labels(side)] == [p.split("/")[0] for p in names(side, tmp_path)]
    whole = split(tmp_path, val_percent=60, val_seed=3)[1]
    assert set(names(test, tmp_path)) < set(names(whole, tmp_path))  # a larger percentage adds to the smaller one


def test_no_image_changes_its_side_when_others_come_go_or_the_folder_moves(tmp_path: Path) -> None:
    touch(tmp_path / "a", PATHS)
    before = set(names(split(tmp_path / "a")[1], tmp_path / "a"))
    added = [f"bee/x{number}.jpg" for number in range(30)] + ["cow/1.jpg"]
    touch(tmp_path / "a", added)
    for path in PATHS[::3]:
        (tmp_path / "a" / path).unlink()
    (tmp_path / "a").rename(tmp_path / "moved")
    train, test = split(tmp_path / "moved")
    left = set(PATHS) - set(PATHS[::3])
    assert set(names(test, tmp_path / "moved")) & left == before & left
    assert set(names(test, tmp_path / "moved")) == held_out([*left, *added], 25)
    assert len({train.fingerprint, *(split(tmp_path / "moved", val_seed=seed)[0].fingerprint for seed in (1, 2))}) == 3
    decomposed = unicodedata.normalize("NFD", "ünï")  # as some systems store the name
    (tmp_path / "moved" / "ünï").rename(tmp_path / "moved" / decomposed)
    other = {unicodedata.normalize("NFC", name) for name in names(split(tmp_path / "moved")[1], tmp_path / "moved")}
    assert other == set(names(test, tmp_path / "moved"))


def test_a_folder_train_alone_is_split_by_paths_below_the_root(tmp_path: Path) -> None:
    inside = [f"train/{path}" for path in PATHS]
    touch(tmp_path, inside)
    assert set(names(split(tmp_path)[1], tmp_path)) == held_out(inside, 25)


def test_classes_without_a_held_out_image_are_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = [f"{kind:02d}/{number}.jpg" for kind in range(12) for number in range(3)]
    few = [path for path in few if path not in ("00/1.jpg", "00/2.jpg")]  # a class of one image
    touch(tmp_path, [*few, "readme.txt"])
    held = {path[:2] for path in held_out(few, 25)}
    alone = [name for name in sorted({path[:2] for path in few}) if name not in held]
    assert 5 < len(alone) < 12
    config = DataConfig(name="folder", root=str(tmp_path), check="none", val_percent=25.0)
    with caplog.at_level("INFO", logger="dmjd"):
        training_source(config)
    skipped, sides, warning = caplog.messages
    held_images = len(held_out(few, 25))
    assert sides == f"{tmp_path}: 25 % held out, {held_images} of 34 images"
    assert skipped == f"{tmp_path}: skipped 1 entry (.txt files: 1)"
    assert warning == (
        f"{tmp_path}: {len(alone)} of 12 classes have no held-out image ({', '.join(alone[:5])}, ...); "
        "raise data.val_percent or change data.val_seed"
    )


def test_a_class_on_one_side_is_reported_with_the_side_and_a_cure_that_exists() -> None:
    classes = ("ant", "bee", "lonely")
    pair = [(0, True), (0, False), (1, True), (1, False)]

    def report(*more: tuple[int, bool]) -> list[str]:
        images = [*pair, *more]
        return one_sided([label for label, _ in images], [side for _, side in images], classes, section="")

    assert report((2, False)) == ["1 of 3 classes has no held-out image (lonely)"]
    assert report((2, True)) == ["1 of 3 classes has no training image (lonely)"]
    assert report((2, True), (2, True)) == [
        "1 of 3 classes has no training image (lonely); lower val_percent or change val_seed"
    ]


@pytest.mark.parametrize(
    ("name", "folders", "percent", "sentence"),
    [
        ("folder", ["ant"], 1e-6, "or set data.val_percent=0 to train on all images"),
        ("folder", ["ant"], 99.999999, "val_percent=99.999999 holds out 40 of the 40 images"),
        ("folder", ["train/ant", "val/ant"], 10, "has held-out images in val/; set data.val_percent=0"),
        ("folder", ["train/ant", "test/ant"], 10, "has held-out images in test/; set data.val_percent=0"),
        (
            "digits",
            ["ant"],
            10,
            "data.val_percent=10 is for data.name=folder, got data.name=digits; it has a test split",
        ),
        ("fashion_mnist", ["ant"], 10, "it has a test split of its own"),
        ("shards", ["ant"], 10, "dmjd shards build SRC DST val_percent=10"),
        ("stream", ["ant"], 10, "evaluate with data=folder or data=shards"),
    ],
)
def test_a_split_that_cannot_be_made_is_one_line(
    tmp_path: Path, name: str, folders: list[str], percent: float, sentence: str
) -> None:
    touch(tmp_path, [f"{folder}/{number}.jpg" for folder in folders for number in range(40)])
    config = DataConfig(name=name, root=str(tmp_path), check="none", val_percent=percent, samples=None)
    with pytest.raises(DataError if name == "folder" else ConfigError) as caught:
        training_source(config)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
