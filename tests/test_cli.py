from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from dmjd import __version__, cli
from dmjd.cluster.submit import submit
from dmjd.compose import compose, from_yaml, with_first_key
from dmjd.config import PLANS, SCHEMAS, PretrainConfig
from dmjd.errors import Diverged, UserError
from dmjd.evaluate import EVALUATIONS
from dmjd.ops import status
from dmjd.runs import checkpoint

Words = Callable[..., list[str]]
Command = Callable[..., tuple[int, str, str]]


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def rejected(outcome: tuple[int, str, str], *parts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that has every part."""
    code, out, err = outcome
    assert code == 2, (code, out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0], f"{lines[0]!r} lacks {part!r}"


# Help, version, configuration


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command_once_in_its_group(dmjd: Command, words: tuple[str, ...]) -> None:
    code, out, err = dmjd(*words)
    assert (code, err) == (0, "")
    blocks = [block.splitlines() for block in out.split("\n\n")[3:]]
    assert {block[0]: [line.split()[0] for line in block[1:]] for block in blocks} == {
        group: [*EVALUATIONS, *commands] if group == "evaluate" else list(commands)
        for group, commands in cli.GROUPS.items()
    }
    assert all(len(line.split()) > 3 for block in blocks for line in block[1:]), "a command's line explains it"
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("command", [*cli.COMMANDS, *EVALUATIONS])
def test_every_command_has_help(dmjd: Command, command: str) -> None:
    code, out, err = dmjd(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"dmjd {command}: ")
    assert "\nexamples\n  " in out
    assert dmjd(command, "key=value", "-h") == (0, out, "")


def test_help_of_pretrain_lists_groups_and_keys(dmjd: Command) -> None:
    out = dmjd("pretrain", "--help-all")[1]
    assert "\n  experiment " in out
    assert "\n  optim.lr_rule=adaptive            (adaptive | classic)\n      Peak learning rate. adaptive (" in out


def test_help_shows_the_values_under_the_overrides_before_it(dmjd: Command) -> None:
    assert "\n  epochs=1 " in dmjd("pretrain", "experiment=demo", "--help")[1]
    assert "\n  checkpoint=runs/first " in dmjd("knn", "runs/first", "--help")[1]


def test_help_of_submit_and_shards_explains_every_argument(dmjd: Command) -> None:
    out = dmjd("submit", "--help")[1]
    commands = ", ".join([*PLANS, "preflight", *EVALUATIONS, "embed", "predict"])
    assert f"\n  COMMAND      {commands}\n  --dry-run    print the script" in out
    _, _, usages, meanings = dmjd("shards", "--help")[1].split("\n\n", 3)
    arguments = set(re.findall(r"\b[A-Z]{2,}\b", "".join(re.findall("  dmjd shards .*", usages))))
    assert arguments == {"SRC", "DST", "TAR", "ROOT"}
    assert arguments < {line.split()[0] for line in meanings.splitlines()}


def test_help_of_report_explains_the_papers_columns(dmjd: Command) -> None:
    out = dmjd("report", "--help")[1]
    assert "dmjd report runs/photos runs/finetune" in out
    assert all(
        re.search(rf"^  {re.escape(title)} +\S", out, re.MULTILINE) for title in ("ETE", "Gh.", "Ft.", "LP", "kNN")
    )
    assert "differ only in the seed are one row: mean ± standard deviation" in out


def test_a_former_key_is_reported_once_and_by_rank_0_alone(dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("knn", "run", "experiment=demo", "backbone.hidden=drop")
    for command in (words, ("submit", *words, "--dry-run")):
        assert dmjd(*command)[2].count("backbone.hidden is now called backbone.masked_tokens\n") == 1
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "is now called" not in dmjd(*words)[2]


def test_version(dmjd: Command) -> None:
    for words in (["--version"], ["version"]):
        assert dmjd(*words) == (0, f"dmjd {__version__}\n", "")


def test_options_are_read_as_keys(dmjd: Command) -> None:
    plain = dmjd("pretrain", "experiment=demo", "epochs=3", "data.root=a b", "batch_size=8", "--cfg")
    options = ["--experiment", "demo", "--epochs=3", "--data.root", "a b", "--batch-size", "8"]
    assert dmjd("pretrain", "--cfg", *options) == plain
    assert plain[0] == 0


def test_help_has_two_levels_and_its_examples_can_be_typed(dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert dmjd("help", "pretrain") == dmjd("pretrain", "--help")
    short, long = dmjd("pretrain", "--help")[1], dmjd("pretrain", "--help-all")[1]
    assert dmjd("pretrain", "--help", "all")[1] == long
    keys = [set(re.findall(r"^  ([\w.]+)=", text, re.MULTILINE)) for text in (short, long)]
    assert keys[0] < keys[1]
    assert f"dmjd pretrain --help-all lists all {len(keys[1])} keys" in short
    for command in (*cli.COMMANDS, *EVALUATIONS):
        found = re.findall(rf"^  dmjd {command} (.*)", dmjd(command, "--help")[1], re.MULTILINE)
        if command in SCHEMAS:
            assert len(found) == 3
            for words in map(shlex.split, found):
                of_task = command == "plan" and words[0] in PLANS
                schema, words = (PLANS[words[0]], words[1:]) if of_task else (command, words)
                compose(schema, with_first_key(schema, words))


def test_a_checkpoint_in_a_folder_named_like_an_override_is_found(
    dmjd: Command, tmp_path: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(finished_run, "lr=1e-3 (a)")
    for words in (["consolidate", "lr=1e-3 (a)"], ["report", "~/lr=1e-3 (a)"], ["doctor", "~/lr=1e-3 (a)"]):
        code, out, err = dmjd(*words)
        assert (code, err) == (0, ""), words
        assert "lr=1e-3 (a)" in out or "finished" in out


def test_bash_completes_commands_groups_options_and_keys(dmjd: Command, tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", "dmjd", "completion", "bash")
    assert done.returncode == 0
    assert not re.search(r"\| +(torch|hydra|omegaconf)$", done.stderr, re.MULTILINE), "it starts in a moment"
    (tmp_path / "photos").mkdir()
    asked = {
        "dmjd pret": "pretrain",
        "dmjd help conv": "convert",
        "dmjd pretrain mask.mask": "mask.mask_ratio=",
        "dmjd pretrain epochs=3 engine.comp": "engine.compile=none engine.compile=block engine.compile=model",
        "dmjd pretrain engine.compile=bl": "block",
        "dmjd pretrain experiment=mae_vit_b": "mae_vit_base mae_vit_base_100 mae_vit_base_1600",
        "dmjd pretrain data.root=pho": "photos",
        "dmjd knn pho": "photos",
        "dmjd submit pretrain --dry": "--dry-run",
        "dmjd shards ver": "verify",
    }
    program = [done.stdout, f"cd {tmp_path}"]
    for line in asked:
        program += [f"COMP_LINE={line!r}; COMP_POINT={len(line)}; COMP_WORDS=({line})", "_dmjd; echo ${COMPREPLY[*]}"]
    found = subprocess.run(["bash", "-c", "\n".join(program)], capture_output=True, text=True, timeout=30, check=True)
    assert dict(zip(asked, found.stdout.splitlines(), strict=True)) == asked
    for shell in ("zsh", "fish"):
        script = dmjd("completion", shell)[1]
        assert "engine.compile=block" in script
        assert "data.root=" in script


def test_cfg_prints_what_would_run_and_runs_nothing(
    dmjd: Command, tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = tiny(tmp_path / "run", "optim.base_lr=2e-4")
    code, out, err = dmjd("pretrain", *words[:3], "--cfg", *words[3:])
    assert (code, err) == (0, "")
    assert from_yaml(PretrainConfig, out) == compose("pretrain", words)
    assert everything(tmp_path) == set()


def test_help_and_errors_do_not_import_torch() -> None:
    program = """
import sys
from dmjd.cli import main
codes = [main(w) for w in (["--help"], ["nonsense"], ["pretrain", "--help"], ["pretrain", "epochs=x"], ["knn"])]
assert codes == [0, 2, 0, 2, 2], codes
assert "torch" not in sys.modules
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "taken"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_threads_that_wait_sleep_unless_the_user_has_chosen(
    given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
    if library is None:
        pytest.skip("this torch does not bring GNU's OpenMP")
    monkeypatch.setenv("OMP_DISPLAY_ENV", "true")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    done = python("-c", f"import ctypes; from dmjd.cli import main; main(['version']); ctypes.CDLL({str(library)!r})")
    assert f"OMP_WAIT_POLICY = '{taken}'" in done.stderr


def test_the_package_is_the_program(tmp_path: Path) -> None:
    done = python("-m", "dmjd", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dmjd {__version__}\n", "")
    done = python("-m", "dmjd", "pretrain", "experiment=demo", "epochz=3", cwd=tmp_path)
    rejected((done.returncode, done.stdout, done.stderr), "epochz is not a key; did you mean epochs?")
    assert everything(tmp_path) == set()


def test_sigint_during_imports_ends_the_command_without_a_traceback() -> None:
    program = """
import os, runpy, signal, sys
imported = sys.argv[1]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == imported:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["dmjd", "pretrain"]
runpy.run_module("dmjd", run_name="__main__")
"""
    done = python("-c", program, "dmjd.config")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    # Later imports are those of a command, which prints one line.
    done = python("-c", program, "dmjd.compose")
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)


def test_characters_outside_the_encoding_of_stdout_are_escaped(tmp_path: Path) -> None:
    words = ("-m", "dmjd", "pretrain", "--cfg", "run=caf\u00e9 \u2192")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf\xe9 \\u2192" in done.stdout


@pytest.mark.parametrize(("closed", "code", "errors"), [("<&- >&-", 0, 0), (">&- 2>&-", 0, 0), (">/dev/full", 1, 1)])
def test_help_ends_in_order_where_nothing_can_be_printed(closed: str, code: int, errors: int) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m dmjd --help {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, errors), done.stderr


def test_a_folder_that_is_gone_and_the_plots_of_a_notebook_are_no_tracebacks(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    run = shlex.quote(sys.executable)
    command = f"cd gone && rmdir ../gone && exec {run} -m dmjd pretrain data.root=x --cfg"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent), "MPLBACKEND": "module://absent"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("error: the current folder does not exist any more; change into another folder\n")
    program = "from dmjd.cli import main; assert main(['version']) == 0; import dmjd.charts"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_folder_is_described_by_what_it_is(dmjd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    rejected(dmjd("pretrain", "data=photos"), "data has no option 'photos'; data.root=photos reads")
    rejected(dmjd("pretrain", "photos"), "write key=value: data.root=photos")
    rejected(dmjd("plan", "run"), "it is a run folder, and dmjd plan takes no run folder")
    rejected(dmjd("knn", "run", "run"), "it is a run folder, and dmjd knn takes only one run folder")
    assert dmjd("doctor", "run=run") == dmjd("doctor", "run")


def test_ops_status_lists_the_kernel_of_each_op(dmjd: Command) -> None:
    code, out, err = dmjd("ops", "status")
    assert (code, err) == (0, "")
    build, table = out.split("\n\n")
    assert f"dmjd {__version__} on torch {torch.__version__}" in build
    head, *rows = table.splitlines()
    columns = [head.index(title) for title in ("op", "CPU", "CUDA")]
    cells = [[row[begin:end].strip() for begin, end in zip(columns, [*columns[1:], None], strict=True)] for row in rows]
    assert {name: {"CPU": cpu, "CUDA": cuda} for name, cpu, cuda in cells} == status()


def test_ops_status_names_the_architectures_of_the_build(dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"compiler": "GCC 1", "torch_target": "2.11", "cuda": "13.0", "cuda_archs": ["8.0", "9.0+PTX"]}
    monkeypatch.setattr("dmjd.ops.build_info", lambda: info)
    assert "built by GCC 1 for torch >= 2.11, CUDA 13.0 for 8.0;9.0+PTX\n" in dmjd("ops", "status")[1]
    monkeypatch.setattr("dmjd.ops.build_info", lambda: None)
    assert "no native build" in dmjd("ops", "status")[1]


# Errors of the user's input


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["pretrian"], ["no command 'pretrian'; did you mean pretrain?"]),
        (["PRETRAIN"], ["did you mean pretrain?"]),
        (["test"], ["no command 'test'; choose from"]),
        (["shards", "biuld"], ["did you mean build?"]),
        (["zzz"], ["'zzz'", "pretrain, finetune, segment, detect, demo, plan, report, embed", "knn, linprobe"]),
        (["pretrain", "--epochs"], ["--epochs needs a value: --epochs=VALUE or epochs=VALUE"]),
        (["submit", "pretrain", "--dryrun"], ["did you mean --dry-run?"]),
        (["submit", "Pretrain"], ["'Pretrain' cannot be submitted; did you mean pretrain?"]),
        (["pretrain", "--epochs", "--cfg"], ["--epochs needs a value"]),
        (["pretrain", "--epohcs=3"], ["epohcs is not a key; did you mean epochs?"]),
        (["knn", "lr=1e-3"], ["lr is not a key"]),
        (["completion", "csh"], ["bash, zsh, fish"]),
        (["--cfg", "pretrain"], ["'--cfg'"]),
        (["nonsense", "--help"], ["'nonsense'"]),
        (["report"], ["one run folder"]),
        (["report", "a", "b"], ["no run folder at a"]),
        (["report", "absent"], ["absent"]),
        (["report", "."], ["config.yaml"]),
        (["report", "--cfg"], ["--cfg works with pretrain, finetune, plan", "knn, linprobe"]),
        (["ops"], ["dmjd ops status"]),
        (["ops", "list"], ["dmjd ops status"]),
        (["knn"], ["checkpoint is required"]),
        (["knn", "checkpoint=absent"], ["checkpoint=absent does not exist"]),
        (["linprobe", "checkpoint=."], ["holds no complete checkpoint"]),
        (["pretrain", "--cfg", "job"], ["'job'"]),
        (["knn", "checkpoint=a\nb"], ["checkpoint=a\\nb does not exist"]),
        (["report", "a\nb"], ["no run folder at a\\nb"]),
        (["doctor", "a\n\x1b[1mb"], ["a\\n\\x1b[1mb is not a run folder"]),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(
    dmjd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rejected(dmjd(*words), *parts)
    assert everything(tmp_path) == set()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["epochz=3"], ["epochz", "did you mean epochs?"]),
        (["experiment=dmeo"], ["experiment", "demo"]),
        (["mask.block=[3,3]"], ["block 3x3", "8x8"]),
        (["mask.pred_ratio=.1"], ["pred_ratio=0.1", "between 0.6875 and 1"]),
        (["engine.grad_accum_steps=3"], ["engine.grad_accum_steps=3", "batch_size=128"]),
        (["engine.device=cuda"], ["engine.device=cuda", "cpu or auto"]),
        (["data.channels=3", "data.mean=[0,0,0]", "data.std=[1,1,1]"], ["data.channels=3", "data.channels=1"]),
        (["batch_size=1438"], ["batch_size", "1438", "1437"]),
        (["seed=-1"], ["seed", "-1"]),
        (["data=folder"], ["data.root"]),
        (["data=folder", "data.root=absent"], ["data.root=absent is not a folder"]),
        (["data=fashion_mnist", "data.root=."], ["data.root"]),
        (["run="], ["run"]),
        (["run=taken"], ["run=taken is a file or is below one"]),
        (["run=taken/run"], ["run=taken/run"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_pretraining_is_one_line_and_leaves_nothing(
    dmjd: Command, tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    before = everything(tmp_path)
    rejected(dmjd("pretrain", *tiny(Path("run"), *words)), *parts)
    assert everything(tmp_path) == before


FOLDER = ("data=folder", "data.image_size=[16,16]", "batch_size=8")


def copy_of(images: Path, to: Path) -> Path:
    return Path(shutil.copytree(images, to))


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "class folders"])
def test_an_own_folder_of_images_trains(
    dmjd: Command, tiny: Words, tmp_path: Path, image_folder: Path, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)
    root = tmp_path / "my images (1)"
    root.mkdir()
    for number, path in enumerate(sorted(image_folder.glob("train/*/*.png"))):
        folder = root if flat else root / path.parent.name
        folder.mkdir(exist_ok=True)
        shutil.copy(path, folder / f"{number}.png")
    code, out, err = dmjd("pretrain", *tiny(tmp_path / "run", *FOLDER, f"data.root='{root}'"))
    assert code == 0, err
    assert str(tmp_path / "run") in out
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_an_empty_folder_has_no_images(dmjd: Command, tiny: Words, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    rejected(dmjd("pretrain", *tiny(tmp_path / "run", *FOLDER, f"data.root={tmp_path / 'empty'}")), "empty")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_image_is_named(dmjd: Command, tiny: Words, tmp_path: Path, image_folder: Path) -> None:
    root = copy_of(image_folder, tmp_path / "images")
    (root / "train" / "up" / "03.png").write_text("not a picture")
    rejected(dmjd("pretrain", *tiny(tmp_path / "run", *FOLDER, f"data.root={root}")), "up/03.png", "cannot be read")
    assert not (tmp_path / "run").exists()


def test_an_image_smaller_than_the_crop_is_named(
    dmjd: Command, tiny: Words, tmp_path: Path, image_folder: Path
) -> None:
    root = copy_of(image_folder, tmp_path / "images")
    Image.new("L", (16, 12)).save(root / "train" / "up" / "03.png")
    rejected(dmjd("pretrain", *tiny(tmp_path / "run", *FOLDER, f"data.root={root}")), "up/03.png (12x16)", "16x16 crop")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_image_cut_short_is_named_when_its_turn_comes(
    dmjd: Command, tiny: Words, tmp_path: Path, image_folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)
    root = copy_of(image_folder, tmp_path / "images")
    broken = root / "train" / "up" / "03.png"
    os.truncate(broken, broken.stat().st_size // 2)
    words = [*FOLDER, f"data.root={root}", "checkpoint_every=1", "keep_checkpoints=99", f"workers={workers}"]
    # Its header is sound, so only a thorough check finds it before the run begins.
    rejected(dmjd("pretrain", *tiny(tmp_path / "run", *words, "data.check=decode")), "up/03.png", "cannot be read")
    assert not (tmp_path / "run").exists()
    code, out, err = dmjd("pretrain", *tiny(tmp_path / "run", *words))
    end = err.splitlines()[-1]  # after the lines of the start
    rejected((code, out, end), "up/03.png", "1 of 48 images are bad", "data.max_bad_percent")
    folder = tmp_path / "run" / "checkpoints"
    assert all((path / checkpoint.MANIFEST).exists() for path in folder.glob("*"))
    assert folder.exists() == bool(checkpoint.newest(folder))


def test_a_checkpoint_of_another_model_is_rejected_by_its_stored_configuration(
    dmjd: Command, tiny: Words, tmp_path: Path, finished_run: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run / "checkpoints", run / "checkpoints")
    before = everything(run)
    rejected(
        dmjd("pretrain", *tiny(run, "backbone.depth=2")), "was started with backbone.depth=1", "name another folder"
    )
    assert everything(run) - {run / ".lock"} == before


def test_another_experiment_in_a_used_folder_is_rejected(
    dmjd: Command, tiny: Words, tmp_path: Path, finished_run: Path
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rejected(dmjd("pretrain", *tiny(run, "seed=1")), "seed=0", "seed=1", "another folder")
    rejected(dmjd("pretrain", *tiny(run, "resume=never")), "resume=never")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# Other exits


def test_a_finished_run_prints_the_next_command(dmjd: Command, tiny: Words, tmp_path: Path, finished_run: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    code, out, err = dmjd("pretrain", *tiny(run))
    assert code == 0, err
    assert f"dmjd knn {run}" in out
    assert "continuing from" in err
    code, out, err = dmjd("report", str(run))
    assert (code, err) == (0, "")
    assert Path(out.strip().splitlines()[-1]) == run / "report.html"
    assert "<html" in (run / "report.html").read_text()


def outcome_of(dmjd: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> tuple[int, str, str]:
    def command(arguments: object) -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "pretrain", command)
    return dmjd("pretrain")


def test_a_loss_that_is_not_finite_is_exit_code_one(dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(dmjd, monkeypatch, Diverged("step 3 gave a loss of nan"))
    assert outcome == (1, "", "error: step 3 gave a loss of nan\n")


def test_an_interrupt_is_no_traceback(dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = outcome_of(dmjd, monkeypatch, KeyboardInterrupt())
    assert (code, out, len(err.splitlines())) == (130, "", 1)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), AssertionError("a bug"), ModuleNotFoundError(name="dmjd.x")])
def test_bugs_keep_their_traceback(dmjd: Command, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(type(error)):
        outcome_of(dmjd, monkeypatch, error)


def test_a_missing_package_names_the_extra_that_has_it(dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dmjd.compose")
    monkeypatch.setitem(sys.modules, "hydra", None)
    rejected(dmjd("pretrain", "experiment=demo"), "hydra", "pip install 'dmjd[train]'")


@pytest.mark.parametrize(("reported", "printed"), [(False, True), (True, False)])
def test_an_error_that_another_rank_prints_is_not_printed_twice(
    reported: bool, printed: bool, monkeypatch: pytest.MonkeyPatch, dmjd: Command
) -> None:
    error = UserError("the shards are gone")
    error.reported = reported

    def command(arguments: object) -> None:
        raise error

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(cli.COMMANDS, "pretrain", command)
    assert dmjd("pretrain") == (2, "", "error: the shards are gone\n" * printed)


@pytest.fixture
def misnamed(tmp_path: Path, finished_run: Path) -> Path:
    """A finished run in a folder whose name is Latin-1's ``é``, as archives of old machines have them."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        shutil.copytree(finished_run, folder)
    except OSError:
        pytest.skip("this file system rejects names that are not UTF-8")
    return folder


def test_a_run_whose_name_is_not_utf_8_has_a_report_and_a_doctor(misnamed: Path, finished_run: Path) -> None:
    def output_of(*arguments: str | Path) -> bytes:
        environment = {"PYTHONPATH": str(Path(cli.__file__).parent.parent), "PYTHONIOENCODING": "utf-8:strict"}
        command = [sys.executable, "-m", "dmjd", *map(str, arguments)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    assert output_of("report", misnamed).splitlines()[-1] == os.fsencode(misnamed) + b"/report.html"
    assert "<title>caf\\xe9" in (misnamed / "report.html").read_text()
    output = misnamed.parent / os.fsdecode(b"\xff")
    output_of("report", misnamed, finished_run, f"output={output}", f"baseline={misnamed}")
    assert "caf\\xe9" in (output / "comparison.html").read_text()
    assert (output / "comparison.md").read_text()
    # The marker of a run that was begun there names it, for the next command.
    marker = misnamed / "STOP_REASON"
    marker.write_text(marker.read_text().replace(str(finished_run), json.dumps(str(misnamed))[1:-1]))
    assert os.fsencode(misnamed) in output_of("doctor", misnamed)


def test_a_name_that_has_to_be_utf_8_is_an_error(
    misnamed: Path, tmp_path: Path, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, argument in (
        ("pretrain", f"run={misnamed}"),
        ("plan", f"run='{misnamed}'"),
        ("knn", str(misnamed)),
        ("submit", f"run={misnamed}"),
    ):
        arguments = ["pretrain", argument] if command == "submit" else [argument]
        rejected(dmjd(command, *arguments), "caf\\xe9", "is not UTF-8", "rename")
    monkeypatch.chdir(misnamed)
    rejected(dmjd("export", "."), "caf\\xe9 is not UTF-8, and safetensors takes no other", "output=FILE")
    target = tmp_path / "encoder.safetensors"
    assert dmjd("export", ".", f"output={target}")[0] == 0
    assert target.is_file()


def test_a_job_is_submitted_from_a_folder_whose_name_is_not_utf_8(
    misnamed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(misnamed)
    assert submit("pretrain", ["experiment=demo", "run=new"])[-1].startswith("submitted: 7;")
    (script,) = (misnamed / "new" / "slurm").glob("*.sbatch")
    assert b"#SBATCH --chdir='" + os.fsencode(misnamed) + b"'\n" in script.read_bytes()


def test_a_long_value_is_cut_and_the_end_of_the_error_is_kept(dmjd: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = dmjd("pretrain", "run=r", "epochs=" + "x" * 100_000)
    assert code == 2
    assert err.startswith("error: ")
    assert len(err) < 5000


@pytest.mark.parametrize(
    "word", ["data.image_size=[16,1000000000]", "data.std=[1e40]", "data.mean=[-1e40]", "backbone.mlp_ratio=1e40"]
)
def test_numbers_beyond_any_image_are_rejected(dmjd: Callable[..., tuple[int, str, str]], word: str) -> None:
    code, _, err = dmjd("pretrain", "run=r", "data=digits", word)
    assert code == 2
    assert re.fullmatch(r"error: [\w.]+ must be at .*, got .*\n|error: [\w.]+ must be above .*, got .*\n", err)


def test_memory_that_is_not_there_is_one_line(
    dmjd: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "ops", lambda words: torch.empty(1 << 60, dtype=torch.uint8))
    code, _, err = dmjd("ops", "status")
    assert code == 1
    assert re.fullmatch(r"error: .*allocate.*1152921504606846976.*; use smaller images.*\n", err)
