"""All odd values for each flag of each script and for each word of each tool, and many in runs."""

import gc
import shutil
from pathlib import Path

import pytest

import train_gpt
from test_odd_values import (
    ODD,
    Enough,
    odd_flags,
    test_odd_values_of_a_script_s_flags,  # noqa: F401
    test_odd_words_of_a_tool,  # noqa: F401
    try_all,
)

SMALL = "--num_iterations 2 --model_dim 32 --head_dim 16 --keep 0"


@pytest.fixture
def count() -> int:
    return len(ODD)


def test_odd_values_of_flags_in_runs(flags, capsys, monkeypatch):
    """Eight for each flag, in runs of at most three steps: all of them take half an hour."""
    train_step = train_gpt.train_step
    made = []

    def step(*arguments, **options):
        made.append(1)
        if len(made) > 3:
            raise Enough
        return train_step(*arguments, **options)

    monkeypatch.setattr(train_gpt, "train_step", step)
    for words in odd_flags(Path(train_gpt.__file__), 8):
        if words[-1] in ("on", "--compile=on"):
            continue  # compiling takes a minute
        made.clear()
        try_all(train_gpt.main, [[*flags, *SMALL.split(), *words]], capsys)
        gc.unfreeze()  # what a run has frozen; its log is closed when it is collected
        gc.collect()
        shutil.rmtree("logs", ignore_errors=True)
