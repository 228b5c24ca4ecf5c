"""How a run or a tool begins: with other tokens, from given weights, by any Python, on ranks."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import evaluate
import result
import train_gpt
from gpt2 import bits_per_byte
from runs import Program, console_of, error_of, outcome
from test_scripts import launch_with
from train_gpt import HERE, load_checkpoint

TOOLS = [path for path in sorted(HERE.glob("tools/*.py")) if "__main__" in path.read_text()]
OTHERS = {"torch", "numpy", "scipy", "tqdm", "safetensors", "matplotlib"}


# ---- a tool, started by any Python


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_the_first_module_that_a_tool_imports_finds_the_project(tool):
    """Of the project's modules, `console` comes first: it puts the others on the path."""
    imports = re.findall(r"^(?:import|from) (\w+)", tool.read_text(), re.M)
    own = [name for name in imports if name not in sys.stdlib_module_names | OTHERS]
    assert own[:1] in (["console"], [])


def test_a_tool_starts_by_a_link_in_another_folder(tmp_path):
    (tmp_path / "linked").symlink_to(HERE / "tools/records.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "linked", "--help"], **options)
    assert done.returncode == 0 and "usage: " in done.stdout and not done.stderr


# ---- ranks


FAILING = """import os, time
import train_gpt
def work():
    if os.environ["RANK"] == "0":
        raise train_gpt.UserError("the first rank has no data: copy it there")
    time.sleep(60)
train_gpt.as_program("mine.py", work)
"""
STOPPED = """import os, pathlib, signal, sys, time
ready = pathlib.Path(__file__).with_name("ready")
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
    while not ready.exists():  # torchrun has started both
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
else:
    ready.touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("source", "status", "expected"),
    [
        (FAILING, 1, "mine.py: error: the first rank has no data: copy it there\n"),
        (STOPPED, 143, "saved\n"),
        ("import os\nos.kill(os.getpid(), 9)", 137, ""),
    ],
)
def test_torchrun_adds_nothing_to_what_ranks_say(source, status, expected, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    command = [sys.executable, f"{HERE}/tools/ranks.py", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, str(tmp_path / "mine.py")], **options)
    assert (done.returncode, done.stderr) == (status, expected)


# ---- other tokens


def test_a_vocabulary_that_is_not_gpt2_s_is_trained_and_evaluated(flags, tmp_path, capsys):
    """Without bits per byte, and without a command that would write GPT-2's text."""
    program = Program([*flags, "--run_id", "it", "--num_iterations", "2"], work=launch_with)
    assert program.end() == [0], program.text("err")
    text = program.text("out")
    assert (
        text.count("\nthe first shard has no token 50256: its text counts as one document\n") == 1
    )
    assert "sample.py" not in text and "sample corpus" not in text
    assert result.noted()[-1]["bits_per_byte"] is None
    evaluate.main(["--device", "cpu"])
    assert re.search(r"\nval_loss:\d+\.\d{5} over 2048 tokens\n$", capsys.readouterr().out)


@pytest.mark.parametrize(("size", "largest"), [(50304, 50300), (64000, 7), (8192, 7)])
def test_bits_per_byte_are_of_gpt2_s_tokens_alone(size, largest):
    """Also where the head's padding would hold others."""
    assert bits_per_byte(4.0, np.array([[5, largest]]), size) is None
    assert bits_per_byte(4.0, np.array([[5, 50256]]), 50304) > 0


# ---- given weights


def test_a_run_from_given_weights_begins_with_them_and_goes_on_to_the_same_bits(
    flags, tmp_path, capsys, monkeypatch
):
    """Its steps, its optimizers and its schedule are its own."""
    console_of([*flags, "--run_id", "first"], tmp_path)
    path = "logs/first/state_step000004.pt"
    words = [*flags, "--init_from", path, "--muon_lr", "0.02", "--run_id"]
    seen, evaluate_ = [], train_gpt.evaluate

    def watch(model, *rest):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return evaluate_(model, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "evaluate", watch)
        text = console_of([*words, "whole"], tmp_path)
    assert f"\nweights of {path}\n" in text and "resumed" not in text
    given = load_checkpoint(path, train_gpt.Run)["model"]
    after_warm_up = seen[1]  # warm-up makes one validation, the run's own come next
    assert all(torch.equal(after_warm_up[name], value) for name, value in given.items())

    resumed = [*words, "it", "--save_every", "2", "--keep", "9", "--resume", "on"]
    console_of(resumed, tmp_path)
    (tmp_path / "logs/it/state_step000004.pt").unlink()
    (tmp_path / path).unlink()  # no more needed
    assert "resumed at step 2" in console_of(resumed, tmp_path)
    whole = load_checkpoint("logs/whole/state_step000004.pt", train_gpt.Run)["model"]
    found = outcome(tmp_path, 4).tensors
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--init_from logs/first/state_step000001.pt --model_dim 32", "is not one of this model: "),
        ("--init_from nothing.pt", "No such file or directory: 'nothing.pt'"),
        ("--init_from train_1.bin", "train_1.bin is not an intact checkpoint"),
    ],
)
def test_other_weights_are_refused_in_one_line(words, message, flags, tmp_path, capsys):
    console_of([*flags, "--run_id", "first", "--num_iterations", "1"], tmp_path)
    status, err = error_of([*flags, *words.split()], capsys)
    assert status == 1 and message in err


# ---- JSON


def test_json_has_null_in_place_of_what_it_lacks():
    text = train_gpt.to_json({"a": float("nan"), "b": [float("-inf"), 1.5, "NaN"]}, indent=1)
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5, "NaN"]}
