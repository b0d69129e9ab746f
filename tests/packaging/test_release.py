"""The release files agree with the project and with each other. CI builds no image, so what they name is looked up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
DOCKERFILE = (PACKAGING / "Dockerfile").read_text()
APPTAINER = (PACKAGING / "dmjd.def").read_text()
SCRIPTS = sorted(PACKAGING.glob("*.sh"))


# As libstdc++ declares its namespace, which -fvisibility=hidden then does not reach.
DEFAULT = 'namespace std __attribute__((visibility("default"))) {'


def check_wheel(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PACKAGING / "check_wheel.py", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_wheel_needs_only_plain_c_of_torch_and_an_old_runtime(wheel: Path) -> None:
    # The libraries built in place too: the CUDA one is there where a toolkit is.
    done = check_wheel(wheel, *ROOT.glob("dmjd/*.so"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_C_cpu.abi3.so: good" in done.stdout


@pytest.mark.slow
def test_a_wheel_that_needs_a_newer_runtime_is_refused(wheel: Path) -> None:
    done = check_wheel("--glibc", "2.4", "--glibcxx", "3.4.9", wheel)
    assert done.returncode == 1
    assert re.search(
        r"_C_cpu.abi3.so: needs GLIBC 2\.\d+, above the ceiling 2\.4: build on an older system", done.stdout
    )
    assert re.search(r"_C_cpu.abi3.so: needs GLIBCXX 3\.4\.\d+, above the ceiling 3\.4\.9", done.stdout)


def test_a_library_that_calls_cpp_of_torch_is_refused(tmp_path: Path) -> None:
    source = "namespace at { int answer(); } namespace c10 { struct Half { int bits() const; }; }"
    call = 'extern "C" int torch_library_impl(); int use(c10::Half& h) {'
    call += " return at::answer() + h.bits() + torch_library_impl(); }"
    library = tmp_path / "_C_locked.so"
    subprocess.run(
        ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=source + call, text=True, check=True
    )
    done = check_wheel(library)
    assert done.returncode == 1
    assert "_C_locked.so: needs 2 C++ symbols of torch, such as _ZN" in done.stdout


def test_a_library_that_exports_more_than_its_init_function_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "_jpeg.so"
    source = 'extern "C" int PyInit__jpeg() { return 0; } namespace std { int to_string(long) { return 1; } }'
    for flags, complaint in (
        ([], "_jpeg.so: exports 1 symbols besides its init function, such as _ZSt9to_stringl"),
        ([f"-Wl,--version-script={ROOT / 'csrc' / 'exports.map'}"], "_jpeg.so: good"),
    ):
        command: list[str | Path] = [
            "c++",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-x",
            "c++",
            "-",
            "-o",
            library,
            *flags,
        ]
        subprocess.run(command, input=source.replace("namespace std {", DEFAULT), text=True, check=True)
        assert complaint in check_wheel(library).stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_run(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "dmjd.def", "build_wheel.sh", "check_torch_versions.sh"])
def test_paths_that_release_files_name_exist(name: str) -> None:
    text = (PACKAGING / name).read_text()
    named = set(re.findall(r"\bpackaging/[\w.]+", text))
    if name == "dmjd.def":
        files = text.split("%files\n")[1].split("\n\n")[0]
        pairs = [line.split() for line in files.splitlines()]
        assert all(target == f"/src/{source}" for source, target in pairs)
        named |= {source for source, _ in pairs}
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_what_the_apptainer_definition_copies_is_enough_for_an_sdist(tmp_path: Path) -> None:
    files = APPTAINER.split("%files\n")[1].split("\n\n")[0]
    for source in (line.split()[0] for line in files.splitlines()):
        (tmp_path / source).symlink_to(ROOT / source)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path / "out")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "DMJD_EXT": "off", "DMJD_CUDA": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("dmjd-*.tar.gz"))


def test_extras_that_images_install_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M))
    for text in (DOCKERFILE, APPTAINER):
        (wanted,) = re.findall(r"dmjd-\*\.whl\)\[([\w,]+)\]", text)
        assert set(wanted.split(",")) <= extras


def test_both_images_are_built_alike() -> None:
    def steps(text: str) -> set[str]:
        text = text.replace("{{ TORCH }}", "$TORCH").replace("{{ ARCHS }}", "$ARCHS")
        commands = re.findall(r"(?:apt-get install|/opt/dmjd/bin/pip|packaging/build_wheel\.sh)[^&\\\n]*", text)
        return {command.strip() for command in commands}

    assert steps(DOCKERFILE) == steps(APPTAINER)

    def bases(text: str) -> list[str]:
        text = re.sub(r"\$\{(\w+)\}|\{\{ (\w+) \}\}", lambda match: match[1] or match[2], text)
        return re.findall(r"^(?:From:|FROM) (\S+)", text, re.M)

    assert bases(DOCKERFILE) == bases(APPTAINER)
    for name in ("CUDA", "TORCH", "ARCHS"):
        (docker,) = re.findall(rf'^ARG {name}="?([^"\n]+)', DOCKERFILE, re.M)
        (apptainer,) = re.findall(rf"^    {name}=(.+)$", APPTAINER, re.M)
        assert docker == apptainer


def test_one_list_of_cards_for_every_release() -> None:
    (script,) = re.findall(r"TORCH_CUDA_ARCH_LIST:-([^}]+)", (PACKAGING / "build_wheel.sh").read_text())
    (docker,) = re.findall(r'ARG ARCHS="(.+)"', DOCKERFILE)
    assert script == docker
    assert "8.0" in script.split(";")  # A100
    assert script.endswith("+PTX")  # cards that do not exist yet
    assert script in (ROOT / "docs" / "building.md").read_text()


def test_one_oldest_torch_everywhere() -> None:
    places = {
        "pyproject.toml": r'dependencies = \["torch>=([\d.]+)"\]',
        "setup.py": r'TORCH_TARGET = "([\d.]+)"',
        "CMakeLists.txt": r"set\(DMJD_TORCH_TARGET ([\d.]+)\)",
        "packaging/check_torch_versions.sh": r"\$\{1:-([\d.]+?)\.0\}",
        "docs/building.md": r"every torch from ([\d.]+\d) on",
    }
    found = {}
    for path, pattern in places.items():
        match = re.search(pattern, (ROOT / path).read_text())
        assert match, path
        found[path] = match[1]
    assert len(set(found.values())) == 1, found
    major, minor = map(int, found["setup.py"].split("."))
    target = f"0x{major:02x}{minor:02x}{0:012x}"
    assert target in (ROOT / "setup.py").read_text()
    assert target in (ROOT / "CMakeLists.txt").read_text()
