"""``dmjd embed``: features of ``dmjd knn`` in a file that does not depend on interruptions."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.compose import compose
from dmjd.config import ImagesConfig
from dmjd.data.dataset import OpenImage
from dmjd.data.folder import ImageFolder
from dmjd.encoder import Encoder, load_encoder
from dmjd.errors import ConfigError
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.evaluate.encoder import load_encoder as load_frozen
from dmjd.explore import embed, embeddings, parts
from dmjd.explore.embeddings import Embeddings, read_embeddings
from dmjd.runs.folder import RunFolder

Command = Callable[..., tuple[int, str, str]]
QUICK = ("workers=0", "device=cpu")


def written(dmjd: Command, path: Path, *words: str) -> Embeddings:
    code, out, err = dmjd("embed", *words, f"output={path}", *QUICK)
    assert code == 0, err
    assert out.startswith(f"{path}: ")
    return read_embeddings(path)


def of(root: Path) -> tuple[str, ...]:
    return "data=folder", f"data.root={root}"


def test_features_are_those_of_knn_and_of_the_python_interface_bit_for_bit(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    found = written(dmjd, tmp_path / "all.npz", str(finished_run), *of(image_folder), "batch_size=20")
    (values,) = found.features.values()
    names = sorted(str(path.relative_to(image_folder)) for path in image_folder.rglob("*.png"))
    assert found.names == names
    assert found.classes == ["down", "up"]
    assert [found.classes[label] for label in found.labels] == [name.split("/")[1] for name in names]
    assert found.splits.tolist() == ["train"] * 48 + ["test"] * 12
    assert found.ids.tolist() == [*range(48), *range(12)]

    frozen = load_frozen(compose("knn", [f"checkpoint={finished_run}", *of(image_folder), "data.check=none", *QUICK]))
    for split in ("train", "test"):
        features = frozen.features(frozen.dataset(split), "mean", 20, 0)
        assert torch.equal(features.values, torch.from_numpy(values[found.splits == split]))
        assert torch.equal(features.labels, torch.from_numpy(found.labels[found.splits == split]))
    encoder = load_encoder(finished_run, device="cpu")
    assert torch.equal(encoder.embed(image_folder, batch_size=20), torch.from_numpy(values[:48]))

    assert found.thumbnails is not None
    for name, jpeg in zip(names, found.thumbnails, strict=True):
        with Image.open(io.BytesIO(jpeg)) as small, Image.open(image_folder / name) as original:
            difference = np.abs(np.asarray(small, np.int16) - np.asarray(original, np.int16))
            assert small.size == (16, 16)
            assert difference.mean() < 12


def test_choices_of_images_and_forms_of_the_file(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    whole = written(dmjd, tmp_path / "all.npz", str(finished_run), *of(image_folder))
    (values,) = whole.features.values()
    few = written(
        dmjd, tmp_path / "few.npz", str(finished_run), *of(image_folder), "images=7", "thumbnail=0", "dtype=float16"
    )
    chosen = [number * 60 // 7 for number in range(7)]
    assert few.names == [whole.names[number] for number in chosen]
    assert few.ids.tolist() == [whole.ids[number] for number in chosen]
    assert few.thumbnails is None
    (halves,) = few.features.values()
    np.testing.assert_allclose(halves, values[chosen], rtol=2e-3, atol=1e-3)
    test = written(dmjd, tmp_path / "test.parquet", str(finished_run), *of(image_folder), "split=test")
    assert test.names == whole.names[48:]

    flat = tmp_path / "new"
    shutil.copytree(image_folder / "val/up", flat)
    run = copy_of(finished_run, tmp_path / "run")
    path = tmp_path / "run/embeddings/trained-step00000011-new.npz"
    words = ["split=train", "images=5", "data.image_size=48"]
    for more, name in (([], path.name), (words, "trained-step00000011-new-train-48x48-5.npz")):
        code, out, _ = dmjd("embed", str(run), *of(flat), *more, *QUICK)
        assert (code, out.partition(": ")[0]) == (0, str(path.with_name(name)))
    assert f"replaced the earlier {name}\n" in dmjd("embed", str(run), *of(flat), *words, *QUICK)[1]
    new = read_embeddings(path)
    assert (new.names, new.classes) == ([f"{number:02d}.png" for number in range(6)], [])
    assert set(new.labels.tolist()) == {-1}
    assert set(new.splits.tolist()) == {"train"}


def test_images_of_another_folder_are_not_held_out_by_the_rule_of_the_run(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of them has no path of this machine."""
    root = Path(shutil.copytree(image_folder / "train", tmp_path / "photos"))

    def load(config: ImagesConfig) -> FrozenEncoder:
        frozen = load_frozen(config)
        return replace(frozen, data=replace(frozen.data, val_percent=50.0))

    with monkeypatch.context() as patch:
        patch.setattr("dmjd.evaluate.encoder.load_encoder", load)
        found = written(dmjd, tmp_path / "a.npz", str(finished_run), *of(root))
        code, _, err = dmjd("embed", str(finished_run), *of(root), "split=test", *QUICK)
    assert set(found.splits) == {"train"}
    assert (code, "photos has no test split" in err) == (2, True)
    assert str(tmp_path) not in str(found.settings)
    assert found.settings["data"].startswith("folder in photos, ")
    assert found.settings["encoders"]["run"]["checkpoint"] == "run"
    held_out = written(dmjd, tmp_path / "b.npz", str(finished_run), *of(root), "data.val_percent=50")
    assert set(held_out.splits) == {"train", "test"}


def copy_of(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


def test_several_encoders_read_each_image_once(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one reads images of 16 x 16, with another crop and other statistics."""
    other = copy_of(finished_run, tmp_path / "small")

    def load(config: ImagesConfig) -> FrozenEncoder:
        frozen = load_frozen(config)
        if config.checkpoint == str(finished_run):
            return frozen
        data = replace(frozen.data, image_size=[16, 16], crop_pct=0.8, std=[0.5])
        return replace(frozen, data=data, size=(16, 16))

    monkeypatch.setattr("dmjd.evaluate.encoder.load_encoder", load)
    opened: list[int] = []
    original = ImageFolder.open

    def counted(self: ImageFolder, index: int) -> OpenImage:
        opened.append(index)
        return original(self, index)

    monkeypatch.setattr(ImageFolder, "open", counted)
    words = [str(finished_run), str(other), str(finished_run), *of(image_folder), "split=train", "pooling=mean"]
    found = written(dmjd, tmp_path / "all.npz", *words)
    assert len(opened) == 48
    assert list(found.features) == ["run-1", "small", "run-3"]
    assert np.array_equal(found.features["run-1"], found.features["run-3"])
    for name, run in (("run-1", finished_run), ("small", other)):
        expected = Encoder(load(compose("knn", [f"checkpoint={run}", *of(image_folder), *QUICK]))).embed(image_folder)
        assert torch.equal(expected, torch.from_numpy(found.features[name]))
    assert found.settings["encoders"]["small"]["image_size"] == [16, 16]


def test_images_that_cannot_be_decoded_are_left_out_and_named(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(image_folder / "train", tmp_path / "photos"))
    good = written(dmjd, tmp_path / "good.npz", str(finished_run), *of(root))
    content = (root / "up/03.png").read_bytes()
    (root / "up/03.png").write_bytes(content[:60])
    (root / "down/07.png").write_text("no image")
    code, _, err = dmjd("embed", str(finished_run), *of(root), f"output={tmp_path / 'rest.npz'}", *QUICK)
    (warning,) = [line for line in err.splitlines() if "left out" in line]
    assert code == 0
    assert "left out 2 image(s)" in warning
    assert "down/07.png (" in warning
    assert "up/03.png (" in warning
    rest = read_embeddings(tmp_path / "rest.npz")
    kept = [number for number, name in enumerate(good.names) if name not in ("up/03.png", "down/07.png")]
    assert rest.names == [good.names[number] for number in kept]
    assert rest.ids.tolist() == kept
    assert list(rest.settings["left_out"]) == ["down/07.png", "up/03.png"]
    (before,), (after,) = good.features.values(), rest.features.values()
    np.testing.assert_allclose(after, before[kept], rtol=0, atol=1e-6)

    for number in range(20):
        (root / f"up/{number:02d}.png").write_text("no image")
    words = ("embed", str(finished_run), *of(root), f"output={tmp_path / 'bad.npz'}", *QUICK)
    code, _, err = dmjd(*words)
    assert code == 2
    assert "of 48 images cannot be decoded" in err
    assert "set data.max_bad_percent=100" in err
    assert not (tmp_path / "bad.npz.parts").exists()
    assert dmjd(*words, "data.max_bad_percent=100")[0] == 0
    assert len(read_embeddings(tmp_path / "bad.npz")) == 27


def test_a_killed_command_goes_on_and_its_file_has_the_same_bytes(
    dmjd: Command, launch: Callable[..., BaseProcess], finished_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    words = [str(finished_run), *of(image_folder), "batch_size=7", *QUICK]
    whole, path = tmp_path / "whole.npz", tmp_path / "killed.npz"
    assert dmjd("embed", *words, f"output={whole}")[0] == 0
    begin = "\n".join(
        (
            "import os, signal, pathlib, dmjd.explore.parts as parts",
            "parts.PART_SECONDS, replaced, replace = 0.0, [], pathlib.Path.replace",
            "die = lambda: os.kill(os.getpid(), signal.SIGKILL)",
        )
    )
    # While it writes its third part, and while it writes the file.
    moments = (
        "pathlib.Path.replace = lambda self, to: die() if len(replaced) == 2 else replaced.append(replace(self, to))",
        "pathlib.Path.replace = lambda self, to: die() if self.name == 'unfinished' else replace(self, to)",
    )
    sizes = []
    for moment in moments:
        process = launch(["embed", *words, f"output={path}"], f"{begin}\n{moment}")
        process.join(60)
        assert process.exitcode == -9
        assert not path.exists()
        sizes.append(len(list(Path(f"{path}.parts").glob("part-*.npz"))))
    assert sizes == [2, 9]
    code, _, err = dmjd("embed", *words, f"output={path}")
    assert code == 0
    assert "60 of 60 images are done" in err
    assert path.read_bytes() == whole.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {whole.name, path.name}


def test_a_table_does_not_depend_on_its_parts(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_GROUP", 16)
    words = [str(finished_run), *of(image_folder), "batch_size=7", "dtype=float16", *QUICK]
    assert dmjd("embed", *words, f"output={tmp_path / 'one.parquet'}")[0] == 0
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    assert dmjd("embed", *words, f"output={tmp_path / 'nine.parquet'}")[0] == 0
    assert (tmp_path / "nine.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


def test_encoders_of_equal_names_have_what_differs_in_their_names(finished_run: Path, tmp_path: Path) -> None:
    frozen = load_frozen(compose("knn", [f"checkpoint={finished_run}", *QUICK]))

    def names(*found: tuple[str, int, str]) -> list[str]:
        encoders = [replace(frozen, run=RunFolder(tmp_path / path), step=step) for path, step, _ in found]
        return embed._names(encoders, [pooling for *_, pooling in found])

    assert names(("ibot/full", 0, "mean"), ("sdae/full", 0, "mean"), ("b", 1, "cls")) == ["ibot/full", "sdae/full", "b"]
    assert names(("a", 10, "mean"), ("a", 20, "mean")) == ["a-step00000010", "a-step00000020"]
    assert names(("a", 10, "mean"), ("a", 10, "cls")) == ["a-mean", "a-cls"]
    assert names(*[("a", 1, "mean")] * 2, ("a-2", 1, "mean")) == ["a-1", "a-2-2", "a-2-3"]


def test_the_default_file_of_a_file_of_weights_names_the_images(finished_run: Path, tmp_path: Path) -> None:
    """Whatever data describe the file."""
    (tmp_path / "w.pth").touch()
    frozen = load_frozen(compose("knn", [f"checkpoint={finished_run}", *QUICK]))
    frozen = replace(frozen, path=tmp_path / "w.pth", run=RunFolder(tmp_path / "w"), step=0)
    images = embed._Images([], [], str(tmp_path / "photos"), "", "", moved=False)
    config = compose("embed", ["checkpoints=[w.pth]"])
    assert embed._output(config, frozen, images) == tmp_path / "w/embeddings/trained-step00000000-photos.npz"


@pytest.mark.gpu
def test_features_of_a_gpu_are_those_of_knn(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path
) -> None:
    words = (*of(image_folder), "device=cuda", "batch_size=20")
    assert dmjd("embed", str(finished_run), *words, f"output={tmp_path / 'a.npz'}")[0] == 0
    (values,) = read_embeddings(tmp_path / "a.npz").features.values()
    frozen = load_frozen(compose("knn", [f"checkpoint={finished_run}", *words, "data.check=none"]))
    expected = [frozen.features(frozen.dataset(split), "mean", 20, 0).values for split in ("train", "test")]
    assert torch.equal(torch.cat(expected), torch.from_numpy(values))


def test_a_stopped_command_says_how_it_goes_on_and_other_settings_begin_anew(
    dmjd: Command, finished_run: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(finished_run), *of(image_folder), "batch_size=7", *QUICK]
    path, whole = tmp_path / "a.npz", tmp_path / "whole.npz"
    features, count = embed._features, [0]

    def stopped(*arguments: object) -> object:
        count[0] += 1
        if count[0] == 4:
            os.kill(os.getpid(), 15)
        return features(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(embed, "_features", stopped)
        code, _, err = dmjd("embed", *words, f"output={path}")
    assert code == 128 + 15
    assert "interrupted" not in err
    assert f"{path}.parts: 21 of 60 images are done; the same command continues\n" in err
    assert [file.name for file in Path(f"{path}.parts").glob("part-*")] == ["part-00000000.npz"]

    assert dmjd("embed", *words, "thumbnail=8", f"output={whole}")[0] == 0
    shutil.copytree(f"{path}.parts", tmp_path / "b.npz.parts")
    code, _, err = dmjd("embed", *words, "thumbnail=8", f"output={tmp_path / 'b.npz'}")
    assert "removed 1 part(s) of other settings or damaged" in err
    assert (tmp_path / "b.npz").read_bytes() == whole.read_bytes()
    assert dmjd("embed", *words, f"output={whole}")[0] == 0
    assert dmjd("embed", *words, f"output={path}")[0] == 0
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["a", "output=b.csv"], "output=b.csv must end in .npz or .parquet"),
        (["a", "pooling=max"], "pooling must be one of cls, mean, got 'max'"),
        (["a", "b", "c", "pooling=mean,cls", "output=c.npz"], "pooling has 2 values for 3 checkpoint(s)"),
        (["checkpoints=[]"], "checkpoints must name at least one"),
        (["a", "", "output=b.npz"], "checkpoints must be a path, got an empty value"),
        (["output=b.npz"], "checkpoints is required"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(dmjd: Command, words: list[str], part: str) -> None:
    code, out, err = dmjd("embed", *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err


def test_a_second_folder_is_a_run_or_an_error(dmjd: Command, finished_run: Path, image_folder: Path) -> None:
    for other, part in (
        (finished_run, "several checkpoints need the name of their file: output=FILE.npz"),
        (image_folder, f"checkpoint={image_folder} is a folder of images, which data.root names"),
    ):
        code, out, err = dmjd("embed", str(finished_run), str(other))
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert part in err


def test_without_pyarrow_a_table_is_one_line_before_anything_is_computed(
    dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = "error: dmjd embed needs pyarrow; pip install 'dmjd[explore]'\n"
    assert dmjd("embed", "run", "output=a.parquet") == (2, "", error)


def test_leading_arguments_are_checkpoints_with_any_characters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    from dmjd.compose import with_first_key

    typed = ["runs/a, b", '~/it\'s "c"', "$x ${y}", "images=5", "output=o.npz"]
    config = compose("embed", with_first_key("embed", typed))
    assert config.checkpoints == ["runs/a, b", f'{tmp_path}/it\'s "c"', "$x ${y}"]
    assert config.images == 5
    assert compose("embed", ["checkpoints=[a,'b, c']", "output=o.npz"]).checkpoints == ["a", "b, c"]


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    first, second = (parts.Parts(tmp_path / "a.npz", [], "float32", "x") for _ in range(2))
    with first, pytest.raises(ConfigError, match="another process writes it"), second:
        pass
