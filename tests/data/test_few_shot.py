from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dmjd.data.dataset import ArrayDataset, ImageDataset
from dmjd.data.few_shot import digest_of, few_shot_subset
from dmjd.errors import ConfigError, DataError


class Named(ArrayDataset):
    """Images with the given paths; the label of an image is the number of its folder."""

    def __init__(self, names: Sequence[str], root: str = "/data") -> None:
        folders = sorted({name.split("/")[0] for name in names})
        labels = np.array([folders.index(name.split("/")[0]) for name in names])
        super().__init__(np.zeros((len(names), 1, 1, 1), np.uint8), labels, len(folders), root)
        self._names = [f"{root}/{name}" for name in names]

    def name(self, index: int) -> str:
        return self._names[index]


def paths(**counts: int) -> list[str]:
    return [f"{folder}/{folder}_{number}.JPEG" for folder, count in counts.items() for number in range(count)]


def names_of(dataset: ImageDataset) -> list[str]:
    return ["/".join(dataset.name(index).split("/")[-2:]) for index in range(len(dataset))]


@pytest.mark.parametrize(
    ("percent", "counts"), [(1, [13, 1, 1]), (10, [130, 1, 2]), (50, [650, 2, 8]), (99.9, [1299, 4, 15])]
)
def test_each_class_keeps_its_share_and_at_least_one_image(percent: float, counts: list[int]) -> None:
    """1 % of 1300 images is 13, as in the published lists of ImageNet; halves are rounded up."""
    subset = few_shot_subset(Named(paths(a=1300, b=4, c=15)), percent, None)
    assert [Counter(subset.label(index) for index in range(len(subset)))[label] for label in range(3)] == counts
    assert len(set(names_of(subset))) == sum(counts)


def test_the_choice_equals_its_rule() -> None:
    by_class = defaultdict(list)
    for path in paths(a=40, b=30):
        by_class[path[0]].append((hashlib.sha256(f"few-shot/{path[2:]}".encode()).hexdigest(), path))
    expected = {path for ranked in by_class.values() for _, path in sorted(ranked)[: len(ranked) // 10]}
    assert set(names_of(few_shot_subset(Named(paths(a=40, b=30)), 10, None))) == expected


def test_the_choice_depends_on_the_names_alone() -> None:
    first = few_shot_subset(Named(paths(b=200, c=100)), 10, None)
    moved = few_shot_subset(Named(paths(b=200, c=100)[::-1], root="/elsewhere/deep"), 10, None)
    assert sorted(names_of(moved)) == sorted(names_of(first))
    assert digest_of(moved) == digest_of(first)
    beside = few_shot_subset(Named(paths(a=7, b=200, c=109)), 10, None)
    assert {name for name in names_of(beside) if name[0] == "b"} == {name for name in names_of(first) if name[0] == "b"}
    lost = {name for name in names_of(first) if name[0] == "c"} - set(names_of(beside))
    assert len(lost) <= 1 + 9, "an image that is added moves at most one other out"
    assert digest_of(beside) != digest_of(first)
    smaller = few_shot_subset(Named(paths(b=200, c=100)), 1, None)
    assert set(names_of(smaller)) < set(names_of(first)), "1 % is part of 10 %"


def test_images_of_one_name_in_a_class_are_chosen_in_order() -> None:
    subset = few_shot_subset(Named(["a/x/1.png", "a/y/1.png", "b/1.png"]), 50, None)
    assert [subset.name(index) for index in range(len(subset))] == ["/data/a/x/1.png", "/data/b/1.png"]


def test_a_list_selects_the_images_that_it_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "1percent.txt"
    file.write_text("c_3.JPEG\n\n  a_1.JPEG \nb/b_0.JPEG\r\na_1.JPEG\n")
    dataset = Named(paths(a=5, b=5, c=5))
    subset = few_shot_subset(dataset, None, str(file))
    assert names_of(subset) == ["a/a_1.JPEG", "b/b_0.JPEG", "c/c_3.JPEG"], "in the order of the data set, each once"
    assert [subset.label(index) for index in range(3)] == [0, 1, 2]
    assert digest_of(subset) == digest_of(few_shot_subset(Named(paths(a=5, b=5, c=5)[::-1]), None, str(file)))
    assert not caplog.records
    file.write_text("c_3.JPEG\na_1.JPEG\n")
    with caplog.at_level(logging.WARNING):
        few_shot_subset(dataset, None, str(file))
    assert [record.getMessage() for record in caplog.records] == [f"labels={file} has images of 2 of the 3 classes"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no names; write the name of an image in each line"),
        (b"a_1.JPEG\na_2.JPEG\n", r"names 2 image\(s\) of one class; a score needs two classes or more"),
        (b"a_1.JPEG\nz.png\n../a_2.JPEG\n", "2 of 3 lines name no training image, the first is 'z.png'; the images"),
        (b"/data/a/a_1.JPEG\n_1.JPEG\n", "lines name no training image, the first is '_1.JPEG'"),
        (b"same.png\n", "'same.png' is the name of 2 training images, such as /data/a/same.png; put the folder"),
        (b"\xff\xfe\n", "cannot be read: "),
        (None, "cannot be read: No such file"),
    ],
    ids=["empty", "one class", "unknown", "part of a name", "ambiguous", "not text", "absent"],
)
def test_a_list_that_does_not_fit_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "names.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        few_shot_subset(Named([*paths(a=5, b=5), "a/same.png", "b/same.png"]), None, str(file))
    assert f"labels={file}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_selected_is_an_error() -> None:
    dataset = Named(paths(a=5, b=5))
    assert few_shot_subset(dataset, None, None) is dataset
    with pytest.raises(ConfigError, match=r"few_shot=1 and labels=x\.txt both select training images; leave one out"):
        few_shot_subset(dataset, 1, "x.txt")
    unlabelled = ArrayDataset(np.zeros((3, 1, 1, 1), np.uint8), np.full(3, -1), 0, "x")
    with pytest.raises(
        DataError, match="few_shot selects images of each class, and the training images have no labels"
    ):
        few_shot_subset(unlabelled, 1, None)
