"""The identity of a data set, stored in the checkpoints of a run."""

from __future__ import annotations

from typing import Any

from dmjd.data.dataset import ArrayDataset, ImageDataset, Subset
from dmjd.data.dense.annotated import AnnotatedImages
from dmjd.data.folder import ImageFolder
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.stream.batches import TarStream
from dmjd.errors import ConfigError


class DataIdentity:
    """Fingerprint and size of a data set. Loading the state of another data set raises ConfigError.

    One image more or less in a folder changes the sample ids of all that follow, and perhaps the length of an epoch.

    Args:
        fingerprint: see :class:`~dmjd.data.folder.ImageFolder`, :class:`~dmjd.data.shards.dataset.ShardDataset`,
            :class:`~dmjd.data.dataset.ArrayDataset`, :class:`~dmjd.data.dense.annotated.AnnotatedImages` and
            :class:`~dmjd.data.dataset.Subset`.
        images: number of images.
    """

    def __init__(self, fingerprint: str, images: int) -> None:
        self._fingerprint, self._images = fingerprint, images

    @classmethod
    def of(cls, source: ImageDataset | TarStream) -> DataIdentity | None:
        """The identity of ``source``; None for a stream, which has none."""
        known = ImageFolder | ShardDataset | ArrayDataset | AnnotatedImages | Subset
        return cls(source.fingerprint, len(source)) if isinstance(source, known) else None

    def __str__(self) -> str:
        return f"{self._images} images of fingerprint {self._fingerprint[:12]}"

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint, "said": str(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError if the data set differs."""
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                f"the run was started with {state.get('said', 'other images')}, and data.root now has {self}; restore "
                "the images (an empty file of its name replaces a lost one), or start a new run with run=FOLDER"
            )
