"""Ten secrets are planted in a run's life, and none is found in what it leaves and prints."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compare import checkpoints
from tests.data.shards.http_server import Server

Dmjd = Callable[..., tuple[int, str, str]]
SMALL = ("epochs=1", "batch_size=8", "data.image_size=[32,32]", "data.channels=3", "data.check=none", "log_every=1")
COLOURS = ("data.mean=[.5,.5,.5]", "data.std=[.5,.5,.5]", "data.pad=0")


def found(secrets: dict[str, str], *places: Path | str) -> list[str]:
    """``SECRET in FILE`` wherever one is."""
    files = [path for place in places if isinstance(place, Path) for path in place.rglob("*") if path.is_file()]
    contents = {str(path): path.read_bytes() for path in files}
    contents |= {f"print {number}": text.encode() for number, text in enumerate(places) if isinstance(text, str)}
    return [
        f"{name} in {file}: {content[max(0, content.find(secret.encode()) - 60) :][:150]!r}"
        for name, secret in secrets.items()
        for file, content in contents.items()
        if secret.encode() in content
    ]


def test_ten_secrets_are_in_no_artefact(
    tmp_path: Path,
    finished: Path,
    server: Server,
    tiny: Callable[..., list[str]],
    dmjd: Dmjd,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["user", "password", "env", "tracker", "site", "lower", "proxy", "query", "fragment", "header"]
    secrets = {name: f"{name}Zq{number}x0s3cr3t" for number, name in enumerate(names)}
    said: list[str] = []
    run = tmp_path / "run"
    server.root = finished
    host = f"127.0.0.1:{server.server_port}"

    def do(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["dmjd", *words])
        got, *printed = dmjd(*words)
        said.extend(printed)
        assert got == code, printed
        return "".join(printed)

    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *_: {})  # takes most of the time, and text is searched
    monkeypatch.setenv("URL_PW", secrets["env"])
    monkeypatch.setenv("TRACKER_KEY", secrets["tracker"])
    root = f"http://{secrets['user']}:{secrets['password']}@{host}"
    words = tiny(run, "data=shards", *SMALL, *COLOURS, f"data.cache={tmp_path}/cache", "checkpoint_every=1")
    do("pretrain", *words, f"data.root={root}")
    assert checkpoints(run)
    assert "root: http://***@127.0.0.1" in (run / "config.yaml").read_text()

    # An evaluation asks for what was not stored, and takes it.
    error = do("knn", str(run), "train_images=8", "neighbours=2", "workers=0", code=2)
    assert error.count("\n") == 1
    assert "data.root" in error
    do("knn", str(run), f"data.root={root}", "train_images=8", "neighbours=2", "workers=0")
    # What is typed as a variable is stored so. An evaluation reads no variable within a stored text, which could name
    # any host, until that text is typed again.
    typed = f'data.root="http://me:${{oc.env:URL_PW}}@{host}"'
    do("pretrain", *words, typed, "epochs=1")
    assert f"root: http://me:${{oc.env:URL_PW}}@{host}" in (run / "config.yaml").read_text()
    (other := tmp_path / "other").mkdir()
    do("pretrain", *words, typed, f"run={other}/run")
    assert "its variable is not set, or could be sent" in do("knn", str(other / "run"), "workers=0", code=2)
    do("knn", str(other / "run"), typed, "train_images=8", "neighbours=2", "workers=0")
    do("export", str(other / "run"))
    do("report", str(run))

    for command in ("--cfg", "--help"):
        do("pretrain", command, *words, f"data.root={root}", "wandb=${oc.env:TRACKER_KEY}")
    do("pretrain", *words, f"data.root={root}", "wandb=${oc.env:TRACKER_KEY}", code=2)  # its package is not installed
    do("pretrain", *words, f"data.root={root}/nowhere?sig={secrets['query']}#{secrets['fragment']}", code=2)
    do("pretrain", f"data.root=pipe:curl -H 'A: {secrets['header']}' {root}", code=2)  # needs quotes
    do("shards", "stat", f"{root}/train")
    do("shards", "verify", f"{root}/nowhere", code=2)

    # A job's script has them, for its owner alone.
    site = tmp_path / "mine.env"
    site.write_text(
        f"WANDB_API_KEY={secrets['site']}\nmy_token={secrets['lower']}\nhttp_proxy=http://u:{secrets['proxy']}@proxy\n"
    )
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("dmjd.cluster.submit.snapshot", lambda folder: folder)
    submit = ("submit", "pretrain", f"site={site}", "gpus=1", *words, f"data.root={root}")
    assert "export WANDB_API_KEY=***" in do(*submit, "--dry-run")
    monkeypatch.setattr(os, "open", opened := Opened(os.open))
    do(*submit)
    (script,) = (run / "slurm").glob("*.sbatch")
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert opened.modes[".sbatch"] == {0o600}, "not even for a moment"
    text = script.read_text()
    assert all(secrets[name] in text for name in ("user", "password", "site", "lower", "proxy"))
    script.unlink()
    do("doctor", str(run))
    site.write_text(f"export WANDB_API_KEY='{secrets['site']}'\n")
    do(*submit, code=2)
    site.unlink()

    assert not found(secrets, run, other, *said)
    (run / "proof").write_text(secrets["env"])
    assert len(found(secrets, run, *said)) == 1


class Opened:
    """os.open, and with what permissions the drafts of each ending were made."""

    def __init__(self, real: Callable[..., int]) -> None:
        self.real, self.modes = real, dict[str, set[int]]()

    def __call__(self, name: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_CREAT and str(name).endswith(".tmp"):
            self.modes.setdefault("." + str(name).split(".")[-3], set()).add(mode)
        return self.real(name, flags, mode, **more)


def test_a_run_whose_signature_was_rotated_goes_on(
    tmp_path: Path, finished: Path, tiny: Callable[..., list[str]], dmjd: Dmjd, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars, run = finished / "train", tmp_path / "run"
    secrets = {"first": "f1rstTok3n", "second": "s3condTok3n"}

    def train(token: str, tar: str, *more: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["dmjd", *more])
        command = f'pipe:SIGNATURE={token} cat {tars}/{tar} # -H \\"Authorization: Bearer {token}\\"'
        words = tiny(run, "data=stream", *SMALL, *COLOURS, f'data.root="{command}"', "data.samples=16", *more)
        got, out, err = dmjd("pretrain", *words)
        assert got == code, err
        return out + err

    tar, another = (path.name for path in sorted(tars.glob("*.tar"))[:2])
    said = [train(secrets["first"], tar, "checkpoint_every=1")]
    said += [train(secrets["second"], tar, "checkpoint_every=2")]
    said += [train(secrets["second"], another, code=2)]
    assert "was started with data.root=pipe:*** cat " in said[2]
    assert said[2].count("\n") == 1
    assert not found(secrets, run, *said)
