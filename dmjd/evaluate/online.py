"""kNN accuracy during pre-training, with a warning when it falls.

The loss of masked image modelling may keep falling while features get worse. The command line passes
:class:`OnlineKnn` to the loop as a callback.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dmjd.builders import image_size
from dmjd.config import PretrainConfig
from dmjd.data import listed
from dmjd.data.build import build_dataset
from dmjd.data.dataset import EvenSubset, ImageDataset
from dmjd.data.folder import ImageFolder
from dmjd.data.loader import evaluation_loader
from dmjd.errors import BadFeatures, BadImage, ConfigError, DataError
from dmjd.evaluate.features import FEATURE_BATCH, Features, extract_features
from dmjd.evaluate.knn import knn_accuracy, neighbours_for
from dmjd.evaluate.registry import references
from dmjd.runs.folder import RunFolder

logger = logging.getLogger("dmjd")

SCORE = "knn_top1"
"""The score in log.jsonl, in per cent."""


class OnlineKnn:
    """Every ``online_knn.every_epochs`` epochs, the score that ``dmjd knn`` gives to the same weights and settings.

    It uses no global random generator and restores the encoder's training mode, so it does not change the weights of a
    run. Data sets are opened and checked here, before training; ``online_knn.neighbours=null`` of ``config`` is
    replaced by its value, and the accuracies that need no encoder are logged.

    Raises:
        ConfigError: if there are too few training images, or no class token.
        DataError: if the data has no test split or no labels.
    """

    def __init__(self, config: PretrainConfig) -> None:
        settings, data = config.online_knn, config.data
        if settings.pooling == "cls" and not config.backbone.class_token:
            raise ConfigError("online_knn.pooling=cls needs backbone.class_token=true; use online_knn.pooling=mean")
        # The run checks its training images itself.
        train = build_dataset(replace(data, check="none"), "train")
        run = RunFolder(Path(config.run))
        if run.has_checkpoint and isinstance(train, ImageFolder):
            listed.leave_out_added(train, run.path / listed.FILE)
        try:
            test = build_dataset(replace(data, max_bad_percent=0.0), "test")
        except DataError as error:
            if "data.image_size" in str(error):  # the cure, with or without online kNN
                raise
            raise DataError(f"online_knn.every_epochs={settings.every_epochs} needs test images: {error}") from error
        for split, dataset in (("training", train), ("test", test)):
            if not dataset.num_classes:
                raise DataError(
                    f"online_knn.every_epochs={settings.every_epochs} needs labels, and the {split} images have none; "
                    "put them into class folders, or set online_knn.every_epochs=0"
                )
        if train.num_classes < 2:
            raise DataError(
                f"online_knn.every_epochs={settings.every_epochs} needs at least two classes, and the images have one; "
                "set online_knn.every_epochs=0"
            )
        self._train = EvenSubset(train, min(settings.train_images, len(train)))
        self._test = test
        if settings.neighbours is None:
            settings.neighbours = neighbours_for(len(self._train), train.num_classes)
        self._neighbours = settings.neighbours
        if self._neighbours > len(self._train):
            raise ConfigError(
                f"online_knn.neighbours must be at most the {len(self._train)} images in the bank, "
                f"got {self._neighbours}"
            )
        if os.environ.get("RANK", "0") == "0":
            values = references(self._train, test)
            logger.info(
                "online kNN: k %d, %d training images, %d test images; majority %.2f %%, chance %.2f %%",
                *(self._neighbours, len(self._train), len(test), values["majority"], values["chance"]),
            )
        self._settings, self._data = settings, data
        self._size, self._workers = image_size(config), config.workers
        self._best: tuple[float, int] | None = None  # score and step

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Remember the scores in these rows of log.jsonl and no others; rows without a score are skipped."""
        self._best = None
        for row in rows:
            if row.get(SCORE) is not None:
                self._remember(row[SCORE], row["step"])

    def due(self, epoch: float) -> bool:
        """Whether ``epoch``, steps done over steps per epoch, ends an interval."""
        return epoch > 0 and epoch % self._settings.every_epochs == 0

    def on_epoch_end(self, encoder: nn.Module, step: int, epoch: float) -> dict[str, float] | None:
        """Columns for the log where an evaluation is due, else None.

        Args:
            encoder: as for :func:`dmjd.evaluate.features.encode`; evaluated on its device.
            step: optimizer steps done.
            epoch: see :meth:`due`.
        """
        if not self.due(epoch):
            return None
        try:
            bank, queries = (self._features(encoder, dataset) for dataset in (self._train, self._test))
        except (BadImage, BadFeatures) as error:
            logger.warning("no online kNN at step %d: %s", step, error)
            return None
        score = knn_accuracy(
            bank,
            queries,
            self._train.num_classes,
            device=next(encoder.parameters()).device,
            k=self._neighbours,
            temperature=self._settings.temperature,
        ).top1
        self._warn_of_fall(score, step)
        self._remember(score, step)
        return {SCORE: score}

    def _features(self, encoder: nn.Module, dataset: ImageDataset) -> Features:
        return extract_features(
            encoder,
            evaluation_loader(
                dataset, FEATURE_BATCH, self._size, self._workers, self._data.crop_pct, self._data.timeout
            ),
            mean=self._data.mean,
            std=self._data.std,
            pooling=self._settings.pooling,
            device=next(encoder.parameters()).device,
            total=len(dataset),
        )

    def _remember(self, score: float, step: int) -> None:
        if self._best is None or score > self._best[0]:
            self._best = score, step

    def _warn_of_fall(self, score: float, step: int) -> None:
        if self._best is None:
            return
        best, best_step = self._best
        allowed = self._settings.warn_drop
        if allowed is None:
            allowed = max(2.0, 2 * math.sqrt(score * (100 - score) / len(self._test)))
        if best - score > allowed:
            logger.warning(
                "kNN top-1 fell to %.2f %% at step %d, %.2f points below the best so far, %.2f %% at step %d",
                *(score, step, best - score, best, best_step),
            )
