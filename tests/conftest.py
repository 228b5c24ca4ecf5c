"""Shared by all tests: the import path, and fixtures for small models and shards."""

import atexit
import gc
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

# torch reads these when it is imported, here and in the programs that tests start. Two threads slow
# such small models down: test_sample.py takes 18 times as long.
os.environ["OMP_NUM_THREADS"] = "1"
# What x86 CPUs have since 2013: with AVX-512, sums are rounded otherwise, and heads are bfloat16.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("MKL_CBWR", "AVX2")
if "TORCHINDUCTOR_CACHE_DIR" in os.environ:  # run.sh's, of code for this CPU's instructions
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"].removesuffix("-tests")  # in a worker, too
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}-tests"

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# For programs that tests start, as in tools/console.py.
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/data:{ROOT}/forks"

# Neither Slurm nor torchrun has started this.
OF_LAUNCHERS = "SLURM_", "OMPI_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "NPROC"
for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
    del os.environ[name]
if len(tempfile.gettempdir()) > 60:  # the path of a socket has at most 107 bytes
    tempfile.tempdir = "/tmp"

if not torch.cuda.is_available():  # Triton reads this on import: kernels run in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nvidia-smi may list what torch cannot use

import train_gpt  # noqa: E402
from runs import console_of, outcome  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

VOCAB = 512
# A job in the background ignores SIGINT, and nohup SIGHUP; so would the programs that tests start.
SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for number, handler in SIGNALS.items():
    signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Let runs, which collect garbage, not look through what is imported by now."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton's bindings list what is left


@pytest.fixture(autouse=True)
def as_before():
    """Undo, after each test, what a run in this process leaves behind."""
    yield
    train_gpt.compilation.allowed = False
    train_gpt.stop_signals.clear()
    if "gpu_kernels" in sys.modules:
        sys.modules["gpu_kernels"].IN_USE.clear()
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tool(elsewhere, capsys):
    """Return call(main, words, files): in an empty folder, it writes files with these texts, and
    calls a tool's main; it returns status, output and errors."""

    def call(main, words: list, files: dict[str, str] | None = None) -> tuple[int, str, str]:
        for name, text in (files or {}).items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        capsys.readouterr()
        status = 0
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def files_here() -> set[str]:
    return {str(path) for path in Path(".").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(flags, request, tmp_path_factory) -> SimpleNamespace:
    """Train by the module's flags for its LAST steps, undisturbed; return the outcome."""
    folder = tmp_path_factory.mktemp("whole")
    console_of(flags, folder)
    return outcome(folder, request.module.LAST)


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch):
    """Forget a test's scripts, and give the project's modules of their names back."""
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    before = dict(sys.modules)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def compile_with(monkeypatch):
    """Return use(backend), which compiles from then on what torch.compile would let Inductor
    compile. Functions keep what they are compiled to, so it is replaced where torch calls it."""
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx as inductor

    def use(backend) -> None:
        monkeypatch.setattr(
            inductor, "compile_fx", lambda graph, inputs, **_: backend(graph, inputs)
        )
        torch._dynamo.reset()
        counters.clear()

    yield use
    torch._dynamo.reset()


@pytest.fixture
def tiny() -> train_gpt.Hyperparameters:
    """Return the settings of a very small demo, in float32 on any CPU."""
    return replace(
        train_gpt.RECORDS["demo"],
        vocab_size=VOCAB,
        end_of_text=VOCAB - 1,
        model_dim=32,
        num_heads=2,
        head_dim=16,
        num_layers=4,
        seq_len=128,
        val_seq_len=128,
        val_tokens=1024,
        num_iterations=4,
        val_loss_every=2,
        fp8=False,
    )


def at_window(window: int, hp: train_gpt.Hyperparameters) -> train_gpt.Moment:
    """Return the moment before the first step, with this long window."""
    now = train_gpt.Moment(0, hp)
    now.window = window
    return now


def shard(path: Path, tokens, magic=20240520, version=1, count=None, cut=0) -> Path:
    """Write a shard with this header, without its last `cut` bytes."""
    tokens = np.asarray(tokens, dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    data = header.tobytes() + tokens.tobytes()
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.fixture
def write_shard(tmp_path):
    """Return write(name, tokens, **header), which writes a shard into tmp_path."""
    return lambda name, tokens, **header: shard(tmp_path / name, tokens, **header)


@pytest.fixture
def randomize():
    """Return apply(model), which draws all parameters and returns the model."""

    def apply(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim < 2:
                p.data.copy_(0.7 + 0.3 * noise)
            elif "embed" in name:
                p.data.copy_(noise)
            else:
                p.data.copy_(p.size(-1) ** -0.5 * noise)
        return model

    return apply


def language(folder: Path) -> list[str]:
    """Write shards of a made-up language of 512 words, of which the last begins a document, into
    the folder. Return the flags of a run of seconds on them, in float32 on any CPU."""
    rng = np.random.default_rng(0)
    follower = rng.permutation(512)
    words = [0]
    for noise in rng.random(40000):  # four words of five follow from the word before
        words.append(follower[words[-1]] if noise < 0.8 else int(noise * 1e6) % 512)
    shard(folder / "train_1.bin", words[:30000])
    shard(folder / "val_0.bin", words[30000:])
    flags = "--record demo --device cpu --seed 1 --epochs 0 --vocab_size 512 --end_of_text 511"
    flags += " --model_dim 64 --num_heads 2 --head_dim 32 --num_layers 4 --num_iterations 4"
    flags += " --seq_len 128 --val_seq_len 256 --val_tokens 2048 --val_loss_every 2 --fp8 off"
    files = ["--train_files", f"{folder}/train_*.bin", "--val_files", f"{folder}/val_*.bin"]
    return [*flags.split(), *files]


@pytest.fixture
def flags(tmp_path, elsewhere) -> list[str]:
    """Return the flags of `language` in an empty folder, which becomes the current one."""
    return language(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> SimpleNamespace:
    """Train a small demo for eight steps. Return its folder, its checkpoint's path and what it
    printed."""
    flags = "--record demo --device cpu --model_dim 32 --num_heads 2"
    flags += " --head_dim 16 --seq_len 128 --val_seq_len 128 --batch_seqs 2 --num_iterations 8"
    flags += " --val_tokens 1024 --val_loss_every 0 --run_id it"
    folder = tmp_path_factory.mktemp("trained")
    console = console_of(flags.split(), folder)
    path = folder / "logs/it/state_step000008.pt"
    return SimpleNamespace(folder=folder, path=path, console=console)
