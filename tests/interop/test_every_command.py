"""Files that are no weights, of all kinds, given to every command that takes a file: one rule, one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop import layout_states as states
from tests.interop.layout_states import draw

STATE = draw(states.timm_vit())
NAN = STATE | {"norm.weight": torch.full((states.DIM,), float("nan"))}
FAULTS: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "nothing": (b"", "cannot be read as a checkpoint: it is empty; download or copy it again"),
    "a web page": (b"<!DOCTYPE html>\n<html>", "it is a web page, as of a failed download; download the file itself"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer; fetch the weights with git"),
    "NaN": ({"model": NAN}, "NaN or infinity in norm.weight, as after a training that diverged: use an earlier check"),
    "a part of a model": ({"model": {**STATE, "norm.weight": torch.ones(0)}}, "is empty, as where each process"),
    "a name twice": ({**STATE, "module.norm.weight": torch.ones(1)}, "are both norm.weight without their wrappers"),
    "another method": (
        {"model": {**STATE, "queue": torch.ones(3)}},
        "dmjd convert with source=mae unknown=drop leaves",
    ),
    "rotary positions": (
        {"model": {**STATE, "blocks.0.attn.rope": torch.ones(3)}},
        "features depend on blocks.0.attn.r",
    ),
    "two models": ({"m": {"a": STATE, "b": STATE}}, "holds several models: m.a, m.b; save one of them to a file"),
}
COMMANDS = {
    "convert": "convert input={file} output={out}/out.pth to=ours",
    "pretrain": "pretrain run={out}/run init={file} experiment=demo data=digits method=mae engine.device=cpu",
    "finetune": "finetune {file} run={out}/run preset=own_photos data.root={images} engine.device=cpu",
    "knn": "knn {file} data=folder data.root={images} device=cpu",
    "linprobe": "linprobe {file} data=folder data.root={images} device=cpu",
    "export": "export {file}",
    "embed": "embed {file} data.root={images} device=cpu",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_file_is_the_same_line_of_every_command(
    fault: str, tmp_path: Path, image_folder: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    content, cause = FAULTS[fault]
    path = tmp_path / "theirs.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    lines = {}
    for command, words in COMMANDS.items():
        code, _, errors = dmjd(*words.format(file=path, out=tmp_path, images=image_folder).split(" "))
        assert code == 2, (command, errors)
        (lines[command],) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(set(lines.values())) == 1, json.dumps(lines, indent=1)
    assert cause in lines["knn"]
    assert f"{path}" in lines["knn"]
    assert not (tmp_path / "out.pth").exists()
