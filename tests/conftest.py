"""A run so small that a test can afford it, and the command line with its outcome.

Fixtures import what they need themselves: tests/ops runs where torch and pytest are installed and nothing else.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.process
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest
import torch

# Tensors here are too small for threads to pay, and child processes shall add numbers in the same order as this one.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# For the server that `launch` forks from: set here, for the first test that needs a process of that kind starts it.
multiprocessing.set_forkserver_preload(["tests.preloaded"])

TINY = (
    "experiment=demo",
    "data=digits",
    "epochs=1",
    "batch_size=128",
    "backbone.patch_size=4",
    "backbone.embed_dim=32",
    "backbone.depth=1",
    "backbone.num_heads=4",
    "method.decoder.dim=32",
    "method.decoder.depth=1",
    "method.decoder.num_heads=2",
    "method.visible_branch.width=32",
    "optim.warmup_epochs=0.5",
    "engine.device=cpu",
    "workers=0",
)


GPU_TESTS = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # before the GPU tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[GPU_TESTS] = [item.nodeid for item in items if item.get_closest_marker("gpu")]
    # Files with slow tests first: of two workers neither is left with one when the other has nothing to do.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_configure() -> None:
    """What nohup, or a shell for its background, has ignored would be ignored by every process that is signalled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported, nearly a million objects, out of every collection of garbage: a tenth of the time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Names that are not UTF-8 may be in what a test logs; a worker of xdist cannot send them to its parent."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.fixture(scope="session")
def gpu_tests(pytestconfig: pytest.Config) -> list[str]:
    """The GPU tests among what this session was asked to collect, though it does not run them."""
    return pytestconfig.stash[GPU_TESTS]


@pytest.fixture(scope="session")
def tiny() -> Callable[..., list[str]]:
    """``tiny(run, *more)``: the words of a run of 11 steps over the digits; later words win."""

    def words(run: Path, *more: str) -> list[str]:
        return [*TINY, f"run={run}", *more]

    return words


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]]) -> Path:
    """The folder of a tiny run that came to its end. Tests that write into it take a copy."""
    from dmjd.compose import compose
    from dmjd.train.loop import pretrain

    folder = tmp_path_factory.mktemp("finished") / "run"
    pretrain(compose("pretrain", tiny(folder)))
    return folder


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training and 12 held-out grey PNGs of 16 x 16, in two class folders."""
    import numpy as np
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        for label in ("down", "up"):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                ramp = np.linspace(0, 200, 16)[:: 1 if label == "up" else -1, None]
                pixels = (ramp + rng.integers(0, 56, (16, 16))).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number:02d}.png")
    return root


@pytest.fixture(scope="session")
def write_scenes() -> Callable[..., Path]:
    """``write_scenes(folder, images, val_images, size=(256, 256), classes=..., seed=0)`` of docs/examples."""
    import runpy

    file = Path(__file__).parents[1] / "docs/examples/generated_scenes/scenes.py"
    function: Callable[..., Path] = runpy.run_path(str(file))["write_scenes"]
    return function


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory, write_scenes: Callable[..., Path]) -> Path:
    """12 training and 6 validation images of at most 80 x 96 pixels in the layouts of ADE20K and of COCO, 11 classes
    with the backgrounds and 8 without. Tests that write into it take a copy."""
    return write_scenes(tmp_path_factory.mktemp("scenes"), 12, 6, size=(80, 96))


TINY_DENSE = (
    *("init=null", "backbone.embed_dim=32", "backbone.depth=4", "backbone.num_heads=2", "workers=0", "epochs=1"),
    *("engine.device=cpu", "batch_size=4", "data.image_size=[64,64]", "head.channels=16", "keep_checkpoints=1"),
)


@pytest.fixture(scope="session")
def segmented_once(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ``dmjd segment`` on :func:`scenes`, whose head has two classes more. Only to be read, or to be
    predicted with."""
    pytest.importorskip("transformers", reason="the extra dmjd[dense] is not installed")
    from dmjd.compose import compose
    from dmjd.train import loop

    words = ("data.resize=[64,256]", "head.auxiliary_channels=8", "test.stride=[48,48]", "head.num_classes=13")
    run = tmp_path_factory.mktemp("segmented") / "run"
    return loop.segment(compose("segment", [*TINY_DENSE, *words, f"data.root={scenes}", f"run={run}"])).path


@pytest.fixture(scope="session")
def detected_once(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of ``dmjd detect``, with the classes of the data."""
    pytest.importorskip("torchvision", reason="the extra dmjd[dense] is not installed")
    pytest.importorskip("faster_coco_eval", reason="the extra dmjd[dense] is not installed")
    from dmjd.compose import compose
    from dmjd.train import loop

    words = (
        *("head.box_convs=1", "head.box_width=16", "head.mask_convs=1", "head.samples=16", "head.proposals=16"),
        *("head.proposals_before=16", "head.detections=10", "head.min_score=0.01"),
        *("attention.window=2", "attention.relative_positions=decomposed"),
    )
    run = tmp_path_factory.mktemp("detected") / "run"
    return loop.detect(compose("detect", [*TINY_DENSE, *words, f"data.root={scenes}", f"run={run}"])).path


@pytest.fixture(autouse=True)
def own_root_logger() -> Iterator[None]:
    """Remove the command line's handler from the root logger: it writes to a stream that the test's capture closes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def dmjd(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``dmjd(*arguments)`` -> (exit code, stdout, stderr), in this process."""
    from dmjd.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def launch() -> Callable[..., multiprocessing.process.BaseProcess]:
    """``launch(words, prelude="", **environment)``: a started process of its own that runs ``dmjd`` with these words.

    Forked from a server that has imported everything and computed nothing, so that a start costs milliseconds and not
    seconds. ``prelude`` is Python run in the child first, to plant a fault, or ``PICTURES`` for the pictures that are
    left out otherwise. Its exit code is the command line's.
    """
    from tests.compare import NO_PICTURES

    context = multiprocessing.get_context("forkserver")

    def start(words: list[str], prelude: str = "", **environment: str) -> multiprocessing.process.BaseProcess:
        source = [
            "import os, sys",
            f"os.environ.update({environment!r})",
            NO_PICTURES + prelude,
            "from dmjd.cli import main",
            f"sys.exit(main({words!r}))",
        ]
        process = context.Process(target=exec, args=("\n".join(source), {"__name__": "child"}))
        process.start()
        return process

    return start


@pytest.fixture(scope="session")
def launch_world(
    launch: Callable[..., multiprocessing.process.BaseProcess],
) -> Callable[..., list[multiprocessing.process.BaseProcess]]:
    """``launch_world(size, words, prelude="", preludes={})``: started ranks of one run, as :func:`launch` starts one.

    ``preludes`` holds further faults, by rank.
    """

    def start(
        size: int, words: list[str], prelude: str = "", preludes: Mapping[int, str] | None = None
    ) -> list[multiprocessing.process.BaseProcess]:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        faults = {} if preludes is None else preludes
        return [
            launch(words, f"{prelude}\n{faults.get(rank, '')}", **shared, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(size)
        ]

    return start


@pytest.fixture(scope="session")
def finish_through_kills() -> Callable[..., None]:
    """``finish_through_kills(start, seed, soonest, latest, most)``: a run to its end, through 2 to ``most`` SIGKILLs.

    ``start()`` launches it once; a launch is killed after ``soonest`` to ``latest`` seconds, at random.
    """

    def finish(
        start: Callable[[], multiprocessing.process.BaseProcess], seed: int, soonest: float, latest: float, most: int
    ) -> None:
        moments, kills = random.Random(seed), 0
        while True:
            process = start()
            process.join(moments.uniform(soonest, latest) if kills < most else 120)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            assert kills < most, "left alone, it did not come to its end"
            kills += 1
        assert process.exitcode == 0
        assert kills >= 2

    return finish


@pytest.fixture(scope="session")
def finish_through_fault() -> Callable[..., None]:
    """``finish_through_fault(start, fault)``: a run that ``fault``, code with a SIGKILL in it, ends once."""

    def finish(start: Callable[[str], multiprocessing.process.BaseProcess], fault: str) -> None:
        first = start(fault)
        first.join(60)
        assert first.exitcode == -9, "the fault was not reached"
        second = start("")
        second.join(120)
        assert second.exitcode == 0

    return finish


@pytest.fixture(scope="session")
def assert_same_run() -> Callable[..., None]:
    """``assert_same_run(run, other, *parts)``: equal weights, moments, average, position, generators and log.

    ``parts`` names more of the loop's state. In the journal's, wall time and the length of the file that holds it are
    the machine's and may differ.
    """
    from dmjd.parallel import store
    from dmjd.runs import checkpoint
    from tests.compare import same

    def check(run: Path, other: Path, *parts: str) -> None:
        ends = [checkpoint.newest(path / "checkpoints") for path in (run, other)]
        one, two = (end for end in ends if end is not None)
        assert one.name == two.name
        assert same(store.read(one), store.read(two))
        states = [checkpoint.read_loop_state(end) for end in (one, two)]
        for state in states:
            del state["journal"]["seconds"], state["journal"]["spent"], state["journal"]["offsets"]["timing"]
        for part in ("position", "random", *parts):
            assert same(states[0][part], states[1][part]), part
        assert (run / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()

    return check


@pytest.fixture(scope="session")
def recipe(tiny: Callable[..., list[str]], image_folder: Path) -> Callable[..., list[str]]:
    """``recipe(run, *more)``: two epochs of six steps over a folder of images.

    Checkpoints at 4, 8 and 12 fall into logging windows, which end at 5, 10 and 12.
    """

    def make(run: Path, *more: str) -> list[str]:
        folder = ("data=folder", f"data.root={image_folder}", "data.image_size=[16,16]", "epochs=2", "batch_size=8")
        every = ("log_every=5", "checkpoint_every=4", "keep_checkpoints=9")
        return tiny(run, *folder, *every, *more)

    return make


@pytest.fixture
def words(tmp_path: Path, recipe: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """``words(name, *more)``: the recipe in ``tmp_path / name``."""
    return lambda name, *more: recipe(tmp_path / name, *more)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, recipe: Callable[..., list[str]]) -> Path:
    """The recipe, run to its end without a stop. Only to be read."""
    from tests.compare import pretrain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)
        return pretrain(recipe(tmp_path_factory.mktemp("straight") / "run"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than a tiny run."""
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)


@pytest.fixture
def freeze() -> Iterator[Callable[[Path], None]]:
    """``freeze(folder)``: for the rest of the test the kernel refuses to remove anything from it, of root too."""
    frozen: list[Path] = []

    def attribute(sign: str, folder: Path) -> None:
        changed = subprocess.run(["chattr", f"{sign}i", folder], capture_output=True, text=True)
        if changed.returncode:
            pytest.skip(f"an unremovable folder needs root and a file system with attributes: {changed.stderr.strip()}")

    def act(folder: Path) -> None:
        attribute("+", folder)
        frozen.append(folder)

    yield act
    for folder in frozen:
        attribute("-", folder)


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])
