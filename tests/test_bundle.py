"""tools/bundle.py: a script with the modules that it imports, in one file."""

import inspect
import sys
from pathlib import Path

import bundle
import pytest
import script
from test_scripts import modules  # noqa: F401

import train_gpt
from train_gpt import HERE, UserError

gpu_kernels = pytest.importorskip("gpu_kernels", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("modules")


@pytest.fixture
def small_fork(tmp_path) -> Path:
    """Return a fork in a folder of its own, with a module that has three quotes in a row."""
    path = tmp_path / "mine" / "small_fork.py"
    path.parent.mkdir()
    text = (HERE / "tests" / "small_fork.py").read_text()
    path.write_text(f"import quotes\n{text}")
    (path.parent / "quotes.py").write_text("IT = '''it's'''\n")
    return path


def made(path: Path, folder: Path) -> Path:
    """Make the bundle of a script, alone in a folder, and return its path."""
    out = folder / "alone" / "all_in_one.py"
    out.parent.mkdir()
    bundle.write([str(path), str(out)])
    return out


@pytest.mark.parametrize("name", [*sorted(HERE.glob("forks/*.py")), None], ids=str)
def test_tools_take_a_bundle_as_a_script_with_its_own_modules(name, small_fork, tmp_path):
    one = made(name or small_fork, tmp_path)
    run_class = script.load(one)
    core = script.core(run_class)
    assert core is not train_gpt and train_gpt.script_of(run_class) == one
    assert one.parent == core.HERE and run_class.default_record in run_class.records
    assert name or sys.modules["quotes"].IT == "it's"
    for module in (core, sys.modules["gpu_kernels"]):
        assert Path(module.__file__) == one


def test_lines_of_its_functions_are_those_in_it(small_fork, tmp_path):
    """Tracebacks show these lines, and Triton compiles them."""
    core = script.core(script.load(made(small_fork, tmp_path)))
    for name, function in inspect.getmembers(train_gpt, inspect.isfunction):
        if function.__module__ == "train_gpt":
            assert inspect.getsource(getattr(core, name)) == inspect.getsource(function)
    twins = sys.modules["gpu_kernels"].TWINS
    assert twins.keys() == gpu_kernels.TWINS.keys()
    for name, (twin, *_) in gpu_kernels.TWINS.items():
        assert inspect.getsource(twins[name][0]) == inspect.getsource(twin)


def test_a_source_is_not_overwritten(small_fork, monkeypatch):
    before = small_fork.read_text()
    monkeypatch.chdir(small_fork.parent)
    with pytest.raises(UserError, match="is one of the sources: choose another name"):
        bundle.write(["./small_fork.py", "small_fork.py"])
    assert small_fork.read_text() == before
