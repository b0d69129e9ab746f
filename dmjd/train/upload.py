"""From pinned memory to the device, beside the step that is still running there."""

from __future__ import annotations

import torch

from dmjd.data.batch import Batch


class Uploader:
    """Copies batches to ``device``.

    On CUDA a copy runs on a stream of its own. The loop asks for the next batch as soon as a step is queued, so the
    copy is over before the step is; on the step's own stream it would wait for its end. The host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        if self._stream is None:
            return batch.to(self._device)
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = batch.to(self._device)
        user.wait_stream(self._stream)
        for field in copy:
            field.record_stream(user)  # or its memory would be taken for the next copy while this stream still reads it
        return copy
