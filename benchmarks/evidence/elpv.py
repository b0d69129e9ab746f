"""Photographs of solar cells: 2,624 electroluminescence images of Buerhop-Lutz et al. (2018), folds, and scores.

The images are in the package elpv-dataset (pip), under CC BY-NC-SA 4.0: for evidence only. They are no part of this
project and no dependency of it.
"""

from __future__ import annotations

import csv
import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from dmjd.config import EvaluationConfig
from dmjd.evaluate.encoder import load_encoder

CELLS = "cells.csv"
FOLDS = 5
PIXELS, QUALITY = 256, 88
"""Side and JPEG quality of the stored images: 22.9 MB in all, of 300 pixels and 90.7 MB as PNG."""
FUNCTIONAL = 0.34
"""A cell is functional up to the annotated probability 1/3 of a defect; the others are 2/3 and 1."""
CLASSES = ("functional", "defective")  # sorted otherwise, so folders are numbered
ENCODED = 256
STRENGTHS = np.logspace(-4, 1, 6)
"""C of the logistic regression; the best AUROC of five folds within the training images chooses."""


def write_images(folder: Path) -> None:
    """Write the images of the installed package as grey JPEG files, and :data:`CELLS`: a line of each with its label
    and fold.

    Cells of equal probability and type (mono, poly) are dealt to the folds in the order of a hash of their names, so
    that folds have equal shares of each. Cells of one module may be in several folds, as in the published split.
    """
    found = find_spec("elpv_dataset")
    if found is None or found.origin is None:
        raise SystemExit("elpv_dataset is not installed: pip install --no-deps elpv-dataset (CC BY-NC-SA 4.0)")
    source = Path(found.origin).parent / "data"
    cells = [line.split() for line in (source / "labels.csv").read_text().splitlines() if line]
    cells.sort(key=lambda cell: (cell[1:], hashlib.sha256(cell[0].encode()).digest()))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (name, probability, kind) in enumerate(cells):
        file = Path(name).with_suffix(".jpg").name
        with Image.open(source / name) as image:
            small = image.convert("L").resize((PIXELS, PIXELS), Image.Resampling.LANCZOS)
            small.save(folder / file, quality=QUALITY, optimize=True)
        rows.append([file, probability, kind, CLASSES[float(probability) > FUNCTIONAL], number % FOLDS])
    with (folder / CELLS).open("w", newline="") as file_of_rows:
        csv.writer(file_of_rows, lineterminator="\n").writerows(
            [["file", "probability", "type", "label", "fold"], *sorted(rows)]
        )
    size = sum(path.stat().st_size for path in folder.glob("*.jpg"))
    print(f"{len(rows)} images of {PIXELS} pixels, JPEG quality {QUALITY}, {size / 1e6:.1f} MB in {folder}")


def write_folds(images: Path, folder: Path) -> None:
    """Folders of links in the layout of data=folder: "fold0" to "fold4", of which each has its fold as test images and
    the others as training images; and "tune", with fold 1 as test images and folds 2 to 4 as training images."""
    with (images / CELLS).open(newline="") as file:
        cells = list(csv.DictReader(file))
    splits = {f"fold{fold}": ({*range(FOLDS)} - {fold}, {fold}) for fold in range(FOLDS)}
    splits["tune"] = ({2, 3, 4}, {1})
    for name, sides in splits.items():
        for split, folds in zip(("train", "test"), sides, strict=True):
            for cell in cells:
                if int(cell["fold"]) in folds:
                    place = folder / name / split / f"{CLASSES.index(cell['label'])}_{cell['label']}"
                    place.mkdir(parents=True, exist_ok=True)
                    (place / cell["file"]).symlink_to((images / cell["file"]).resolve())


def scores(config: EvaluationConfig, workers: int) -> dict[str, float]:
    """AUROC, balanced accuracy and accuracy, in per cent, of the test images by a logistic regression on the encoder's
    mean tokens, with the classes weighted equally."""
    frozen = load_encoder(config)
    train, test = (frozen.features(frozen.dataset(split), "mean", ENCODED, workers) for split in ("train", "test"))
    return classified(*(array.numpy() for array in (train.values, train.labels, test.values, test.labels)))


def classified(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray
) -> dict[str, float]:
    """:func:`scores` of features ``[N, D]`` and labels ``[N]`` in {0, 1}. Test images choose nothing."""
    from sklearn.linear_model import LogisticRegression  # seconds, which other studies do not need
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=2000)),
        {"logisticregression__C": STRENGTHS},
        scoring="roc_auc",
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
    ).fit(train, train_labels)
    predicted = model.predict(test)
    return {
        "auroc": 100 * roc_auc_score(test_labels, model.decision_function(test)),
        "balanced": 100 * balanced_accuracy_score(test_labels, predicted),
        "accuracy": 100 * accuracy_score(test_labels, predicted),
    }
