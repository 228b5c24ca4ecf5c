"""Copies of train_gpt.py, forks that import it, and checkpoints: how tools find and start them. How
a run begins with other tokens, from given weights, and on ranks."""

import ast
import contextlib
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import evaluate
import export
import launch
import result
import sample
import script
import train_gpt
from runs import SCRIPT, Program, console_of, error_of, start_fork, val_losses
from train_gpt import HERE, UserError, load_checkpoint

FRONTIER = HERE / "forks" / "train_gpt_2026.py"


# Flags that texts name of torchrun, nvidia-smi, lm_eval and pip; that argparse has; that stand for
# any.
OTHERS = {"standalone", "nproc_per_node", "local_addr", "query", "format", "model", "tasks"}
OTHERS |= {"model_args", "disable", "retries", "timeout", "index", "help", "FLAG", "SETTING"}


def test_each_flag_that_a_text_names_exists():
    """In docstrings, and in what errors advise. A tool's flag is a string of its own somewhere."""
    exist, named = set(OTHERS), set()
    folders = ("", "data/", "forks/", "forks/optimizers/", "tools/")
    for path in (path for folder in folders for path in HERE.glob(f"{folder}*.py")):
        tree = ast.walk(ast.parse(path.read_text()))
        texts = [node.value for node in tree if isinstance(node, ast.Constant)]
        texts = [text for text in texts if isinstance(text, str)]
        exist |= {text.removeprefix("--") for text in texts if text.startswith("--")}
        exist |= set(re.findall(r"^    (\w+): .* = .*  # ", path.read_text(), re.M))  # settings
        named |= {name for text in texts for name in re.findall(r"(?<!\w)--(\w+)", text)}
    assert len(named) > 80 and not named - exist


@pytest.mark.parametrize("name", ["GPT", "Optimizers", "Moment", "check", "consecutive", "warm_up"])
def test_what_a_run_names_is_not_replaced_by_an_assignment(name, elsewhere, monkeypatch, capsys):
    """The run would train without it."""
    monkeypatch.setattr(train_gpt, name, None)
    _, err = error_of(["--record", "demo"], capsys)
    assert f"{name}: nothing reads this assignment; set it in a class Run" in err


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return an edited copy of train_gpt.py, alone in another folder: matrices learn faster."""
    path = tmp_path / "mine" / "my_copy.py"
    path.parent.mkdir()
    path.write_text(
        Path(SCRIPT).read_text().replace("muon_lr: float = 0.05", "muon_lr: float = 0.2")
    )
    return path


@pytest.fixture
def fork(tmp_path) -> Path:
    return Path(shutil.copy(HERE / "tests" / "small_fork.py", tmp_path / "its_own.py"))


def test_a_script_is_a_path_or_a_name_here_in_the_project_or_in_forks(copy, fork, monkeypatch):
    monkeypatch.chdir(fork.parent)
    monkeypatch.setenv("HOME", str(fork.parent))
    scripts = {"its_own.py": fork, "~/mine/my_copy.py": copy, "train_gpt.py": Path(SCRIPT)}
    scripts |= {"train_gpt_2026.py": FRONTIER, "forks/train_gpt_2026.py": FRONTIER}
    scripts["five_minutes.py"] = Path(shutil.copy(fork, fork.with_name("five_minutes.py")))
    for name, path in scripts.items():
        assert script.take_script([name, "--seed", "3"]) == (path, ["--seed", "3"])
    assert script.take_script(["--seed", "3"]) == (Path(SCRIPT), ["--seed", "3"])
    for name in ("no_such.py", "~no_such_user/its_own.py"):
        with pytest.raises(UserError, match=f"there is no script {name}:.* such as train_gpt.py"):
            script.find(name)


def test_a_fork_has_the_project_s_functions_and_a_copy_its_own(fork, copy):
    for path in (Path(SCRIPT), FRONTIER, fork, copy):
        run_class = script.load(path)
        assert script.load(path) is run_class
        core = script.core(run_class)
        assert Path(core.__file__) == (path if path == copy else Path(SCRIPT))
        with pytest.raises(UserError, match="--seq_len 5: must be"):
            core.parse_args(["--seq_len", "5"], run_class)
    assert core.parse_args([], run_class)[0].muon_lr == 0.2


def test_modules_of_another_project_are_not_mixed_with_these(fork, copy):
    """Python, started with that script, would import its own project's."""
    other = copy.rename(copy.with_name("train_gpt.py"))
    with pytest.raises(UserError, match=f"{other} would replace {SCRIPT}"):
        script.load(Path(shutil.copy(fork, other.parent)))


def test_a_fork_outside_forks_has_the_modules_of_forks(tmp_path, flags, monkeypatch):
    """Beside train_gpt.py, or in any folder. Its log and its digest have their sources."""
    path = tmp_path / "mine.py"
    path.write_text("""import train_gpt_2026 as r
class Run(r.Run):
    pass
if __name__ == "__main__":
    r.t.main(run=Run)
""")
    monkeypatch.setenv("PYTHONPATH", "")
    words = [*flags, "--num_iterations", "2", "--align_to_documents", "off", "--run_id", "it"]
    launched([path, *words], tmp_path, really=True)
    log = Path("logs/it.txt").read_text()
    assert f"\ntrain_gpt_2026.py:\n{FRONTIER.read_text()}" in log and "\ntrain_gpt.py:\n" in log
    assert {path, FRONTIER, Path(SCRIPT)} <= {*script.sources(path)}


def test_each_tool_imports_console_before_the_project():
    """It tells Python where the project is, for any Python that starts a tool from any folder."""
    modules = {path.stem for path in (*HERE.glob("*.py"), *HERE.glob("tools/*.py"))}
    for path in HERE.glob("tools/*.py"):
        source = path.read_text("utf-8")
        imports = re.findall(r"^(?:import|from) (\w+)", source, re.M)
        if "__main__" in source and (own := [name for name in imports if name in modules]):
            assert own[0] == "console", path


def test_a_fork_that_replaces_what_no_run_has_is_refused():
    with pytest.raises(UserError, match="test_scripts.Run.model: a Run has no such part"):
        type("Run", (train_gpt.Run,), {"__module__": "test_scripts", "model": train_gpt.GPT})


def test_what_a_script_imports_and_nothing_has_is_named(elsewhere, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("import train_gpt\nimport not_there\nclass Run(train_gpt.Run):\n    pass\n")
    _, err = error_of([path], capsys, launch.main)
    assert f"{path} imports not_there, which is neither beside it, nor in the project" in err
    path.write_text("\ndef broken(:\n")
    status, err = error_of([path], capsys, launch.main)
    assert status == 1 and "run.sh: error: invalid syntax (mine.py, line 2)\n" in err
    path.write_text("\n\nreturn\n")
    assert error_of([path], capsys, launch.main)[0] == 1
    assert (result.noted()[-1]["file"], result.noted()[-1]["line"]) == (str(path), 3)


SIZES = "--num_iterations 2 --val_loss_every 1 --batch_seqs 2 --val_tokens 512 --save_every 0"


def launched(words: list, folder: Path, really: bool = False) -> dict[int, float]:
    """Call tools/launch.py in a process of its own, in a folder; return a run's losses by step."""
    with contextlib.chdir(folder):
        program = Program(words, work=partial(launch_with, really=really))
        assert program.end() == [0], program.text("err")
    return val_losses(program.text("out"))


def launch_with(words: list[str], really: bool = False) -> None:
    """Call tools/launch.py, which starts the script in a fork, or really in another Python."""
    if not really:
        launch.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start_fork})
    launch.main(words)


def test_copies_and_forks_train_as_flags_of_the_same_effect_would(flags, copy, fork, tmp_path):
    """The fork's rates are half of the record's."""
    words = [*flags, *SIZES.split(), "--adam_eps", "1e-6"]
    faster = launched([*words, "--muon_lr", "0.2"], tmp_path)
    assert launched([copy, *words, "--run_id", "copy"], tmp_path) == faster
    assert Path("logs/copy.txt").read_text().startswith(f"{copy.read_text()}\n{'=' * 100}\n")
    assert launched([fork, *words, "--speed", "1", "--muon_lr", "0.2"], tmp_path) == faster


@pytest.fixture
def saved(trained, elsewhere):
    """Return save(name, **changed): it writes the trained checkpoint, changed, under logs/."""
    state = torch.load(trained.path, weights_only=True)

    def save(name: str, **changed) -> Path:
        path = Path("logs", name, "state_step000008.pt")
        path.parent.mkdir(parents=True)
        torch.save(state | changed, path)
        return path

    save.settings = state["hyperparameters"]
    return save


def test_the_newest_checkpoint_is_named_with_its_script(saved, capsys):
    lost = saved("lost", script="no_longer_there.py")
    first, used = saved("first"), saved("used")
    evaluate.main(["--device", "cpu"])
    assert capsys.readouterr().out.startswith(f"{used}, saved by train_gpt.py\nval_loss")
    evaluate.main(["--run_id", "first", "--device", "cpu"])
    evaluate.main([str(lost), "--script", SCRIPT, "--device", "cpu"])
    out = capsys.readouterr().out
    assert f"{first}, saved by train_gpt.py\n" in out and f"{lost}, saved by no_l" in out

    saved("words", hyperparameters=saved.settings | {"tokenizer": "none"})
    saved("half").write_bytes(used.read_bytes()[:9999])
    for words, message in {
        "logs/none.pt": "No such file or directory: 'logs/none.pt'",
        "--run_id none": "no checkpoint under logs/: train a model first, or name one",
        "--device cpu": "half/state_step000008.pt is not an intact checkpoint",
        "--run_id words": "its tokens have no text: its run had --tokenizer none",
    }.items():
        tool = sample if "words" in words else evaluate
        status, err = error_of(words.split(), capsys, tool.main)
        assert status == 1 and re.match(r"(evaluate|sample).py: error: ", err) and message in err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"script": "evil.py"}, "'evil.py', not by a script of the project: .* --script PATH"),
        ({"record": "none"}, "is a checkpoint of another edition"),
        ({"model": 7}, "not an intact checkpoint"),
    ],
)
def test_a_checkpoint_starts_no_script_of_the_current_folder_and_its_faults_are_a_line(
    changed, message, saved, capsys
):
    Path("evil.py").write_text("raise SystemExit('it ran')")
    path = saved("it", **changed)
    for tool, more in {evaluate: "", sample: "", export: "--export hf exported"}.items():
        words = [path, "--device", "cpu", *more.split()]
        status, err = error_of(words, capsys, tool.main)
        assert status == 1 and re.search(message, err) and not Path("exported").exists()


def test_tokens_without_a_text_are_trained_and_evaluated(flags, tmp_path, capsys):
    """Without bits per byte, and without a command that would write GPT-2's text."""
    words = [*flags, "--run_id", "it", "--num_iterations", "2", "--tokenizer", "none"]
    program = Program([*words, "--end_of_text", "50256"], work=launch_with)
    assert program.end() == [0], program.text("err")
    text = program.text("out")
    said = "\nthe first shard has no token 50256: its text counts as one document\n"
    assert text.count(said) == 1 and "sample.py" not in text and "sample corpus" not in text
    assert result.noted()[-1]["bits_per_byte"] is None
    evaluate.main(["--device", "cpu"])
    assert re.search(
        r"\nval_loss:\d+\.\d{5} perplexity:\S+ over 2048 tokens\n$", capsys.readouterr().out
    )


def weights_of(name: str) -> dict[str, torch.Tensor]:
    return load_checkpoint(f"logs/{name}/state_step000004.pt", train_gpt.Run)["model"]


def test_a_run_from_given_weights_begins_with_them_and_goes_on_to_the_same_bits(flags, tmp_path):
    """Its steps and its optimizers are its own. With rates of 0, it ends with the given weights."""
    console_of([*flags, "--run_id", "first"], tmp_path)
    path, given = "logs/first/state_step000004.pt", weights_of("first")
    words = [*flags, "--seed", "2", "--init_from", path, "--run_id"]
    rates = "--embed_lr 0 --head_lr 0 --scalar_lr 0 --muon_lr 0"
    text = console_of([*words, "still", *rates.split()], tmp_path)
    assert f"\nweights of {path}\n" in text and "resumed" not in text
    console_of([*words, "whole"], tmp_path)
    resumed = [*words, "it", "--save_every", "2", "--keep", "9", "--resume", "on"]
    console_of(resumed, tmp_path)
    (tmp_path / "logs/it/state_step000004.pt").unlink()
    (tmp_path / path).unlink()  # no more needed
    assert "resumed at step 2" in console_of(resumed, tmp_path)
    still, found, whole = (weights_of(name) for name in ("still", "it", "whole"))
    assert all(torch.equal(still[name], value) for name, value in given.items())
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_what_a_checkpoint_says_does_not_control_the_terminal(saved, capsys):
    odd, shown = "\x1b[2J\x07\x9b.py", r"\x1b[2J\x07\x9b.py"
    path = saved("it", script=odd)
    status, err = error_of([path], capsys, evaluate.main)
    assert status == 1 and f"saved by '{shown}'" in err
    evaluate.main([str(path), "--script", SCRIPT, "--device", "cpu"])
    assert f", saved by {shown}\nval_loss" in capsys.readouterr().out
    words = ["--run_id", "it", "--resume", "on", "--record", "demo"]
    status, err = error_of(words, capsys)
    assert f"was saved by {shown} " in err
    assert train_gpt.printable("a\tb\n\r\0\udcff é\xa0你") == "a\tb\n\\r\\x00\\udcff é\xa0你"
