"""train_gpt.py copied, and a bundle of a fork with what it imports, train alone."""

import contextlib
import inspect
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bundle
import five_minutes
import logfile
import script
import submission
import train_gpt
from runs import SCRIPT, error_of, run, val_losses
from test_scripts import launched
from train_gpt import HERE, UserError

gpu_kernels = pytest.importorskip("gpu_kernels", reason="Triton is not installed")


@pytest.fixture
def small_fork(tmp_path, monkeypatch) -> Path:
    """Return a fork in a folder of its own, with a module that has three quotes in a row."""
    monkeypatch.delitem(sys.modules, "small_fork", raising=False)  # that of the tests
    path = tmp_path / "mine" / "small_fork.py"
    path.parent.mkdir()
    text = (HERE / "tests" / "small_fork.py").read_text()
    path.write_text(f"import quotes\nassert quotes.IT == 'it' + chr(39) + 's'\n{text}")
    (path.parent / "quotes.py").write_text("IT = '''it's'''\n")
    return path


@pytest.fixture
def one(tmp_path) -> Path:
    path = tmp_path / "alone" / "one_file.py"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize("name", [*script.of_project()[1:], None], ids=str)
def test_tools_take_a_bundle_as_a_script_whose_lines_are_those_of_its_sources(
    name, small_fork, one
):
    """Tracebacks show these lines, and Triton compiles them."""
    bundle.main([str(name or small_fork), str(one)])
    run_class = script.load(one)
    core = script.core(run_class)
    assert core is not train_gpt and train_gpt.script_of(run_class) == one
    assert one.parent == core.HERE and run_class.default_record in run_class.records
    for function in (train_gpt.train, train_gpt.attend, train_gpt.look_up):
        copied = getattr(core, function.__name__)
        assert inspect.getsource(copied) == inspect.getsource(function)
    for kernel in (gpu_kernels.fused_chunk_loss, gpu_kernels.matmul_relu2):
        copied = getattr(sys.modules["gpu_kernels"], kernel.__name__)
        assert Path(inspect.getfile(copied)) == one
        assert inspect.getsource(copied) == inspect.getsource(kernel)


def test_only_a_bundle_is_overwritten(small_fork, one, monkeypatch, capsys):
    before = small_fork.read_text()
    notes = one.with_name("notes.py")
    notes.write_text(said := f"mine, not\n{bundle.MADE}")
    monkeypatch.chdir(small_fork.parent)
    for out, reason in {
        "small_fork.py": "is one of the sources: choose another name",
        notes: "is no bundle: choose another name",
    }.items():
        _, err = error_of(["./small_fork.py", out], capsys, bundle.main)
        assert reason in err
    assert small_fork.read_text() == before and notes.read_text() == said
    for _ in range(2):
        bundle.main(["./small_fork.py", str(one)])
        assert capsys.readouterr().out.startswith(f"wrote {one}, ")


def test_packages_that_it_imports_are_named(small_fork, one, capsys):
    quotes = small_fork.with_name("quotes.py")
    late = "def late():\n    import pytorch_optimizer.x, scipy, tqdm\n    from .own import it"
    quotes.write_text(quotes.read_text() + late)
    for path, out in ((small_fork, one), (one, one.with_name("again.py"))):
        bundle.main([str(path), str(out)])
        line = "it imports pytorch_optimizer, scipy: rule 4 of the optimizer benchmark wants"
        assert line in capsys.readouterr().out


def test_a_package_beside_the_script_is_refused(small_fork, one, capsys):
    """A folder without Python files is none: scipy is installed."""
    package = small_fork.with_name("mylib")
    for folder in (package, small_fork.with_name("scipy")):
        folder.mkdir()
    (package / "opt.py").write_text("IT = 1\n")
    small_fork.write_text(f"import scipy\nfrom mylib.opt import IT\n{small_fork.read_text()}")
    _, err = error_of([small_fork, one], capsys, bundle.main)
    assert f"imports {package}, a package, which no bundle holds" in err and not one.exists()


def test_packages_that_all_scripts_import_are_not_named(one, capsys):
    bundle.main(["train_gpt_track3.py", str(one)])
    assert "it imports" not in capsys.readouterr().out


@pytest.mark.parametrize("is_bundle", [False, True])
def test_alone_it_trains_as_in_the_project(
    is_bundle, small_fork, one, flags, tmp_path, monkeypatch
):
    """Bit for bit; train_gpt.py alone has no Triton kernels. A log has its script and no other. A
    bundle has the flags inside: without them, it trains the same."""
    original = small_fork if is_bundle else SCRIPT
    words = [*flags, "--batch_seqs", "2", "--val_tokens", "512", "--kernels", "off"]
    expected = launched([original, *words, "--run_id", "it"], tmp_path)
    assert list(expected) == [0, 2, 4]

    if is_bundle:
        bundle.main([str(original), str(one), *words, "--run_id", "other"])
        words = []
    else:
        shutil.copy(original, one)
    words += ["--run_id", "it"]
    monkeypatch.delenv("PYTHONPATH")
    done = run(words, script=one.name, cwd=one.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert val_losses(done.stdout) == expected
    assert {path.name for path in one.parent.iterdir()} == {one.name, "logs"}
    parts = (one.parent / "logs/it.txt").read_text().split(f"\n{'=' * 100}\n")
    assert parts[0] == one.read_text()
    assert len(parts) == 5  # source, software, machine, settings, results: no other file

    saved = torch.load(one.parent / "logs/it/state_step000004.pt", weights_only=True)
    assert saved["script"] == one.name
    refused = pytest.raises(UserError, match="trains something else .* OUT.py --record demo --")
    with contextlib.nullcontext() if is_bundle else refused:
        submission.check_alone(logfile.read_log(one.parent / "logs/it.txt"))


def test_a_bundle_has_one_record_with_its_settings_and_can_be_bundled_again(one, capsys):
    """The default is that of the script, also where a run without a GPU would be a demo."""
    _, err = error_of(["five_minutes.py", one, "--muon_lr", "x"], capsys, bundle.main)
    assert "argument --muon_lr: invalid float value" in err
    _, err = error_of(["five_minutes.py", "--muon_lr", "1"], capsys, bundle.main)
    assert "expected SCRIPT.py, OUT.py, and then flags" in err
    again = one.with_name("again.py")
    bundle.main(["five_minutes.py", str(one), "--muon_lr", "0.03"])
    bundle.main([str(one), str(again), "--seq_len", "128"])
    run_class = script.load(again)
    (hp,) = run_class.records.values()
    expected = replace(five_minutes.H100, muon_lr=0.03, seq_len=128)
    data = {"train_files": expected.train_files, "val_files": expected.val_files}
    assert vars(replace(hp, **data)) == vars(expected)
    assert hp.val_files == f"{one.parent}/data/fineweb10B/fineweb_val_*.bin"
    assert [*run_class.records] == [run_class.default_record] == ["five_minutes"]
