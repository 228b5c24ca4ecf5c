"""tools/machine.py: GPUs that torch cannot use stop a run, and a report for `./run.sh setup`."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import compare
import launch
import machine
import script
import train_gpt
from runs import error_of
from train_gpt import UserError

NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)" ;;
--query-gpu*) for gpu in 0 1 2 3 4 5 6 7; do echo "NVIDIA H100 80GB HBM3, 81559 MiB"; done ;;
*) echo "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |" ;;
esac
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Make this a machine of eight GPUs with a CPU build of torch, and the current folder empty."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)


def test_gpus_that_torch_cannot_use_stop_a_command(node, capsys, monkeypatch):
    """Also a script that torchrun starts, which else would train a demo."""
    newer = NVIDIA_SMI.replace("Driver Version", "KMD Version").replace("CUDA V", "CUDA UMD V")
    for main, words, smi in (
        (launch.main, [], NVIDIA_SMI),
        (compare.main, ["--compare", "", "--muon_lr 0.1"], newer),
    ):
        Path("nvidia-smi").write_text(smi)
        status, err = error_of(words, capsys, main)
        assert status == 1
        assert err.startswith("run.sh: error: torch cannot use the 8 GPUs of this machine: ")
        assert f"{sys.executable} has torch {torch.__version__} (CPU build), " in err
        assert "the driver is 550.54 (for CUDA up to 12.4)" in err
        assert "--device cpu trains without them" in err
    with pytest.raises(UserError, match="torch cannot use this machine's GPUs: ./run.sh setup"):
        train_gpt.start_device("auto")


@pytest.mark.parametrize(("visible", "flags"), [("0", ["--device", "cpu"]), ("", []), ("-1", [])])
def test_a_run_without_gpus_can_be_asked_for(visible, flags, node, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(launch, "start", lambda *_: sys.exit("started"))
    with pytest.raises(SystemExit, match="started"):
        launch.main(flags)
    assert train_gpt.start_device((flags or ["auto"])[-1])[0].type == "cpu"


@pytest.fixture
def gpus(node, tmp_path, monkeypatch):
    """Let torch use the node's GPUs, with all that a compiled run needs. Programs are in the
    current folder only."""
    Path("gcc").write_text("#!/bin/sh\n")
    Path("gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine, "fp8_supported", lambda device: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def test_setup_says_that_a_compiler_is_missing(gpus, tool, monkeypatch, capsys):
    """Or is of no use. A run says so, and begins."""

    def said_by_a_run() -> str:
        launch.check_compiler(train_gpt.RECORDS["medium_2025-01-18"])
        return capsys.readouterr().err

    status, out, _ = tool(machine.main, [])
    assert status == 0 and out.endswith("run.sh: ready to train on 8 GPUs\n")
    assert not said_by_a_run()
    Path("gcc").write_text("#!/bin/sh\nexit 1\n")
    assert "run.sh: gcc cannot compile Python.h" in said_by_a_run()
    Path("gcc").unlink()
    status, out, err = tool(machine.main, [])
    reason = r"gcc cannot compile Python.h, or is missing; .*: apt-get install gcc python3"
    assert status == 1 and re.match(f"run.sh: error: {reason}", err) and "ready" not in out
    assert re.search(rf"\ncompiler .*{reason}", out)
    monkeypatch.setenv("CC", "mine")
    assert "run.sh: mine cannot compile" in said_by_a_run()


OWN, LESS = script.OWN, "--seq_len 24576 --batch_seqs 16"


@pytest.mark.parametrize(
    ("mib", "said"),
    [
        (81559, "reserves 21.7 GB with its own settings on .* an H100; this one has 85.5 GB$"),
        (24564, f"reserves 25.1 GB .*, or 15.1 GB with {LESS} on .* 4090; this one has 25.8 GB$"),
    ],
)
def test_a_run_is_told_what_its_record_reserves(mib, said, node, monkeypatch):
    """Only of records that were counted, scripts of the project, and GPUs whose memory is known."""
    smi = Path("nvidia-smi").read_text().replace("81559 MiB", f"{mib} MiB")
    Path("nvidia-smi").write_text(smi)
    rows = {"": {"small": 25.1, "large": 21.7}, LESS: {"small": 15.1}}
    monkeypatch.setattr(machine, "counted", lambda: {"A": rows, "B": {LESS: {}}})
    assert re.search(said, machine.memory_of(OWN, "A"))
    assert machine.memory_of(OWN, "B") == machine.memory_of(OWN, "C") == ""
    assert machine.memory_of(Path("my_copy.py"), "A") == ""
    for other in (f'{mib} MiB"; echo "NVIDIA T400, 2048 MiB', "[N/A]"):
        Path("nvidia-smi").write_text(smi.replace(f"{mib} MiB", other))
        assert machine.memory_of(OWN, "A") == ""
    Path("nvidia-smi").write_text(smi)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert machine.memory_of(OWN, "A") == ""


@pytest.mark.parametrize(
    ("gpus", "nproc", "says"), [(1, "", 1), (8, "1", 1), (8, "", 0), (0, "1", 0)]
)
def test_only_a_run_on_one_gpu_is_told(gpus, nproc, says, monkeypatch, capsys):
    monkeypatch.setenv("NPROC", nproc)
    monkeypatch.setattr(launch, "gpus_for", lambda hp: gpus)
    monkeypatch.setattr(machine, "memory_of", lambda *arguments: "what it reserves")
    launch.say_memory(OWN, *script.parse(OWN, ["--record", "medium"]))
    assert capsys.readouterr().err == "run.sh: what it reserves\n" * says


def test_counted_records_exist_and_need_less_with_their_flags():
    """All records of train_gpt.py are counted. The flags keep the number of tokens in a batch."""
    known = {}
    for path in script.of_project():
        for record in script.load(path).records.keys() & machine.counted().keys():
            rows = known[record] = machine.counted()[record]
            hp, _ = script.parse(path, ["--record", record])
            for flags, row in rows.items():
                less, _ = script.parse(path, ["--record", record, *flags.split()])
                assert less.batch_seqs * less.seq_len == hp.batch_seqs * hp.seq_len
                most = rows.get("", {})
                assert all(row[card] <= most.get(card, math.inf) for card in row), (record, flags)
    assert train_gpt.RECORDS.keys() - {"demo"} <= known.keys() == machine.counted().keys()


@pytest.mark.parametrize(
    ("card", "capability", "hip", "bfloat16", "fp8"),
    [
        ("T4", (7, 5), None, False, False),
        ("A100", (8, 0), None, True, False),
        ("4090", (8, 9), None, True, True),
        ("MI300X", (9, 4), "7.0", True, False),
    ],
)
def test_a_card_is_used_as_far_as_it_can(card, capability, hip, bfloat16, fp8, monkeypatch):
    """AMD's number of a capability says nothing of NVIDIA's formats and instructions."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    if not bfloat16:
        with pytest.raises(UserError, match="GPU 0 has no bfloat16, .* --device cpu"):
            train_gpt.start_device("auto")
        return
    device = train_gpt.start_device("auto")[0]
    assert train_gpt.fp8_supported(device) == fp8
