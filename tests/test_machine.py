"""tools/machine.py: GPUs that torch cannot use stop a run, and a report for `./run.sh setup`."""

import re
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import compare
import launch
import machine
import start
import train_gpt
from runs import error_of
from train_gpt import UserError

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB"
NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)" ;;
--query-gpu*)
    echo "$ANSWER"
    exit $STATUS ;;
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
    monkeypatch.setenv("ANSWER", "\n".join(8 * [H100]))
    monkeypatch.setenv("STATUS", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.parametrize("words", [[], ["--device", "cuda"], ["--seconds", "9"], ["--runs", "4"]])
def test_gpus_that_torch_cannot_use_stop_a_command(words, node, capsys, monkeypatch):
    """Also a script that torchrun starts, which else would train a demo."""
    for main, more in ((start.main, []), (compare.main, ["--compare", "", "--muon_lr 0.1"])):
        status, err = error_of([*more, *words], capsys, main)
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
        start.main(flags)
    assert train_gpt.start_device((flags or ["auto"])[-1])[0].type == "cpu"


@pytest.mark.parametrize(
    ("cuda", "error", "remedy"),
    [
        ("13.0", "The NVIDIA driver is too old (found version 12040)", "update the driver, or"),
        ("12.4", "Error 802: system not yet initialized", "torch says: Error 802: system"),
        (None, "", "install a torch with CUDA there, or name another Python with PYTHON="),
    ],
)
def test_the_remedy_depends_on_what_keeps_torch_from_the_gpus(
    cuda, error, remedy, node, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(error)))
    monkeypatch.setattr(machine, "HERE", tmp_path)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / ".venv/lib/torch/__init__.py"))
    assert f": {remedy}" in machine.fault()  # the environment is the user's
    if cuda is None:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv/.made-by-run.sh").touch()
        assert f": delete {tmp_path}/.venv, and ./run.sh installs" in machine.fault()


@pytest.mark.parametrize(
    ("answers", "row", "gpus"),
    [
        (8 * [H100], f"8 x {H100}", "8 GPUs"),
        (["NVIDIA GB10, [N/A]"], "1 x NVIDIA GB10, [N/A]", "1 GPU"),
        ([H100, "Unable to determine the device handle"], f"1 x {H100}; Unable to det", "1 GPU"),
        (["No devices were found"], "No devices were found", ""),
        (["NVIDIA-SMI has failed", "", "a, b, "], "NVIDIA-SMI has failed; a, b, ", ""),
        ([], "none", ""),
    ],
)
@pytest.mark.parametrize("status", ["0", "6"])
def test_setup_shows_what_nvidia_smi_says_and_counts_gpus(
    answers, row, gpus, status, node, monkeypatch, tool
):
    monkeypatch.setenv("ANSWER", "\n".join(answers))
    monkeypatch.setenv("STATUS", status)
    _, out, err = tool(machine.main, [])
    assert f"\nGPUs           {row}" in out
    if gpus:
        assert err.startswith(f"run.sh: error: torch cannot use the {gpus} of this machine: ")
    assert out.endswith("run.sh: ready to train the demo, without a GPU\n") == (not gpus)


GCC, HEADER = shutil.which("gcc"), Path(sysconfig.get_path("include"), "Python.h")
LIBCUDA = "triton.backends.nvidia.driver.libcuda_dirs"


@pytest.fixture
def gpus(node, tmp_path, monkeypatch):
    """Let torch use the node's GPUs, with all that a compiled run needs. Programs are in the
    current folder only."""
    pytest.importorskip("triton", reason="Triton is not installed: it is for Linux")
    write_program("gcc", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/inductor")
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/triton")
    monkeypatch.setattr(LIBCUDA, lambda: ["/lib"])
    monkeypatch.setattr(machine, "fp8_supported", lambda device: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def write_program(name, script):
    Path(name).write_text(f"#!/bin/sh\n{script}\n")
    Path(name).chmod(0o755)


def no_libcuda():
    raise AssertionError("libcuda.so cannot found!\n")


TAKE = {  # what a machine may lack, as a change
    "gcc": lambda patch: Path("gcc").unlink(),
    "CC": lambda patch: patch.setenv("CC", "/nowhere/cc"),
    "libcuda": lambda patch: patch.setattr(LIBCUDA, no_libcuda),
    "triton": lambda patch: patch.setitem(sys.modules, "triton", None),
    "cache": lambda patch: patch.setenv("TRITON_CACHE_DIR", "nvidia-smi/is/a/file"),
}


@pytest.mark.parametrize(
    ("taken", "row", "reason"),
    [
        ("gcc", "compiler", "there is no gcc or clang, which Triton needs: apt-get install gcc"),
        ("CC", "compiler", "there is no /nowhere/cc, which Triton needs: apt-get install gcc"),
        ("libcuda", "kernels", "Triton does not find the driver's library, libcuda.so.1: sudo"),
        ("triton", "kernels", "torch.compile needs Triton ("),
        ("cache", "caches", "cannot write compiled code to nvidia-smi/is/a/file (Not a directory)"),
    ],
)
def test_setup_names_what_a_run_on_gpus_lacks(taken, row, reason, gpus, monkeypatch, tool):
    status, out, _ = tool(machine.main, [])
    assert status == 0 and out.endswith("run.sh: ready to train on 8 GPUs\n")
    TAKE[taken](monkeypatch)
    status, out, err = tool(machine.main, [])
    assert status == 1 and err.startswith(f"run.sh: error: {reason}") and "ready" not in out
    assert re.search(rf"\n{row} .*{re.escape(reason)}", out)


@pytest.mark.skipif(not (GCC and HEADER.exists()), reason="no compiler, or Python.h, is here")
def test_a_compiler_builds_only_with_the_header_of_python(gpus, tmp_path, monkeypatch):
    write_program("gcc", f'exec {GCC} "$@"')
    assert machine.compiler_fault() == ""
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert machine.compiler_fault().startswith("gcc cannot compile Python.h")


@pytest.mark.parametrize(
    ("card", "capability", "hip", "bfloat16", "fp8"),
    [
        ("T4", (7, 5), None, False, False),
        ("A100", (8, 0), None, True, False),
        ("4090", (8, 9), None, True, True),
        ("5090", (12, 0), None, True, True),
        ("MI300X", (9, 4), "7.0", True, False),
    ],
)
def test_a_card_is_used_as_far_as_it_can(card, capability, hip, bfloat16, fp8, tiny, monkeypatch):
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
    if hip:
        kernels = pytest.importorskip("gpu_kernels", reason="Triton is for Linux")
        lines = []
        kernels.choose_kernels(train_gpt.GPT, tiny, device, None, lines.append)
        assert lines == ["kernels: none"]


def test_setup_is_ready_for_the_demo_without_a_gpu(node, tmp_path, monkeypatch, tool):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(machine, "FINEWEB", f"{tmp_path}/fineweb")
    for name in ("train_000001", "train_000002", "val_000000"):
        (tmp_path / f"fineweb_{name}.bin").touch()
    monkeypatch.delenv("CXX", raising=False)
    _, out, _ = tool(machine.main, [])
    assert re.search(r"\ncompiler +there is no .+\+\+, which --compile on needs: apt", out)
    assert "\nGPUs           none\n" in out and "\nFineWeb        2 train and 1 validation" in out
    assert out.endswith("run.sh: ready to train the demo, without a GPU\n")


@pytest.mark.parametrize(("compiled", "is_said"), [("on", True), ("auto", False), ("off", False)])
def test_a_run_that_is_to_be_compiled_says_that_there_is_no_compiler(
    compiled, is_said, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "compiler_fault", lambda: "there is no g++")
    launch.check_compiler(replace(train_gpt.RECORDS["demo"], device="cpu", compile=compiled))
    assert (capsys.readouterr().err == "run.sh: there is no g++\n") == is_said
