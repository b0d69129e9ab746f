"""Secrets do not get through, and what is none stays as it is."""

from __future__ import annotations

import io
import random
import sys
import traceback

import pytest

from dmjd.redact import RedactedStream, is_secret, know, redact, redact_message, same_but_secrets

S = "t0ps3cret"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"data.root=http://me:{S}@host/x/{{0..3}}.tar", "data.root=http://***@host/x/{0..3}.tar"),
        (f"https://{S}@host:8080/x", "https://***@host:8080/x"),
        (f"HTTPS://me:{S}/?#@{S}@host/x", "HTTPS://***@host/x"),
        (f"http://{S}:@[::1]:80/x", "http://***@[::1]:80/x"),
        (f"https://a:b@h/x::https://h/y?X-Amz-Signature={S}&x=1", "https://***@h/x::https://h/y?***"),
        (f"https://h/x?sv=1&se=2026&sig={S}#token={S}", "https://h/x?***#***"),
        (f"simplecache::gs://me:{S}@b/x", "simplecache::gs://***@b/x"),
        (f"abfs://box:{S}@acc.dfs/x", "abfs://***@acc.dfs/x"),
        (f"no luck with 'https://me:{S}@h/x', twice", "no luck with 'https://***@h/x', twice"),
        (f"failed with url: /x?part=3&X-Goog-Signature={S}", "failed with url: /x?part=3&X-Goog-Signature=***"),
        (f"export my_token='{S} '\"'\"'{S}'\nset -- a=1", "export my_token=***\nset -- a=1"),
        (f"WANDB_API_KEY={S} dmjd", "WANDB_API_KEY=*** dmjd"),
        (f"pipe:curl -u me:{S} https://me:{S}@h/x.tar | cat", "pipe:curl -u *** https://***@h/x.tar | cat"),
        (f'pipe:curl -sH "Authorization: Bearer {S}" https://h/x', 'pipe:curl -sH "***" https://h/x'),
        ("pipe:curl --oauth2-bearer secret https://h/x", "pipe:curl --oauth2-bearer *** https://h/x"),
        (f"pipe:TOKEN={S} B={S} aws s3 cp s3://b/x -::/y.tar", "pipe:*** aws s3 cp s3://b/x -::/y.tar"),
        (f"pipe:sh -c 'export A={S}; wget --password={S} -O- ftp://h/x'", "pipe:sh -c '***; wget *** -O- ftp://h/x'"),
        (f"pipe: sshpass -p{S} cat /x", "pipe: sshpass *** cat /x"),
        ("https://u:${oc.env:PW}@h/x?sig=${oc.env:SIG}", "https://u:${oc.env:PW}@h/x?sig=${oc.env:SIG}"),
        (f"${{oc.env:PW,{S}}}", "${oc.env:PW}"),
        (f"${{oc.env:ROOT,http://u:{S}@h}}", "${oc.env:ROOT,http://***@h}"),
    ],
)
def test_a_secret_is_replaced_and_what_surrounds_it_stays(text: str, left: str) -> None:
    assert redact(text) == left
    assert redact(left) == left
    assert redact_message(left) == left


@pytest.mark.parametrize(
    "text",
    [
        "https://host:80/x@y/z",
        "s3://bucket/train-{000000..000146}.tar",
        "abfs://container@account.dfs.core.windows.net/x",
        "hf://datasets/me/set@main/x.tar",
        "file:///data/x.tar",
        "/data/KEY=3/x",
        "Broken pipe: x",
        "write key=value or KEY=VALUE",
        "pipe:cat /x/{0..5}.tar; exit 4",
        "pipe:gzip -c /x.tar | gunzip",
        "pipe:aws s3 cp s3://bucket/train-{000000..000146}.tar -",
        "pipe:curl -sfL --retry 5 https://h/x.tar",
        "pipe:if [ -e /s ]; then cat 1.tar; else head -c 9000 /1.tar; fi",
    ],
)
def test_what_holds_no_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert redact_message(text) == text


def test_no_password_gets_through_whatever_it_is_made_of() -> None:
    draw = random.Random(0)
    letters = "aZ09-._~%!$&'()*+,;=:@/?#[]\"<>|\\^`"
    for _ in range(3000):
        password = "a" + "".join(draw.choices(letters, k=8)) + "Qq7"
        for text in (f"https://me:{password}@host/x", f"https://host/x?sig={password}", f"https://host/#{password}"):
            assert "Qq7" not in redact(text), text
            assert redact(text).startswith("https://")
            assert redact(redact(text)) == redact(text)


def test_only_secrets_may_differ() -> None:
    one = f"https://me:{S}@h/{{0..3}}.tar?sig={S}&se=1::pipe:curl -u a:{S} https://h/x"
    rotated = "https://me:other@h/{0..3}.tar?X-Amz-Date=3::pipe:curl -u a:other https://h/x"
    assert same_but_secrets(one, rotated)
    assert same_but_secrets(redact(one), rotated)
    assert same_but_secrets("https://me:a@h/x?sig=b", "https://h/x"), "it has moved into a file of passwords"
    for other in (one.replace("@h/", "@g/"), one.replace("0..3", "0..4"), one.replace("//h/x", "//g/x"), "/x"):
        assert not same_but_secrets(one, other)


def test_a_variable_that_a_configuration_reads_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmjd.redact._known", {})
    for name, value in (("MY_TOKEN", "plainword"), ("W", "f81d4fae7dec11d0a765"), ("NAME", "convvit-large")):
        monkeypatch.setenv(name, value)
        know(f"a=x-${{oc.env:{name}}}")
    printed = redact_message("plainword f81d4fae7dec11d0a765 convvit-large")
    assert printed == "${oc.env:MY_TOKEN} ${oc.env:W} convvit-large"


def test_variables_of_a_site() -> None:
    for name in ("WANDB_API_KEY", "hf_token", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "GIT_PAT", "MY_CREDENTIALS"):
        assert is_secret(name, "x")
    assert is_secret("http_proxy", f"http://me:{S}@proxy:3128")
    for name in ("NCCL_SOCKET_IFNAME", "DMJD_PYTHON", "PATH", "OMP_NUM_THREADS", "http_proxy"):
        assert not is_secret(name, "http://proxy:3128")


def test_a_traceback_is_printed_without_them() -> None:
    buffer = io.StringIO()
    try:
        raise RuntimeError(f"https://me:{S}@h/x")
    except RuntimeError:
        traceback.print_exc(file=RedactedStream(buffer))
    assert S not in buffer.getvalue()
    assert "https://***@h/x" in buffer.getvalue()
    assert RedactedStream(sys.__stdout__).fileno() == sys.__stdout__.fileno()  # type: ignore[operator, arg-type, union-attr]
