from __future__ import annotations

import subprocess
import sys
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from dmjd.builders.average import Ema
from dmjd.config import EngineConfig, OptimConfig
from dmjd.parallel import store
from dmjd.parallel.build import build_engine
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.staging import HostCopies
from dmjd.parallel.world import join_world
from tests.parallel.walk import make_batch, make_objective


def make(value: float) -> dict[str, Any]:
    return {
        "tensors": [torch.full((2, 3), value), torch.tensor(value)],
        "nested": OrderedDict(a=(torch.full((4,), value, dtype=torch.bfloat16), "word"), shape=torch.Size((5, 6))),
        "numbers": {"step": 3, "list": [1, 2]},
    }


def test_a_copy_is_equal_and_does_not_follow() -> None:
    copies, state = HostCopies(torch.device("cpu")), make(1.0)
    copied = copies.take(state)
    state["tensors"][0].zero_()
    state["numbers"]["list"].append(3)
    expected = make(1.0)
    assert torch.equal(copied["tensors"][0], expected["tensors"][0])
    assert torch.equal(copied["tensors"][1], expected["tensors"][1])
    assert type(copied["nested"]) is OrderedDict
    assert torch.equal(copied["nested"]["a"][0], expected["nested"]["a"][0])
    assert copied["nested"]["a"][1] == "word"
    assert type(copied["nested"]["shape"]) is torch.Size
    assert copied["numbers"] == expected["numbers"]


def test_memory_is_kept_from_copy_to_copy() -> None:
    copies = HostCopies(torch.device("cpu"))
    first = copies.take(make(1.0))["tensors"][0]
    second = copies.take(make(2.0))["tensors"][0]
    assert first.data_ptr() == second.data_ptr()
    assert second.eq(2).all()
    larger = copies.take({"tensors": [torch.zeros(9)]})["tensors"][0]
    assert larger.shape == (9,)


def test_memory_is_allocated_before_the_first_copy() -> None:
    """Whatever the order of the tensors: DeepSpeed's moments come with its first step."""
    copies = HostCopies(torch.device("cpu"))
    tensors = [torch.ones(3), torch.ones(2, 3), torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
    copies.prepare([tensors[::-1], torch.empty(9, device="meta")])
    copies._join()
    before = {buffer.data_ptr() for buffers in copies._buffers.values() for buffer in buffers}
    after = {copied.data_ptr() for copied in copies.take({"a": tensors, "b": torch.ones(9)})["a"]}
    assert len(before) == 5
    assert after < before


def test_a_process_that_ends_meanwhile_keeps_its_exit_code() -> None:
    """Torch aborts a thread that Python ends while memory is allocated."""
    code = (
        "import sys, torch; from dmjd.parallel.staging import HostCopies; "
        "HostCopies(torch.device('cpu')).prepare([torch.empty(10, device='meta')] * 10**6); sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2


def test_a_tensor_may_be_made_when_its_turn_comes() -> None:
    copies, made = HostCopies(torch.device("cpu")), list[int]()

    def make(number: int) -> torch.Tensor | None:
        made.append(number)
        return torch.full((2,), number) if number != 1 else None

    copied = copies.take({name: partial(make, number) for number, name in enumerate("cab")})
    assert made == [0, 1, 2]
    assert copied["a"] is None
    assert [copied[name].tolist() for name in "cb"] == [[0, 0], [2, 2]]


def test_memory_that_cannot_be_pinned_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = torch.empty

    def empty(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return plain(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    copies = HostCopies(torch.device("cpu"))
    copies._pins = True
    copies.prepare([torch.ones(3), torch.ones(4)])
    assert copies.take([torch.ones(3), torch.ones(4)])[1].tolist() == [1, 1, 1, 1]
    (warning,) = caplog.messages
    assert warning.endswith("for longer: CUDA error: out of memory")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_threads_take_no_memory_of_the_first_device() -> None:
    code = """
import threading, torch
from dmjd.parallel.staging import HostCopies
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
copies, state = HostCopies(device), [torch.ones(3, device=device)]
copies.prepare(state)
copies.take(state)
saving = threading.Thread(target=copies.wait)
saving.start()
saving.join()
print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, True]\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_copies_beside_what_is_launched_next() -> None:
    device = torch.device("cuda")  # without an index, as a run of one process has it
    copies, state = HostCopies(device), torch.zeros(1 << 30, device=device)  # 4 GiB
    copies.prepare([state])
    copies._join()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    copied = copies.take([state])[0]
    copies.before_change()
    state.fill_(1)
    launched = time.perf_counter() - begin
    copies.wait()
    complete = time.perf_counter() - begin
    assert copied.is_pinned()
    assert not copied.any()
    assert launched < 0.02 < complete


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["single", "fsdp", "zero2", "zero3"])
def test_a_step_does_not_change_what_is_being_copied(name: str, tmp_path: Path) -> None:
    """The copy begins late, long after the host has launched the step that follows."""
    if ENGINES[name].stage:
        pytest.importorskip("deepspeed", reason="the extra dmjd[scale] is not installed")
    config = EngineConfig(name=name, device="cuda", precision="fp32")
    world = join_world(torch.device("cuda", 0), config)
    engine: Any = build_engine(make_objective(), config, OptimConfig(), world)
    ema = Ema(engine.local_shards(), 0.5)

    def step(number: int) -> None:
        inputs = tree_map(lambda tensor: tensor.cuda(), make_batch(number, range(4)))
        with engine.micro_batch(last=True):
            engine.backward(engine.module(*inputs).total)
        ema.update(engine.step(0.1, 0.05).applied)

    engine.prepare_save(ema.averages)
    for number in range(3):  # DeepSpeed's stage 3 fetches ahead from the third on
        step(number)
    parameters = {key: value.clone() for key, value in engine.full_state_dict().items()}
    averages = {average: value.flatten().clone().cpu() for average, value in ema.averages.items()}
    with torch.cuda.stream(engine._copies._stream):
        torch.cuda._sleep(1_000_000_000)  # half a second
    write = engine.save(tmp_path, ema.averages)
    step(3)
    assert any(not torch.equal(value, parameters[key]) for key, value in engine.full_state_dict().items())
    write()
    saved = store.read_model(tmp_path)
    assert all(torch.equal(saved[key], value) for key, value in parameters.items())
    for key, value in store.read_average(tmp_path).items():
        assert torch.equal(value.flatten(), averages[key][: value.numel()]), key  # stage 3 pads
    engine.close()
    world.close()
