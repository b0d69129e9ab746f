"""Imported by the server of child processes before it forks them (tests/conftest.py): they do none of it again."""

import torch._inductor.compile_fx  # noqa: F401 -- DeepSpeed imports it too, for a second

import dmjd.cli
import dmjd.train.finetuning
import dmjd.train.loop
import dmjd.train.pictures  # noqa: F401
from dmjd.compose import compose

compose("pretrain", ["experiment=demo", "data=digits", "run=none"])
