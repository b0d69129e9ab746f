from __future__ import annotations

import pytest
import torch

from dmjd.data.batch import Batch
from dmjd.train.data_pipeline import Uploader


def batch(value: int) -> Batch:
    return Batch(torch.full((8, 64, 64, 3), value, dtype=torch.uint8), torch.arange(8) + value, torch.full((8,), -1))


def test_on_the_cpu_a_batch_stays_where_it_is() -> None:
    given = batch(3)
    assert all(a is b for a, b in zip(Uploader(torch.device("cpu"))(given), given, strict=True))


@pytest.mark.gpu
def test_what_a_busy_device_reads_is_the_batch_of_its_step() -> None:
    device = torch.device("cuda")
    upload, busy = Uploader(device), torch.randn(4096, 4096, device=device)
    sums = []
    for value in range(1, 50):
        pinned = Batch(*(field.pin_memory() for field in batch(value)))
        busy = (busy @ busy).clamp(-1, 1)  # the copies run far ahead of this stream
        on_device = upload(pinned)
        sums.append(on_device.images.long().sum() + on_device.sample_ids.sum())
        del on_device
    expected = [int(batch(value).images.long().sum() + batch(value).sample_ids.sum()) for value in range(1, 50)]
    assert torch.stack(sums).tolist() == expected
