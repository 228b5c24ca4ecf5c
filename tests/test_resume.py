"""Checkpoints, resuming, signals: no run is lost, and a resumed run is the uninterrupted one."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from runs import SCRIPT, rows, run, val_losses

import train_gpt
from train_gpt import UserError, load_checkpoint, main

KILLS = int(os.environ.get("KILLS", 2))  # tests/slow makes it 20
LAST = 40 if KILLS < 5 else 200


@pytest.fixture
def flags(flags) -> list[str]:
    flags += ["--num_iterations", str(LAST), "--val_loss_every", "0", "--adam_eps", "1e-6"]
    return [*flags, "--save_every", "5", "--run_id", "it"]


def start(flags, ranks: int = 0) -> subprocess.Popen:
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, SCRIPT, *flags], **options)


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    """Return when the run prints a step at or after this one, or has ended."""
    for line in process.stdout:
        if (match := re.match(r"step:(\d+)/", line)) and int(match[1]) >= step:
            return


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / f"logs/it/state_step{LAST:06}.pt")["model"]


@pytest.fixture
def uninterrupted(flags, tmp_path, monkeypatch, capsys) -> dict[str, torch.Tensor]:
    """Final weights of a run that nothing disturbed."""
    folder = tmp_path / "whole"
    folder.mkdir()
    monkeypatch.chdir(folder)
    main(flags)
    return weights(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_stopped_at_random_moments_ends_bit_identical(
    flags, uninterrupted, tmp_path, monkeypatch, number
):
    """Also while it saves: half of the moments are right after a step that is saved."""
    folder, rng = tmp_path / "stopped", random.Random(int(number))
    folder.mkdir()
    monkeypatch.chdir(folder)
    stops = resumes = 0
    for _ in range(KILLS + 9):
        if (folder / f"logs/it/state_step{LAST:06}.pt").exists():
            break
        process = start([*flags, "--resume", "auto"])
        newest = max(folder.glob("logs/it/*.pt"), default=Path("state_step000000.pt"))
        begun = int(newest.stem[-6:])
        if stops < KILLS:
            soon = stops and rng.random() < 0.5
            aim = begun + rng.randrange(1, 4) if soon else begun - begun % 5 + (5 if stops else 7)
            wait_for_step(process, aim)
            time.sleep(0.03 * rng.random())
            process.send_signal(number)
            stops += 1
        out, err = process.communicate(timeout=300)
        if number == signal.SIGTERM and process.returncode:
            assert process.returncode == 143, err
            assert "stopped by SIGTERM and saved" in out
        resumes += begun > 0
        rows(folder / "logs/it.jsonl")
    assert stops == KILLS and resumes
    assert not list(folder.glob("logs/it/*.tmp"))
    for name, weight in uninterrupted.items():
        assert torch.equal(weights(folder)[name], weight), name
    found, expected = (rows(at / "logs/it.jsonl") for at in (folder, tmp_path / "whole"))
    assert [row["step"] for row in found] == list(range(1, LAST + 1))
    for row in (*found, *expected):
        assert row.pop("ms") > 0 and row.pop("tokens_per_s") > 0 and row.pop("memory_mib") > 0
    assert found == expected
    log = (folder / "logs/it.txt").read_text()
    assert log.count("\nresumed at step") == resumes
    assert log.startswith(Path(SCRIPT).read_text()) and log.count("\nmodel_dim: 64\n") == 1


def test_ctrl_c_saves_and_leaves_with_130(flags, tmp_path):
    process = start([*flags, "--save_every", "0", "--num_iterations", "100000"])
    wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""
    step = re.search(r"stopped by SIGINT and saved; --resume auto goes on after step (\d+)", out)[1]
    assert load_checkpoint(tmp_path / f"logs/it/state_step{int(step):06}.pt")["step"] == int(step)


def test_a_second_ctrl_c_leaves_at_once(flags, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); import train_gpt\n"
        "train_gpt.save_checkpoint = lambda *arguments: time.sleep(60)\n"
        "train_gpt.main()\n"
    )
    process = subprocess.Popen([sys.executable, script, *flags], stdout=subprocess.PIPE, text=True)
    wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(timeout=20) == 130 and time.monotonic() - began < 2


def test_another_number_of_ranks_takes_over(flags, tmp_path, monkeypatch):
    """The first half on two ranks, the second on one; and all on one."""
    losses = []
    for ranks in ((2, 0), (0,)):
        folder = tmp_path / f"{len(ranks)}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        for count in ranks:
            process = start([*flags, "--resume", "auto"], count)
            if count:
                wait_for_step(process, 20)
                process.terminate()
            out, err = process.communicate(timeout=90)
        losses.append(val_losses(out)[40])
        assert ("resumed at step" in out) == (len(ranks) == 2)
    assert losses[0] == pytest.approx(losses[1], abs=1.5e-4)


def test_resume_refuses_other_hyperparameters_and_names_them(flags, tmp_path, capsys):
    main(flags)
    path = tmp_path / "logs/it/state_step000035.pt"
    capsys.readouterr()
    changed = ["--muon_lr", "0.07", "--seed", "3", "--val_loss_every", "10"]
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--resume", str(path), *changed])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "other hyperparameters: seed 1 -> 3, muon_lr 0.05 -> 0.07; --resume_force" in err
    main([*flags, "--resume", str(path), *changed, "--resume_force"])
    out = capsys.readouterr().out
    assert "resumed at step 35" in out and list(val_losses(out)) == [40]
    main([*flags, "--resume", "auto", "--seed", "3"])
    assert "the run had finished: step 40 of 40 is saved" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--resume", "--eval"])
def test_an_empty_name_is_no_checkpoint(flag, flags, capsys):
    """As from a variable of the shell that is not set."""
    with pytest.raises(SystemExit) as stop:
        main([*flags, flag, ""])
    assert stop.value.code == 2 and "No such file" in capsys.readouterr().err


def test_without_a_checkpoint_a_new_run_begins_and_says_so(flags, capsys):
    main([*flags, "--resume", "auto", "--num_iterations", "2"])
    out = capsys.readouterr().out
    assert "no checkpoint under logs/, a new run begins" in out and "step:2/2 val_loss" in out


def test_a_damaged_checkpoint_gives_way_to_the_one_before(flags, tmp_path, capsys):
    main(flags)
    kept = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert kept == ["state_step000035.pt", "state_step000040.pt"]  # --keep is 2
    newest = tmp_path / "logs/it/state_step000040.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    capsys.readouterr()
    main([*flags, "--resume", "auto"])
    out, err = capsys.readouterr()
    assert "state_step000040.pt is not a whole checkpoint" in err
    assert "(its checksum is wrong); trying the one before" in err
    assert "resumed at step 35" in out and "step:40/40 val_loss" in out
    for path in tmp_path.glob("logs/it/*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--resume", "auto"])
    assert (
        stop.value.code == 2
        and "none of 2 checkpoints under logs/ is whole" in capsys.readouterr().err
    )


def test_pruning_keeps_the_newest_not_the_furthest(flags, tmp_path, capsys):
    """Of a run that goes on from an older checkpoint, those of the abandoned branch go first."""
    main([*flags, "--keep", "9"])
    path = tmp_path / "logs/it/state_step000010.pt"
    main([*flags, "--resume", str(path), "--keep", "2", "--save_every", "15"])
    assert "resumed at step 10" in capsys.readouterr().out
    kept = sorted(p.name for p in tmp_path.glob("logs/it/*.pt"))
    assert kept == ["state_step000030.pt", "state_step000040.pt"]


def test_no_damage_passes_for_a_checkpoint(flags, tmp_path):
    """20 lengths, among them those that cut into the checksum only, and 20 changed bytes."""
    main([*flags, "--num_iterations", "1"])
    path = tmp_path / "logs/it/state_step000001.pt"
    whole, rng = path.read_bytes(), random.Random(0)
    lengths = [0, 1, len(whole) - 1, len(whole) - 32, len(whole) - 40]
    lengths += [rng.randrange(len(whole)) for _ in range(15)]
    damaged = [whole[:length] for length in lengths] + [whole + b"0"]
    for _ in range(20):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        damaged.append(bytes(data))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(UserError, match="state_step000001.pt is "):
            load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)["step"] == 1


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_bomb_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 1, "model": Bomb()}, "bomb.pt")
    with pytest.raises(UserError, match="bomb.pt is not a whole checkpoint"):
        load_checkpoint("bomb.pt")
    assert not Path("exploded").exists()
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").exists()  # it would have


def test_a_published_checkpoint_is_not_resumed(flags, tmp_path, capsys):
    hp, _ = train_gpt.parse_args(flags)
    state = {"step": 9, "code": "", "model": train_gpt.GPT(hp).state_dict(), "optimizers": [{}, {}]}
    torch.save(state, "published.pt")
    with pytest.raises(SystemExit) as stop:
        main([*flags, "--resume", "published.pt"])
    assert stop.value.code == 2 and "it holds weights only" in capsys.readouterr().err


def test_a_published_checkpoint_of_2024_is_called_what_it_is(flags, tmp_path, capsys):
    names = "transformer.wte.weight", "transformer.h.0.attn.c_q.weight", "lm_head.weight"
    state = {"step": 9, "code": "", "model": {f"_orig_mod.{n}": torch.zeros(2, 2) for n in names}}
    torch.save(state, "published.pt")
    with pytest.raises(SystemExit):
        main([*flags, "--eval", "published.pt"])
    assert "is a published one of 2024" in capsys.readouterr().err


def test_what_became_a_setting_later_is_as_it_was_for_an_older_checkpoint(trained, tmp_path):
    """Also of a record that now has another value: the run goes on as it began."""
    state = torch.load(trained.path, weights_only=True)
    del state["hyperparameters"]["norm_eps"], state["hyperparameters"]["momentum_damped"]
    state["record"] = "2024-11-24_WindowWarmup"
    path = tmp_path / "old" / "state_step000020.pt"
    train_gpt.save_checkpoint(path, state, keep=1)
    hp, now = load_checkpoint(path)["hyperparameters"], train_gpt.RECORDS[state["record"]]
    assert (hp.norm_eps, hp.momentum_damped) == (torch.finfo(torch.float32).eps, True)
    assert (now.norm_eps, now.momentum_damped) == (torch.finfo(torch.bfloat16).eps, False)
    with pytest.raises(UserError, match="momentum_damped on -> off"):
        train_gpt.parse_args(["--resume", str(path), "--record", state["record"]])


def test_every_setting_but_the_machines_survives_a_checkpoint(trained):
    """A new one does, wherever it is added, unless it says otherwise."""
    saved = torch.load(trained.path, weights_only=True)["hyperparameters"]
    names = {f.name for f in train_gpt.FIELDS}
    assert saved.keys() == names - {"device", "compile", "kernels"}
    assert train_gpt.setting(1.0, "a new one").metadata["about"] == "learning"
    of_run = names - set(train_gpt.LEARNING_FIELDS)
    assert {"train_files", "run_id", "save_every", "device"} < of_run and "seed" not in of_run


def test_a_rank_that_hangs_ends_the_run_by_the_timeout(flags, tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r}); import train_gpt\n"
        "step_of = train_gpt.train_step\n"
        "def hanging(model, optimizers, inputs, targets, step, **options):\n"
        "    if os.environ['RANK'] == '1' and step == 3:\n"
        "        time.sleep(100)\n"
        "    return step_of(model, optimizers, inputs, targets, step, **options)\n"
        "train_gpt.train_step = hanging\n"
        "train_gpt.main()\n"
    )
    began = time.monotonic()
    done = run([*flags, "--comm_timeout", "3"], ranks=2, script=str(script))
    assert done.returncode == 1 and time.monotonic() - began < 60
    assert "train_gpt.py: error: another rank has stopped, or hangs" in done.stderr


def test_a_stuck_rank_leaves_soon_after_sigterm(tmp_path):
    """The main thread sleeps in C, as one does that waits for a dead rank."""
    script = tmp_path / "stuck.py"
    script.write_text(
        f"import sys, ctypes; sys.path.insert(0, {str(ROOT)!r}); import train_gpt\n"
        "signals = train_gpt.Signals(alone=False)\n"
        "print('ready', flush=True)\n"
        "libc = ctypes.CDLL(None)\n"
        "while True: libc.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.terminate()
    assert process.wait(timeout=20) == 143 and 5 < time.monotonic() - began < 9
