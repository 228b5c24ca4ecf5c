"""Checkpoints: what they hold, which ones load, and what is refused."""

import contextlib
import dataclasses
import os
import random
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import language
from runs import console_of, error_of, val_losses

import train_gpt
from train_gpt import (
    GPT,
    LAYERS_2024,
    RECORDS,
    Hyperparameters,
    Run,
    UserError,
    load_checkpoint,
    main,
    names_about,
    parse_args,
)

LEARNING = names_about(Hyperparameters, "learning")


def write(path: Path, state: dict) -> Path:
    """Write a checkpoint, and return its path."""
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """Train for eight steps, save in the middle; return flags, losses, and checkpoints by step."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*language(folder), "--num_iterations", "8", "--val_loss_every", "4"]
    flags += ["--window_span", "256", "--seq_len", "256"]
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "1024"]
    losses = val_losses(console_of([*flags, "--save_every", "4", "--run_id", "it"], folder))
    paths = {int(path.stem[-6:]): path for path in folder.glob("logs/it/*.pt")}
    assert sorted(paths) == [4, 8]
    return SimpleNamespace(flags=flags, folder=folder, losses=losses, paths=paths)


@pytest.fixture
def saved(run) -> dict:
    """Return what the run saved in the middle."""
    return torch.load(run.paths[4], weights_only=True)


# ---- evaluation


@pytest.mark.parametrize("step", [4, 8])
def test_a_checkpoint_evaluates_to_the_loss_of_its_step(step, run, tmp_path, monkeypatch, capsys):
    """Under the window of that step. It knows its model and not its places."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere.pt").write_bytes(run.paths[step].read_bytes())
    Path("other.bin").write_bytes((run.folder / "val_0.bin").read_bytes())
    main(["--eval", "elsewhere.pt", "--val_files", "other.bin", "--device", "cpu"])
    expected = f"val_loss:{run.losses[step]:.4f} over 1024 tokens, elsewhere.pt"
    assert expected in capsys.readouterr().out
    assert not Path("logs").exists()


def test_a_published_checkpoint_loads(flags, tmp_path, capsys, randomize):
    """Names with torch.compile's prefix, bfloat16 embeddings, and no settings of ours inside."""
    hp, _ = parse_args(flags, Run)
    model = randomize(GPT(hp))
    model.embed.bfloat16().float()  # so that saving in bfloat16 loses nothing
    weights = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    weights["_orig_mod.embed.weight"] = weights["_orig_mod.embed.weight"].bfloat16()
    torch.save({"step": 9, "code": "", "model": weights, "optimizers": [{}, {}]}, "published.pt")
    main([*flags, "--eval", "published.pt"])
    inputs, targets = next(
        train_gpt.distributed_data_generator(hp.val_files, hp.val_seq_len, 8, 0, 1)
    )
    window = train_gpt.get_window_size(hp.num_iterations, hp)
    with torch.no_grad():
        losses = [model(x, y, window).item() for x, y in zip(inputs, targets, strict=True)]
    assert f"val_loss:{np.mean(losses):.4f} " in capsys.readouterr().out


# ---- settings


TINY = {
    "model_dim": 32,
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 50304,
    "seq_len": 128,
    "val_seq_len": 256,
    "val_tokens": 512,
    "batch_seqs": 2,
    "num_iterations": 2,
    "epochs": 0,
    "layers": LAYERS_2024,
    "num_layers": 2,
    "window_min": 256,
}


TEXTS = {"layers": LAYERS_2024}


def another(name: str, hp: Hyperparameters, texts=TEXTS, check=train_gpt.check):
    """Return another value of the setting than hp's, legal by `check`; of texts, the one given."""
    (f,) = (f for f in dataclasses.fields(hp) if f.name == name)
    value = getattr(hp, name)
    if f.type is bool:
        return not value
    if f.metadata["choices"]:
        return next(choice for choice in f.metadata["choices"] if choice != value)
    if f.type is str:
        return texts[name]
    if isinstance(value, tuple):
        return tuple(x / 2 for x in value)
    others = [value + 1, value * 2 or 2, value + 2]
    if f.type is float:
        others = [value / 2 or 0.5]
    for other in others:
        with contextlib.suppress(UserError):
            check(replace(hp, **{name: other}))
            return other
    raise ValueError(f"{name} {value}")


def typed(name: str, value) -> list[str]:
    """Return a setting as words of the command line, to the last digit."""
    text = repr(value) if type(value) is float else train_gpt.show(value)
    return [f"--{name}", *text.split()]


def test_every_learning_setting_survives_a_checkpoint(tmp_path, monkeypatch):
    """A run in which each of them is another one than the record's, but for two that do not fit the
    others; what a machine has is gone."""
    monkeypatch.chdir(tmp_path)
    own = RECORDS["demo"]
    others = [name for name in LEARNING if name not in ("rope", "grad_clip", *TINY)]
    changed = TINY | {name: another(name, own) for name in others}
    assert all(getattr(own, name) != value for name, value in changed.items())
    words = [word for name, value in changed.items() for word in typed(name, value)]
    words += ["--device", "cpu", "--compile", "off", "--save_every", "2", "--run_id", "it"]
    words += ["--record", "demo"]
    main(words)
    hp = load_checkpoint("logs/it/state_step000002.pt", Run)["hyperparameters"]
    assert {name: getattr(hp, name) for name in changed} == changed
    assert len(changed) == len(LEARNING) - 2
    assert hp == replace(parse_args(words, Run)[0], device="auto", compile="auto")
    saved = torch.load("logs/it/state_step000002.pt", weights_only=True)["hyperparameters"]
    names = {f.name for f in dataclasses.fields(Hyperparameters)}
    assert saved.keys() == names - {"device", "compile", "kernels"}


@pytest.mark.parametrize("name", LEARNING)
def test_to_resume_with_any_learning_setting_changed_is_refused_by_name(name, run):
    path = str(run.paths[4])
    was = load_checkpoint(path, Run)["hyperparameters"]
    now = another(name, was)
    text = f"{name} {train_gpt.show(getattr(was, name))} -> {train_gpt.show(now)}"
    words = ["--resume", path, *typed(name, now)]
    with pytest.raises(UserError, match=re.escape(text)):
        parse_args(words, Run)
    hp, _ = parse_args([*words, "--resume_force"], Run)
    assert getattr(hp, name) == now != getattr(was, name)


def test_a_run_may_go_on_with_other_settings_of_the_run_and_of_the_machine(run):
    path = str(run.paths[4])
    was = load_checkpoint(path, Run)["hyperparameters"]
    names = vars(was).keys() - set(LEARNING)
    assert {"train_files", "run_id", "save_every", "device"} < names and "seed" not in names
    texts = {"train_files": "a", "val_files": "b", "run_id": "c"}
    for name in names:
        value = texts.get(name) or another(name, was)
        hp, _ = parse_args(["--resume", path, *typed(name, value)], Run)
        assert getattr(hp, name) == value


def test_a_new_setting_is_one_of_learning_unless_it_says_otherwise():
    (f,) = dataclasses.fields(
        dataclasses.make_dataclass("New", [("it", float, train_gpt.setting(1.0, "a new one"))])
    )
    assert f.metadata["about"] == "learning"


# ---- checkpoints of other programs, and of other versions of this one


@pytest.mark.parametrize("flag", ["--eval", "--resume"])
def test_a_checkpoint_of_another_script_is_refused_and_the_script_is_named(
    flag, saved, tmp_path, capsys
):
    """Its record is not there, or a record of that name has other settings."""
    saved["script"] = "train_gpt_2026.py"
    settings = saved["hyperparameters"]
    for record, more in (("2026-03-06_SimplifyHC", {}), ("demo", {"stages": "window=256"})):
        saved["record"], saved["hyperparameters"] = record, settings | more
        path = write(tmp_path / "it.pt", saved)
        status, err = error_of([flag, path, "--device", "cpu"], capsys)
        assert status == 2
        assert f"{path} is of {record} of train_gpt_2026.py: start that script" in err


def test_a_checkpoint_with_settings_that_cannot_be_is_refused(saved, tmp_path, capsys):
    saved["hyperparameters"]["num_layers"] = 1
    path = write(tmp_path / "it.pt", saved)
    status, err = error_of(["--eval", path, "--device", "cpu"], capsys)
    assert status == 2 and "--num_layers 1: must be even" in err


def test_a_setting_that_a_checkpoint_lacks_is_that_of_its_record(run, saved, tmp_path):
    """So what becomes a setting later is as it was."""
    lost = ("norm_eps", "momentum_damped", "muon_lr")
    for name in lost:
        del saved["hyperparameters"][name]
    saved["record"] = "2024-11-24_WindowWarmup"
    found = load_checkpoint(write(tmp_path / "it.pt", saved), Run)["hyperparameters"]
    whole = load_checkpoint(run.paths[4], Run)["hyperparameters"]
    record = RECORDS[saved["record"]]
    own = {name: getattr(record, name) for name in lost}
    assert found == replace(whole, **own) and not record.momentum_damped


def test_to_go_on_after_a_change_of_the_source_is_said_in_the_log(
    run, saved, tmp_path, monkeypatch, capsys
):
    """The run ends as it would have."""
    monkeypatch.chdir(tmp_path)
    assert saved["code"] == Path(train_gpt.__file__).read_text()
    write(Path("logs/it/state_step000004.pt"), saved | {"code": "another"})
    main(["--resume", "auto", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "\nresumed at step 4; the source has changed since\n" in out
    assert val_losses(out) == {8: run.losses[8]}
    ours = load_checkpoint(run.paths[8], Run)["model"]
    for name, weight in load_checkpoint("logs/it/state_step000008.pt", Run)["model"].items():
        assert torch.equal(weight, ours[name]), name


def test_to_go_on_under_other_kernels_is_said_in_the_log(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for former, said in ((["relu2_mlp", "x"], "; its kernels were: relu2_mlp x\n"), ([], "\n")):
        write(Path("logs/it/state_step000004.pt"), saved | {"kernels": former})
        main(["--resume", "auto", "--device", "cpu", "--num_iterations", "5", "--resume_force"])
        line = f"\nresumed at step 4{said}"
        assert line in capsys.readouterr().out and line in Path("logs/it.txt").read_text()
        Path("logs/it.txt").unlink()


# ---- damage


def places(path: Path) -> dict[str, range]:
    """Return where in the file the bytes of each of a checkpoint's records are."""
    found = {}
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            lengths = data[info.header_offset + 26 :][:4]  # of the local header's name and extra
            start = info.header_offset + 30 + sum(np.frombuffer(lengths, "<u2").tolist())
            found[info.filename] = range(start, start + info.file_size)
    return found


def flip(path: Path, place: int) -> None:
    """Change a byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def equal(a, b) -> bool:
    """Say whether two checkpoints hold the same, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_flipped_byte_in_any_record_of_a_checkpoint_is_noticed(run, tmp_path):
    path = tmp_path / "state_step000001.pt"
    whole = run.paths[4].read_bytes()
    rng = random.Random(0)
    found = places(run.paths[4])
    assert len(found) > 50  # a record for each tensor, and the pickle
    for name, where in found.items():
        path.write_bytes(whole)
        if not where:
            continue
        flip(path, rng.choice(where))
        with pytest.raises(UserError, match=re.escape(f"its part {name} is damaged")) as error:
            load_checkpoint(path, Run)
        assert f"{path} is not a whole checkpoint" in str(error.value)


def test_a_cut_checkpoint_is_refused_and_no_flipped_byte_changes_what_it_holds(run, tmp_path):
    """Between the records there are bytes that nothing reads."""
    path = tmp_path / "state_step000001.pt"
    whole = run.paths[4].read_bytes()
    rng = random.Random(0)
    lengths = [0, 1, len(whole) // 2, len(whole) - 22, len(whole) - 1]
    for length in lengths + [rng.randrange(len(whole)) for _ in range(15)]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="state_step000001.pt is not a whole checkpoint"):
            load_checkpoint(path, Run)
    expected = load_checkpoint(run.paths[4], Run)
    refused = 0
    for _ in range(100):
        path.write_bytes(whole)
        flip(path, rng.randrange(len(whole)))
        try:
            assert equal(load_checkpoint(path, Run), expected)
        except UserError as error:
            assert f"{path} is " in str(error)
            refused += 1
    assert refused > 50


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_bomb_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 1, "model": Bomb()}, "bomb.pt")
    with pytest.raises(UserError, match="bomb.pt is not a whole checkpoint"):
        load_checkpoint("bomb.pt", Run)
    assert not Path("exploded").exists()
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").exists()  # it would have


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("logs/it")
    folder.mkdir(parents=True)
    for step in (4, 8):
        (folder / f"state_step{step:06}.pt").write_bytes(run.paths[step].read_bytes())
    newest = folder / "state_step000008.pt"
    place = max(places(newest).values(), key=len)[7]
    flip(newest, place)
    words = ["--resume", "auto", "--run_id", "it", "--device", "cpu"]
    main(words)
    out, err = capsys.readouterr()
    assert not err and "state_step000008.pt is not a whole checkpoint" in out
    assert re.search(r"\(its part \S+ is damaged\); trying the one before", out)
    assert "resumed at step 4" in out and val_losses(out) == {8: run.losses[8]}
    main(words)  # it is whole again
    assert "the run had finished: step 8 of 8 is saved" in capsys.readouterr().out
    for path in folder.glob("*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "no intact checkpoint of train_gpt.py is among 2" in capsys.readouterr().err


def test_pruning_keeps_the_newest_not_the_furthest(run, tmp_path, monkeypatch, capsys):
    """Of a run that goes on from an older checkpoint, those of the abandoned branch go first."""
    monkeypatch.chdir(tmp_path)
    flags = [*run.flags, "--val_loss_every", "0", "--run_id", "it"]
    main([*flags, "--keep", "9", "--save_every", "2"])
    names = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert names == [f"state_step{step:06}.pt" for step in (2, 4, 6, 8)]
    main([*flags, "--resume", f"logs/it/{names[0]}", "--keep", "2", "--save_every", "3"])
    assert "resumed at step 2" in capsys.readouterr().out
    kept = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert kept == ["state_step000006.pt", "state_step000008.pt"]


def test_an_empty_run_id_is_that_of_no_run(run, monkeypatch):
    """It comes from a variable of the shell that is not set: any run is meant."""
    monkeypatch.chdir(run.folder)
    _, args = parse_args(["--eval", "auto", "--run_id", ""], Run)
    assert args.checkpoint == str(run.paths[8].relative_to(run.folder))


def test_without_a_checkpoint_a_new_run_begins_and_says_so(flags, capsys):
    main([*flags, "--resume", "auto", "--num_iterations", "2"])
    out = capsys.readouterr().out
    assert (
        "no unfinished run of these settings is there, a new one begins" in out
        and "step:2/2 val_loss" in out
    )
