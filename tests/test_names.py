"""Names are looked up when they are called: what a fork assigns to train_gpt.py, a run uses."""

import inspect
import sys

import pytest

import train_gpt

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
