"""Names are looked up when they are called: what a fork assigns to train_gpt.py, a run uses."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

import sampled_softmax as softmax
import train_gpt
import train_gpt_2026
import train_gpt_2026_07
import train_gpt_2026_08
import train_gpt_track3

# Names that a fork cannot assign, each with its reason.
EXCEPTIONS = {
    "compiled": "it decorates functions while the file is imported",
    "Hyperparameters": "the records are made of it while the file is imported",
    "RunSettings": "it is a part of Hyperparameters",
}


class Replaced(Exception):
    """What a replaced name raises."""


class Raises:
    """In place of a function or class: whatever is done with it raises."""

    def __call__(self, *arguments, **options):
        raise Replaced

    def __getattr__(self, name):
        raise Replaced


def own_names() -> dict[str, object]:
    """Return the functions and classes of train_gpt.py by name."""
    found = inspect.getmembers(train_gpt, lambda x: inspect.isfunction(x) or inspect.isclass(x))
    return {name: value for name, value in found if value.__module__ == "train_gpt"}


def code_of(value) -> set:
    """Return the code of a function, or of the methods of a class."""
    members = [value] if inspect.isfunction(value) else vars(value).values()
    functions = [getattr(member, "__func__", member) for member in members]
    functions = [inspect.unwrap(f) for f in functions if inspect.isroutine(f)]
    return {f.__code__ for f in functions if hasattr(f, "__code__")}


@pytest.fixture
def demo(flags, tmp_path, monkeypatch):
    """Return a function that makes a short run, and saves its weights."""
    flags += ["--num_iterations", "1", "--batch_seqs", "1", "--val_tokens", "256"]
    flags += ["--run_id", "it", "--seq_len", "128"]

    def run() -> None:
        for path in tmp_path.glob("logs/it*"):
            if path.is_file():
                path.unlink()
        train_gpt.main(flags)

    return run


def test_a_name_that_is_replaced_from_outside_is_what_the_demo_uses(demo, monkeypatch):
    called = set()
    sys.setprofile(lambda frame, event, argument: called.add(frame.f_code))
    try:
        demo()
    finally:
        sys.setprofile(None)
    used = {name: value for name, value in own_names().items() if code_of(value) & called}
    assert len(used) > 60 and EXCEPTIONS.keys() <= own_names().keys()
    ignored = []
    for name in used.keys() - EXCEPTIONS.keys():
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt, name, Raises())
            try:
                demo()
            except Replaced:
                continue
            except TypeError:  # of inspect, which looks for Run's file
                assert name == "Run"
                continue
            ignored.append(name)
    assert not ignored


def test_a_fork_that_replaces_what_no_run_has_is_refused():
    with pytest.raises(train_gpt.UserError, match="test_names.Run.model: a Run has no such part"):
        type("Run", (train_gpt.Run,), {"__module__": "test_names", "model": train_gpt.GPT})


FORKS = train_gpt.HERE / "forks"
FOLDERS = train_gpt.HERE, FORKS, FORKS / "optimizers"


def defined(body: list, kind: type) -> dict:
    """Return what a part of a source defines of a kind, by name."""
    return {node.name: node for node in body if isinstance(node, kind)}


@pytest.mark.parametrize(
    "module", [train_gpt_2026, train_gpt_2026_07, train_gpt_2026_08, train_gpt_track3, softmax]
)
def test_a_fork_says_of_each_function_whether_it_overrides_another(module):
    """One of a class before it in the forks, or of train_gpt.py."""
    source = inspect.getsource(module)
    tree = ast.parse(source)
    functions = defined(tree.body, ast.FunctionDef)
    replaced = {*vars(train_gpt), *vars(train_gpt.Run)}
    overriding = [node for name, node in functions.items() if name in replaced]
    for name, node in defined(tree.body, ast.ClassDef).items():
        # object is last. torch may lie in a folder of the project, too.
        bases = getattr(module, name).__mro__[1:-1]
        bases = [b for b in bases if Path(inspect.getfile(b)).parent in FOLDERS]
        methods = defined(node.body, ast.FunctionDef)
        methods.pop("__init__", None)
        overriding += [f for key, f in methods.items() if any(key in vars(b) for b in bases)]
    assert len(overriding) > 1
    marked = [n for n, line in enumerate(source.split("\n"), 1) if line.endswith(":  # overrides")]
    assert marked == sorted(node.body[0].lineno - 1 for node in overriding)
