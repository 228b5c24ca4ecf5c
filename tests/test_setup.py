"""run.sh and tools/setup.py: which Python they take, what they install, and what they start."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import setup
from train_gpt import HERE

TRAIN, TOOLS = ((HERE / name / "requirements.txt").read_text().split() for name in ("", "tools"))
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Make a folder the project, on a machine on which nothing is really installed. Return
    installs(folders): it returns what pip is asked for, and fails unless .venv is chosen."""
    asked, venv, run = [], tmp_path / ".venv", subprocess.run

    def pretend(command: list, **options) -> subprocess.CompletedProcess:
        if "venv" in command:
            (venv / "lib/python3/site-packages").mkdir(parents=True)
            (venv / "bin").mkdir()
            (venv / "bin/python").touch()
            base = os.path.realpath(sys._base_executable)
            (venv / "pyvenv.cfg").write_text(f"executable = {base}\n")
        elif "stop" in command:  # a package during whose installation Ctrl-C comes
            raise KeyboardInterrupt
        elif "pip" in command:
            asked.append([word for word in command if re.match(r"[a-z][a-z-]*[<=]", word)])
        else:
            return run(command, **options)

    def installs(*folders: str) -> list:
        asked.clear()
        assert setup.choose([*folders]) == f"{venv}/bin/python"
        return asked

    names = {"HERE": tmp_path, "VENV": venv, "STAMP": venv / ".made-by-run.sh", "NAMED": ""}
    for name, value in (names | {"IN_VENV": f"{venv}/bin/python"}).items():
        monkeypatch.setattr(setup, name, value)
    monkeypatch.setattr(setup, "has_gpu", lambda: False)
    monkeypatch.setattr(subprocess, "run", pretend)
    for path in HERE.glob("**/requirements.txt"):
        (tmp_path / path.relative_to(HERE)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(HERE))
    return installs


@pytest.mark.parametrize(
    ("words", "needs", "started"),
    [
        ("my_fork.py --seconds 3", "", "tools/launch.py my_fork.py --seconds 3"),
        ("--seconds 3 --runs=2", "tools", "tools/launch.py --seconds 3 --runs=2"),
        ("--runs 2 --compare A B", "tools", "tools/compare.py --runs 2 --compare A B"),
        ("setup", "", "tools/machine.py"),
        ("./tools/bench --steps 5", "", "tools/bench.py --steps 5"),
        ("tools/sample.py --n 1", "data", "tools/sample.py --n 1"),
        ("test slow -x", "tools tests", "-P -m pytest tests/slow -x"),
        ("test /usr b.py mine.py::a", "tools tests", "-P -m pytest /usr b.py HERE/mine.py::a"),
        ("test", "tools tests", "-P -m pytest -n auto --maxprocesses 4 --dist worksteal"),
    ],
)
def test_a_command_starts_its_program_with_what_it_needs(words, needs, started, monkeypatch):
    Path("mine.py").touch()
    begin = str(Path.cwd())
    monkeypatch.setattr(setup, "choose", lambda folders: folders)
    monkeypatch.setattr(setup, "has_gpu", lambda: False)
    monkeypatch.setattr(setup, "start", lambda needs, *words: sys.exit([needs, words]))
    with pytest.raises(SystemExit) as end:
        setup.main(words.split())
    text = " ".join(map(str, end.value.code[1])).replace(f"{HERE}/", "").replace(begin, "HERE")
    assert (text, end.value.code[0]) == (started, needs.split())
    assert (Path.cwd() == HERE) == words.startswith("test")  # where pyproject.toml is


def test_each_tool_is_listed_with_what_it_imports_at_its_start():
    """Also by way of other modules. Packages and modules have the same names."""
    tools = {path.stem: path.read_text("utf-8") for path in HERE.glob("tools/*.py")}
    imports = {name: re.findall(r"(?m)^(?:import|from) (\w+)", tools[name]) for name in tools}
    programs = {name for name in tools if "\n@console.program(" in tools[name]}
    assert programs == setup.TOOLS.keys() | {"launch"}
    for tool, folders in (setup.TOOLS | {"launch": []}).items():
        found, new = set(), {tool}
        while new:
            found |= new
            new = {module for name in new for module in imports.get(name, [])} - found
        given = "".join(setup.read(HERE / name / "requirements.txt") for name in ("", *folders))
        lacking = found & setup.by_name("\n".join(TRAIN + TOOLS)).keys() - setup.by_name(given)
        assert not lacking, tool


def test_packages_are_installed_once_and_an_incomplete_environment_is_replaced(
    project, monkeypatch
):
    monkeypatch.setattr(setup, "missing", lambda names: names)
    Path("requirements.txt").write_text("torch==2.13.0\nstop\n")
    with pytest.raises(KeyboardInterrupt):
        project()
    Path(".venv/left").touch()
    Path("requirements.txt").write_text("# PyTorch\n" + "\n".join(TRAIN))
    assert project() == [TRAIN[:1], TRAIN] and not Path(".venv/left").exists()
    assert project() == []
    assert project("tools") == [TOOLS] and project("tools", "data") == []
    for version in ("torch==2.14.0", TRAIN[0]):  # there and back again
        Path("requirements.txt").write_text(f"{version}\n")
        assert project("tools") == [[version], [version]]
    monkeypatch.setattr(setup, "NAMED", "python3")
    assert project() == []
    monkeypatch.setattr(sys, "_base_executable", "/another/python3")
    assert project() == [TRAIN[:1]] * 2 and project() == []
    Path(".venv/bin/python").unlink()
    Path(".venv/bin/python").symlink_to("gone")
    monkeypatch.setattr(setup, "has_gpu", lambda: True)
    assert project() == [TRAIN[:1]]  # and no CPU build of torch before


def test_a_python_with_torch_is_used_as_it_is_or_lends_it(project, monkeypatch):
    monkeypatch.setattr(setup, "missing", lambda names: [*{*names} & {"scipy"}])
    assert setup.choose([]) == sys.executable and not Path(".venv").exists()
    assert project("tools") == [TRAIN[1:] + TOOLS]
    (path,) = Path(".venv").glob("lib/*/*/*.pth")
    code = f"{path.read_text()}; from importlib.util import find_spec; find_spec('torch').loader"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    Path("requirements.txt").write_text("torch==2.14.0\nnumpy<2.9\n")
    assert project("tools") == [["numpy<2.9"]]


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("named", ["", sys.executable])
def test_an_environment_of_the_user_is_used_or_advised_on_but_not_changed(
    named, is_link, project, monkeypatch
):
    """Here it has what this Python has."""
    packages = Path("env/lib/python{}.{}/site-packages".format(*sys.version_info))
    packages.mkdir(parents=True)
    (packages / "all.pth").write_text("\n".join(sys.path))
    Path("env/bin").mkdir()
    Path("env/bin/python").symlink_to(sys._base_executable)
    Path("env/pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")
    if is_link:  # to a .venv of another project, where run.sh has made it
        lines = [*TRAIN, *(HERE / "tests/requirements.txt").read_text().splitlines()]
        Path("env/.made-by-run.sh").write_text("\n".join(lines))
    Path(".venv").symlink_to("env") if is_link else Path("env").rename(".venv")
    Path("tools/requirements.txt").write_text("no-such<2\n")
    before = {*Path().rglob("*")}
    monkeypatch.setattr(setup, "NAMED", named)
    python = named or setup.IN_VENV
    advice = f"{python} lacks no-such, .* {python} -m pip install -r.*/tools/requirements.txt "
    with pytest.raises(SystemExit, match=advice):
        setup.choose(["tools"])
    assert setup.choose(["tests"]) == python
    assert {*Path().rglob("*")} == before


@pytest.mark.parametrize(
    ("installed", "has_gpu", "expected"),
    [
        ("torch-2.11.0a0+git", False, []),
        ("torch-2.9.1", False, ["torch 2.11"]),
        ("torch-3.0.0", True, ["huggingface-hub"]),
        ("torch-2.13.0 huggingface_hub-2.4", True, []),
    ],
)
def test_what_a_python_lacks_is_read_without_an_import(installed, has_gpu, expected, monkeypatch):
    """Its only packages are in a folder. FineWeb is downloaded for GPUs alone."""
    for package in installed.split():
        metadata = Path(f"{package}.dist-info/METADATA")
        metadata.parent.mkdir()
        metadata.write_text("Name: {}\nVersion: {}\n".format(*package.split("-")))
    monkeypatch.setattr(setup, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(sys, "path", [str(Path.cwd())])
    assert setup.missing(["torch", "huggingface-hub"]) == expected


def test_a_program_starts_with_caches_of_its_own_and_less_spin_on_a_busy_machine(monkeypatch):
    """Code that is compiled for other instructions, or by another torch, is kept apart."""
    names = "TORCHINDUCTOR_CACHE_DIR GOMP_SPINCOUNT ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)

    def started(torch="2.13.0", flags="avx2", running=1, **variables) -> dict[str, str]:
        metadata = Path(f"{torch}/lib/python3.11/site-packages/torch-{torch}.dist-info/METADATA")
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Name: torch\nVersion: {torch}\n")
        texts = {"cpuinfo": f"MHz : {os.urandom(2)}\nflags\t: {flags}\n"}
        texts["loadavg"] = f"0.1 0.2 0.3 {running}/80 77"
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(setup, "read", lambda path: texts[path.name])
            patch.setattr(os, "environ", os.environ | variables)
            patch.setattr(os, "execv", lambda *_: sys.exit(os.environ))
            setup.start(f"{torch}/bin/python", "train.py")
        return end.value.code

    kinds = [{"torch": "2.14.0"}, {"flags": "avx2 avx512f"}]
    kinds += [{"ATEN_CPU_CAPABILITY": "avx2"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {}]
    folders = {started(**kind)["TORCHINDUCTOR_CACHE_DIR"] for kind in kinds}
    assert len(folders) == 5 and started()["TORCHINDUCTOR_CACHE_DIR"] in folders
    assert started(TORCHINDUCTOR_CACHE_DIR="mine")["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert started(running=3)["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in started() | started(running=3, OMP_WAIT_POLICY="active")


def test_run_sh_finds_itself_and_a_python_and_runs_no_file_of_the_current_folder(monkeypatch):
    """From any shell, by a link to a link, whatever characters are in names."""
    tools = Path("a [b] 'c/tools")
    tools.mkdir(parents=True)
    shutil.copy(HERE / "tools/setup.py", tools)  # without requirements
    shutil.copy(HERE / "run.sh", tools.parent)
    (tools / "compare.py").write_text('"""Its help."""')
    code = "import os, sys; print(sys.flags.optimize, os.getenv('PYTHONSAFEPATH'))"
    (tools / "machine.py").write_text(code)
    for name in ("re", "fcntl", "setup", "torch"):
        Path(f"{name}.py").write_text("raise SystemExit('ran')")
    Path("old").mkdir()
    Path("old/python3").write_text("#!/bin/sh\n")
    Path("old/python3").chmod(0o755)
    links = {"old/python3.12": sys.executable, "link": "a [b] 'c/run.sh", "again": "link"}
    for path, target in links.items():
        Path(path).symlink_to(target)
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    for command in (
        "PYTHON=old/python3.12 sh again",
        'PYTHON= PATH=$PWD/old:/usr/bin:/bin "./a [b] \'c/run.sh"',
        f"here=$PWD && cd /usr && PYTHON='{sys.executable}' bash $here/again",
    ):
        for words, printed in (("--compare -h", "Its help.\n"), ("setup", "0 None\n")):
            done = subprocess.run(f"{command} {words}", shell=True, capture_output=True, text=True)
            assert done.stdout == printed, done.stderr
    done = subprocess.run("PYTHON=no_such ./again", shell=True, capture_output=True, text=True)
    assert done.stderr == "run.sh: no_such is not Python 3.11 or later: name one with PYTHON=path\n"
