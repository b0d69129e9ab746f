"""The identity of a data set, which a run's checkpoints keep."""

from __future__ import annotations

from typing import Any

from dmjd.data.dataset import ArrayDataset, ImageDataset
from dmjd.data.folder import ImageFolder
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.stream.batches import TarStream
from dmjd.errors import ConfigError


class DataIdentity:
    """What a run learns from, of data sets that can tell. It does not change: a checkpoint of other data is refused.

    One image more or less in a folder gives other numbers to all behind it, and an epoch perhaps another length.

    Args:
        fingerprint: see :class:`~dmjd.data.folder.ImageFolder`, :class:`~dmjd.data.shards.dataset.ShardDataset` and
            :class:`~dmjd.data.dataset.ArrayDataset`.
        images: how many there are.
    """

    def __init__(self, fingerprint: str, images: int) -> None:
        self._fingerprint, self._images = fingerprint, images

    @classmethod
    def of(cls, source: ImageDataset | TarStream) -> DataIdentity | None:
        """None for what cannot tell: a stream of tars."""
        known = ImageFolder | ShardDataset | ArrayDataset
        return cls(source.fingerprint, len(source)) if isinstance(source, known) else None

    def __str__(self) -> str:
        return f"{self._images} images of fingerprint {self._fingerprint[:12]}"

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint, "said": str(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError if the data are others."""
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                f"the run was started with {state.get('said', 'other images')}, and data.root now has {self}; give the "
                "former back (an empty file of its name keeps the place of one that is gone), or name another folder "
                "with run="
            )
