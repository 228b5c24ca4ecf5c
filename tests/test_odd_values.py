"""Odd values for each flag of each script, and in place of each word of each tool, end with a
result or with an error for people, never with another exception. These are some of them: all are
tried in tests/slow/test_all_odd_values.py."""

import importlib
import random
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import bench
import launch
import sample
import script
import train_gpt

# What people type: wrong words, signs, fractions, 0, and sizes that fit a memory.
ODD = ["", " ", "fast", "é", "٣", "None", "on", "../x", "*", "[1]", "1,2", "1 2", "0x10", "1_0"]
ODD += ["0", "-", "-1", "+1", "1", "3", "1.5", "1e-3", "1e3", "nan", "inf", "-inf", "65536"]
# Words that work, and the tool's own flags.
TOOLS = {
    "sample --n 1": "prompt tokens temperature top_k seed script run_id seq_len",
    "evaluate --device cpu": "script run_id val_files val_tokens model_dim",
    "export --export hf out": "script run_id",
    "bundle train_gpt.py out.py": "record muon_lr layers",
    "leaderboard logs/it.txt": "target at field deviation plot",
    "records --diff demo 2025": "",
    "history x": "sort",
    "submission out logs/it.txt": "target at",
    "bench --device cpu": "steps vs trace mean seq_len",
    "launch --device cpu": "runs seconds run_id seed record",
    "compare --compare A B": "run_id judge seconds runs deviation alpha seed plot",
    "tokenize_text t.txt --out tok --workers 1": "name val val_fraction shard_size field",
    "cached_fineweb 1": "dir",
}


class Enough(BaseException):
    """What has come so far is a result."""


def enough(*arguments, **options) -> None:
    raise Enough


def build_only(run, hp, record) -> None:
    """Make some moments of a run and its model, without numbers."""
    last = hp.num_iterations
    for step in (0, 1, last // 2, last):
        run.Moment(step, hp)
    with torch.device("meta"):
        run.GPT(hp)


def odd_flags(path: Path, count: int) -> list[list[str]]:
    """Return flags of a script with odd values, `count` for each flag in each of two forms."""
    chance, found = random.Random(0), []
    for name in vars(script.load(path).records["demo"]):
        found += [[f"--{name}={value}"] for value in chance.sample(ODD, count)]
        found += [[f"--{name}", value] for value in chance.sample(ODD, count)]
    return found


def odd_words(tool: str, count: int) -> list[list[str]]:
    """Return words of a tool with odd values, `count` in each place and for each flag; with text
    alone, and without --, which argparse drops."""
    chance, found = random.Random(0), []
    odd = [value for value in ODD if value not in ("\udcff", "--")]
    _, *words = tool.split()
    for place in range(len(words) + 1):
        for value in chance.sample(odd, min(count, len(odd))):
            found.append([*words[:place], value, *words[place + 1 :]])
    for flag in TOOLS[tool].split():
        for value in chance.sample(odd, min(count, len(odd))):
            found.append([*words, f"--{flag}={value}"])
    return found


def try_all(main, commands: list[list[str]], capsys) -> None:
    """Call main with the words of each command. It may return, raise Enough, or end with a line."""
    for words in commands:
        capsys.readouterr()
        try:
            main(words)
        except Enough:
            pass
        except SystemExit as end:
            text = f"{capsys.readouterr().err}{end.code}"
            assert not end.code or re.search(r"(?m)^[\w.]+: ", text), (words, text)
        except Exception as error:
            raise AssertionError(words) from error


@pytest.fixture
def count() -> int:
    """Return how many odd values are tried in each place."""
    return 1


@pytest.mark.parametrize("path", script.of_project(), ids=lambda path: path.stem)
def test_odd_values_of_a_script_s_flags(path, count, capsys, monkeypatch, elsewhere):
    """Without the run itself."""
    monkeypatch.setattr(train_gpt, "train", build_only)
    commands = [["--record", "demo", *words] for words in odd_flags(path, count)]
    try_all(partial(train_gpt.main, run=script.load(path)), commands, capsys)


@pytest.mark.parametrize("tool", TOOLS)
def test_odd_words_of_a_tool(tool, count, capsys, monkeypatch, trained, elsewhere):
    """In a folder with a checkpoint. Nothing is started or fetched."""
    name = tool.split()[0]
    module = importlib.import_module(name)
    Path("t.txt").write_text("In the beginning. " * 99)
    shutil.copytree(trained.folder, ".", dirs_exist_ok=True)
    monkeypatch.setattr(launch, "start", enough)
    monkeypatch.setattr(bench, "Timed", enough)
    monkeypatch.setattr(sample, "generate", enough)
    main = module.main
    if name == "cached_fineweb":
        monkeypatch.setattr(module, "download", enough)

        def main(words: list[str]) -> None:
            monkeypatch.setattr(sys, "argv", [name, *words])
            train_gpt.as_program(name, module.main)

    for words in odd_words(tool, count):
        try_all(main, [words], capsys)
        for left in ("out", "tok"):
            shutil.rmtree(left, ignore_errors=True)
