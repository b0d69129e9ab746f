"""Imported by the server of child processes before it forks them (tests/conftest.py): they do none of it again."""

import gc
from contextlib import suppress

import sklearn.datasets  # noqa: F401 -- of data=digits
import torch._inductor.compile_fx  # noqa: F401 -- DeepSpeed imports it too, for a second

import dmjd.cli
import dmjd.train.finetuning
import dmjd.train.loop
import dmjd.train.pictures
from dmjd.compose import compose

with suppress(ImportError):  # without the extra dmjd[dense]
    import dmjd.builders.detect
    import dmjd.builders.segment  # noqa: F401

compose("pretrain", ["experiment=demo", "data=digits", "run=none"])
gc.freeze()  # no collection in a child looks at all this
