"""Whole runs of the command line on tiny models: log, checkpoints, errors, ranks."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import SCRIPT, STEP, VAL, run, val_losses

import train_gpt
from train_gpt import GPT, HERE, RECORDS, main


def error_of(arguments: list, capsys) -> tuple[int, str]:
    """Exit status and standard error of main in this process; nothing may be a traceback."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code, capsys.readouterr().err


# ---- log


def test_log_holds_source_versions_settings_and_the_communitys_lines(flags, tmp_path, capsys):
    main(flags)
    console = capsys.readouterr().out
    (path,) = tmp_path.glob("logs/*.txt")
    log = path.read_text()
    source = Path(SCRIPT).read_text()
    assert log.startswith(source)
    rest = log.removeprefix(source)
    assert f"Python {sys.version}" in rest and f"torch {torch.__version__}" in rest
    assert "\nmodel_dim: 64\n" in rest and "\nadam_betas: 0.8 0.95\n" in rest
    for text in (console, rest):
        assert [(int(m[1]), int(m[2])) for m in STEP.finditer(text)] == [
            (i, 4) for i in (1, 2, 3, 4)
        ]
        assert list(val_losses(text)) == [0, 2, 4]
        assert re.search(r"^peak memory allocated: \d+ MiB reserved: \d+ MiB$", text, re.M)
    assert val_losses(rest)[0] == pytest.approx(np.log(512), abs=1e-4)
    times = [int(m[3]) for m in STEP.finditer(rest)]
    assert times == sorted(times) and times[-1] > 0


def test_loss_falls(flags, capsys):
    main([*flags, "--num_iterations", "40", "--val_loss_every", "0"])
    losses = val_losses(capsys.readouterr().out)
    assert list(losses) == [40]
    assert losses[40] < 4  # 6.24 at the start, 2.5 is the entropy of the language


def test_aligned_and_verified_the_sample_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = "--num_layers 2 --model_dim 32 --num_heads 1 --head_dim 32 --num_iterations 8"
    lengths = "--seq_len 128 --val_seq_len 512 --val_tokens 1024 --val_loss_every 0"
    seen, step_of = [], train_gpt.train_step

    def watching(model, optimizers, inputs, *others, **options):
        seen.append(inputs)
        return step_of(model, optimizers, inputs, *others, **options)

    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(train_gpt, "train_step", watching)
    data = "--verify_data on --align_to_documents on --max_document_tokens 100"
    main(f"--record demo --device cpu {sizes} {lengths} {data}".split())
    assert val_losses(capsys.readouterr().out)[8] < 10
    assert len(seen) == 8 and all((inputs[:, [0, 100]] == 50256).all() for inputs in seen)


@pytest.mark.parametrize("record", train_gpt.PUBLISHED)
def test_each_record_trains_on_the_sample_at_a_reduced_size(record, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = "--num_layers 4 --model_dim 64 --num_heads 2 --head_dim 32 --num_iterations 8"
    lengths = "--seq_len 128 --val_seq_len 512 --val_tokens 2048 --val_loss_every 4"
    files = f"--train_files {HERE}/data/kjv_train_*.bin --val_files {HERE}/data/kjv_val_*.bin"
    main(f"--record {record} --device cpu {sizes} {lengths} {files}".split())
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert losses[0] == 10.8258 and losses[4] < 10.2 and losses[8] < 8.5
    assert "published" not in console  # other data than FineWeb


def test_on_fineweb_the_console_holds_published_losses_and_the_log_does_not(
    flags, tmp_path, capsys, monkeypatch
):
    """Two losses as on the curve and far from it; the curve is that of steps 0, 125, ..."""
    for kind in ("train", "val"):
        (path,) = tmp_path.glob(f"{kind}_*.bin")
        path.rename(tmp_path / f"fineweb_{path.name}")
    flags += ["--record", "2024-11-19_FlexAttention", "--val_loss_every", "125"]
    flags += ["--num_iterations", "250", "--num_layers", "2", "--batch_seqs", "1"]
    flags += ["--train_files", "fineweb_train_*.bin", "--val_files", "fineweb_val_*.bin"]
    monkeypatch.setattr(train_gpt, "train_step", lambda *args, **options: torch.tensor([5.0, 0.0]))
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    losses = iter([10.8258, 4.4403, 3.2873])
    monkeypatch.setattr(train_gpt, "evaluate", lambda *args: next(losses))
    main(flags)
    lines = capsys.readouterr().out.splitlines()
    after = {m[1]: lines[i + 1 : i + 3] for i, s in enumerate(lines) if (m := VAL.match(s))}
    assert after["0"][0].split() == ["published:", "10.8258,", "difference", "+0.0000"]
    assert after["125"][0].split() == ["published:", "4.4503,", "difference", "-0.0100"]
    assert after["250"][0].split() == ["published:", "4.0085,", "difference", "-0.7212"]
    assert after["250"][1].startswith("    inside the published spread, 3.2783 +- 2 x 0.0050; ")
    (log,) = tmp_path.glob("logs/*.txt")
    results = log.read_text().removeprefix(Path(SCRIPT).read_text())
    assert "published" not in results and list(val_losses(results)) == [0, 125, 250]


@pytest.mark.parametrize(
    ("loss", "place"), [(3.2748, "outside"), (3.2750, "inside"), (3.2824, "inside"), (4, "outside")]
)
def test_the_published_spread_is_two_deviations_wide(loss, place):
    record, hp = "2025-01-26_BatchSize", RECORDS["2025-01-26_BatchSize"]
    text = train_gpt.against_published(record, hp, 1770, loss)
    assert f"published: 3.2808, difference {loss - 3.2808:+.4f}" in text
    assert text.endswith(f" {place} the published spread, 3.2787 +- 2 x 0.0019")
    assert train_gpt.against_published(record, hp, 1000, loss).count("\n") == 0
    assert train_gpt.against_published(record, hp, 1001, loss) == ""
    assert train_gpt.against_published("demo", RECORDS["demo"], 128, loss) == ""
    tweaked = train_gpt.replace(hp, muon_lr=0.06, val_tokens=262144, seed=3, val_loss_every=10)
    text = train_gpt.against_published(record, tweaked, 1770, loss)
    assert text.endswith("0.0019; other than the record's: muon_lr, val_tokens")


def test_published_curves_end_at_the_last_step():
    ends = {name: published.curve for name, published in train_gpt.PUBLISHED.items()}
    assert all(RECORDS[name].num_iterations == max(curve) for name, curve in ends.items())
    assert {name: (max(curve), curve[max(curve)]) for name, curve in ends.items()} == {
        "2024-11-19_FlexAttention": (1875, 3.2783),
        "2024-11-24_WindowWarmup": (1750, 3.2759),
        "2025-01-26_BatchSize": (1770, 3.2808),
    }
    assert [curve[1000] for curve in ends.values()] == [3.5195, 3.5074, 3.5147]


def test_warm_up_leaves_no_trace(flags, capsys, monkeypatch):
    main(flags)
    warm = val_losses(capsys.readouterr().out)
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    main(flags)
    assert val_losses(capsys.readouterr().out) == warm


def test_windows_of_the_demo_grow():
    windows = {train_gpt.get_window_size(step, RECORDS["demo"]) for step in range(129)}
    assert windows == {128, 256}


def test_a_sequence_too_long_for_a_cpu_is_a_sentence(flags, tmp_path, write_shard, capsys):
    write_shard("train_1.bin", [1] * 140000)
    status, err = error_of([*flags, "--seq_len", "17408"], capsys)
    assert status == 1 and "17408 tokens a sequence need a GPU" in err and err.count("\n") == 1


def test_sample_corpus_and_demo_need_no_flag_and_no_folder():
    hp, _ = train_gpt.parse_args(["--device", "cpu"])
    assert hp == train_gpt.replace(RECORDS["demo"], device="cpu")
    assert Path(hp.train_files).is_absolute() and Path(hp.train_files).parent == HERE / "data"


def test_import_has_no_side_effect(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import train_gpt"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


def test_help_and_records_name_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    main(["--list_records"])
    records = capsys.readouterr().out
    for f in train_gpt.FIELDS:
        assert f"--{f.name} " in text
        assert re.search(rf"^{f.name} +", records, re.M) or f.name == "layers"
    assert re.search(r"^layer 11 +long\+vfirst\+x0 +long\+vfirst\+x0 +long\+v2\+x0 ", records, re.M)
    assert "2025-01-26_BatchSize" in records and "1770" in records


def test_diff_prints_what_two_records_differ_in_and_nothing_else(capsys):
    main(["--diff", "2024-11-19_FlexAttention", "2024-11-24_WindowWarmup"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["2024-11-19_FlexAttention", "2024-11-24_WindowWarmup"],
        ["num_iterations", "1875", "1750"],
        ["cooldown_frac", f"{562 / 1875:.10g}", f"{640 / 1750:.10g}"],
        ["window_min", "1024", "64"],
        ["window_span", "0", "1728"],
        ["adam_betas", "0.9", "0.95", "0.8", "0.95"],
        ["muon_lr", "0.04", "0.05"],
        ["momentum_warmup_steps", "500", "300"],
        ["published", "minutes", "5.03", "4.66"],
    ]


def test_the_row_before_2025_01_26_is_a_few_flags_away():
    """The flags are those that README names."""
    words = re.search(r"`(--num_iterations 1393 [^`]*)`", (HERE / "README.md").read_text())[1]
    hp, _ = train_gpt.parse_args(["--record", "2025-01-26_BatchSize", *words.split()])
    changed = {"seq_len": 65536, "val_seq_len": 65536, "w_s": 2.0**5, "grad_s": 2.0**29}
    assert hp == train_gpt.replace(RECORDS["2025-01-26_BatchSize"], **changed, num_iterations=1393)


def test_a_log_is_never_overwritten(flags, tmp_path, capsys):
    flags += ["--run_id", "mine", "--val_loss_every", "0"]
    main(flags)
    log = (tmp_path / "logs" / "mine.txt").read_text()
    assert "log in logs/mine.txt" in capsys.readouterr().out and "step:4/4 val_loss" in log
    status, err = error_of(flags, capsys)
    assert status == 1 and "logs/mine.txt is there already: choose another --run_id" in err
    assert (tmp_path / "logs" / "mine.txt").read_text() == log


# The published systems, value by value.
COMMON = {
    **{"num_layers": 12, "model_dim": 768, "num_heads": 6, "head_dim": 128, "batch_seqs": 8},
    **{"val_loss_every": 125, "val_tokens": 10485760, "warmup_steps": 0, "grad_clip": 0},
    **{"embed_lr": 0.6, "head_lr": 0.008, "scalar_lr": 0.04, "window_min": 64, "window_step": 64},
    **{"momentum_start": 0.85, "momentum_end": 0.95, "momentum_warmup_steps": 300},
    **{"muon_lr": 0.05, "adam_betas": (0.8, 0.95), "window_span": 1728, "norm_eps": 2**-7},
    **{"momentum_damped": True},
}
OF_2024 = {
    **{"seq_len": 65536, "val_seq_len": 65536, "lr_final": 0, "adam_eps": 1e-8, "fp8": False},
    **{"window_rule": "tokens", "logit_softcap": 30, "rope": "full", "rope_base": 10000},
    **{"attn_scale": 0, "init_bound": 1, "vocab_size": 50304, "momentum_damped": False},
}
SYSTEMS = {
    "2024-11-19_FlexAttention": COMMON
    | OF_2024
    | {"num_iterations": 1875, "cooldown_frac": 562 / 1875, "window_min": 1024, "window_span": 0}
    | {"adam_betas": (0.9, 0.95), "muon_lr": 0.04, "momentum_warmup_steps": 500},
    "2024-11-24_WindowWarmup": COMMON
    | OF_2024
    | {"num_iterations": 1750, "cooldown_frac": 640 / 1750},
    "2025-01-26_BatchSize": COMMON
    | {"num_iterations": 1770, "cooldown_frac": 0.4, "lr_final": 0.1, "seq_len": 49152}
    | {"val_seq_len": 262144, "window_rule": "blocks", "window_min": 128, "window_step": 128}
    | {"adam_eps": 1e-10, "logit_softcap": 15, "fp8": True, "x_s": 2, "w_s": 512}
    | {"grad_s": 2**19, "rope": "half", "rope_base": 1024, "attn_scale": 0.12}
    | {"init_bound": 3**0.5 * 0.5, "vocab_size": 50257},
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_record_has_the_published_numbers(name):
    found = {setting: getattr(RECORDS[name], setting) for setting in SYSTEMS[name]}
    assert found == SYSTEMS[name]


def test_a_layer_table_brings_its_number_of_layers():
    hp, _ = train_gpt.parse_args(["--layers", "long,long+vfirst,short+x1,long+x0"])
    assert hp.num_layers == len(train_gpt.layer_table(hp)) == 4


def test_flags_reach_the_settings():
    words = "--record 2025-01-26_BatchSize --fp8 off --adam_betas 0.9 0.99 --w_s 32 --num_layers 6"
    hp, args = train_gpt.parse_args(words.split())
    assert args.record == "2025-01-26_BatchSize"
    assert (hp.fp8, hp.adam_betas, hp.w_s, hp.num_layers) == (False, (0.9, 0.99), 32.0, 6)
    assert hp.seq_len == 49152


# ---- the machine


def test_threads_spin_for_a_short_time_in_a_program_and_an_import_changes_nothing():
    """Unless the user has said otherwise."""
    program = "import os, runpy, sys; sys.argv = ['', '--list_records']; "
    program += (
        f"runpy.run_path({SCRIPT!r}, run_name={{!r}}); print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    cases = [("__main__", {}, "1000"), ("train_gpt", {}, "None")]
    cases += [
        ("__main__", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("__main__", {"OMP_WAIT_POLICY": "x"}, "None"),
    ]
    rest = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    for name, own, expected in cases:
        command = [sys.executable, "-c", program.format(name)]
        done = subprocess.run(command, env=rest | own, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == expected, done.stderr


# ---- checkpoints


def test_checkpoint_evaluates_to_the_loss_of_the_run_that_wrote_it(flags, tmp_path, capsys):
    main([*flags, "--save_every", "3"])
    expected = val_losses(capsys.readouterr().out)[4]
    (log,) = tmp_path.glob("logs/*.txt")
    folder = log.with_suffix("")
    assert sorted(p.name for p in folder.iterdir()) == [
        "state_step000003.pt",
        "state_step000004.pt",
    ]
    moved = tmp_path / "elsewhere.pt"
    (folder / "state_step000004.pt").rename(moved)
    (tmp_path / "val_0.bin").rename(tmp_path / "other.bin")
    main(["--eval", str(moved), "--val_files", "other.bin"])  # it knows its model, not its places
    assert f"val_loss:{expected:.4f} over 2048 tokens, {moved}" in capsys.readouterr().out


def test_an_early_checkpoint_is_evaluated_under_the_window_of_its_step(flags, tmp_path, capsys):
    wide = ["--window_span", "256", "--num_iterations", "8", "--val_loss_every", "4"]
    main([*flags, *wide, "--seq_len", "256", "--save_every", "4"])
    (losses,) = [val_losses(capsys.readouterr().out)]
    for step in (4, 8):
        (path,) = tmp_path.glob(f"logs/*/state_step{step:06}.pt")
        main(["--eval", str(path), "--val_files", str(tmp_path / "val_*.bin"), "--device", "cpu"])
        assert f"val_loss:{losses[step]:.4f} " in capsys.readouterr().out


def test_published_checkpoint_loads(flags, tmp_path, capsys, randomize):
    """Names with torch.compile's prefix, bfloat16 embeddings, and no settings of ours inside."""
    hp, _ = train_gpt.parse_args(flags)
    model = randomize(GPT(hp))
    model.embed.bfloat16().float()  # so that saving in bfloat16 loses nothing
    weights = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    weights["_orig_mod.embed.weight"] = weights["_orig_mod.embed.weight"].bfloat16()
    path = tmp_path / "published.pt"
    torch.save({"step": 9, "code": "", "model": weights, "optimizers": [{}, {}]}, path)
    main([*flags, "--eval", str(path)])
    inputs, targets = next(
        train_gpt.distributed_data_generator(hp.val_files, hp.val_seq_len, 8, 0, 1)
    )
    window = train_gpt.get_window_size(hp.num_iterations, hp)
    with torch.no_grad():
        losses = [model(x, y, window).item() for x, y in zip(inputs, targets, strict=True)]
    assert f"val_loss:{np.mean(losses):.4f} " in capsys.readouterr().out


def test_damaged_and_foreign_checkpoints_are_refused(flags, tmp_path, capsys):
    main([*flags, "--save_every", "4"])
    (path,) = tmp_path.glob("logs/*/*.pt")
    foreign = [*flags, "--record", "demo", "--eval", path, "--model_dim", "32"]
    status, err = error_of(foreign, capsys)
    assert status == 1 and err.count("\n") == 1
    assert "is of other hyperparameters" in err
    assert "embed.weight: copying a param with shape torch.Size([512, 64])" in err
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no checkpoint"):
        path.write_bytes(content)
        status, err = error_of([*flags, "--eval", path], capsys)
        assert status and err.count("\n") == 1 and "is not a whole checkpoint" in err
    status, err = error_of([*flags, "--eval", tmp_path / "none.pt"], capsys)
    assert status and err.count("\n") == 1 and "none.pt" in err


def test_full_disk_while_saving_leaves_no_half_written_file(flags, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    done = run([*flags, "--save_every", "2"], preexec_fn=small_files)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "could not save logs/" in done.stderr and "state_step000002.pt" in done.stderr
    assert not list(tmp_path.glob("logs/*/*"))


def test_a_diverged_run_saves_nothing_and_keeps_what_it_had(flags, tmp_path, capsys, monkeypatch):
    """The step that breaks the weights is followed by a save: that one must not happen."""
    step_of = train_gpt.train_step

    def breaking(model, optimizers, inputs, targets, step, **options):
        loss = step_of(model, optimizers, inputs, targets, step, **options)
        if step == 2 and optimizers.adam.state:
            model.embed.weight.data.fill_(float("nan"))
        return loss

    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(train_gpt, "train_step", breaking)
    status, err = error_of([*flags, "--save_every", "1", "--val_loss_every", "0"], capsys)
    assert status == 1 and err.count("\n") == 1 and "the loss is nan at step 3" in err
    saved = sorted(tmp_path.glob("logs/*/*"))
    assert [p.name for p in saved] == ["state_step000001.pt", "state_step000002.pt"]
    for path in saved:
        weights = train_gpt.load_checkpoint(path)["model"].values()
        assert all(tensor.isfinite().all() for tensor in weights)


# ---- errors


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        (["--no_such_flag", "1"], 2, "unrecognized arguments: --no_such_flag 1"),
        (["--num_iter", "3"], 2, "unrecognized arguments: --num_iter 3"),
        (["--muon_lr", "fast"], 2, "argument --muon_lr: invalid float value: 'fast'"),
        (["--fp8", "maybe"], 2, "argument --fp8: invalid choice: 'maybe'"),
        (["--record", "2023"], 2, "argument --record: invalid choice: '2023'"),
        (["--seq_len", "100"], 2, "--seq_len 100: must be at least 128, a multiple of 128"),
        (["--val_seq_len", "64"], 2, "--val_seq_len 64: must be at least 128, a multiple of 128"),
        (["--val_tokens", "300"], 2, "--val_tokens 300: must be a multiple of val_seq_len"),
        (["--num_iterations", "0"], 2, "--num_iterations 0: must be at least 1"),
        (["--muon_lr", "nan"], 2, "--muon_lr nan: must be at least 0"),
        (["--adam_betas", "0.9", "1.5"], 2, "--adam_betas 0.9 1.5: must be from 0 to 0.9999"),
        (["--seed", "9" * 30], 2, "--seed " + "9" * 30),
        (["--x_s", "0"], 2, "--x_s 0: must be at least 1e-06"),
        (["--num_layers", "5"], 2, "--num_layers 5: must be at least 2, a multiple of 2"),
        (["--num_layers", "14"], 2, "--num_layers 14: --layers has 12"),
        (["--layers", "long,wide,long,long"], 2, "--layers: 'wide' cannot be layer 1"),
        (["--layers", "long,long+x0,long,long"], 2, "'long+x0' cannot be layer 1"),
        (["--layers", "long,long,long+x2,long"], 2, "'long+x2' cannot be layer 2"),
        (["--layers", "long,none+v0,long,long"], 2, "'none+v0' cannot be layer 1"),
        (["--diff", "demo", "2023"], 2, "argument --diff: invalid choice: '2023'"),
        (["--logit_softcap", "80"], 2, "--logit_softcap 80: must be from 0.001 to 38"),
        (["--train_files", "none*.bin"], 1, "no shard matches none*.bin"),
        (["--seq_len", "8192"], 1, "at most 30000 tokens, a batch needs 65537"),
        (["--val_tokens", "262144"], 1, "at most 10001 tokens, a batch needs 262145"),
        (["--vocab_size", "256"], 1, "is outside the vocabulary of 256"),
        (["--epochs", "1", "--num_iterations", "30"], 1, "holds 29 batches, the run reads 30"),
        (["--verify_data", "on"], 1, "SHA256SUMS is missing: cached_fineweb.py or"),
        (["--embed_lr", "1e38"], 1, "the loss is nan at step"),
        (["--device", "cuda"], 1, "use --device cpu"),
    ],
)
def test_bad_input_ends_with_one_line(flags, extra, status, message, capsys):
    if extra[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found, err = error_of([*flags, *extra], capsys)
    assert found == status and message in err
    assert err.startswith("train_gpt.py: error: ") and err.count("\n") == 1


def test_damaged_shard_ends_with_one_line(flags, write_shard, capsys):
    write_shard("train_2.bin", range(8), version=7)
    status, err = error_of(flags, capsys)
    assert status == 1 and err.count("\n") == 1
    assert (
        "train_2.bin is not a whole token shard: its 1040 bytes begin with [20240520, 7, 8]" in err
    )


# ---- ranks


def own_lines(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("train_gpt.py:")]


def test_an_error_of_all_ranks_is_printed_once(flags):
    done = run([*flags, "--batch_seqs", "4"], ranks=3)
    assert done.returncode == 1
    assert own_lines(done) == [
        "train_gpt.py: error: 3 ranks cannot share 4 sequences: use a divisor"
    ]
    done = run([*flags, "--seq_len", "5"], ranks=2)
    assert done.returncode == 1 and len(own_lines(done)) == 1
    done = run(["--list_records"], ranks=2)
    assert done.returncode == 0 and done.stdout.count("num_iterations") == 1


@pytest.mark.parametrize("kind", ["error", "killed"])
def test_one_rank_that_fails_stops_all(flags, tmp_path, kind):
    """Rank 1 meets an error, or is killed, in its third step; rank 0 waits for it meanwhile."""
    ending = {
        "error": "raise train_gpt.UserError('only here')",
        "killed": f"open('now', 'w').close(); os.kill(os.getpid(), {int(signal.SIGKILL)})",
    }[kind]
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import train_gpt\n"
        "step_of = train_gpt.train_step\n"
        "def failing(model, optimizers, inputs, targets, step, **options):\n"
        "    if os.environ['RANK'] == '1' and step == 3:\n"
        f"        {ending}\n"
        "    return step_of(model, optimizers, inputs, targets, step, **options)\n"
        "train_gpt.train_step = failing\n"
        "train_gpt.main()\n"
    )
    steps = ["--num_iterations", "100000", "--val_loss_every", "0"]
    began = time.monotonic()
    done = run([*flags, *steps], ranks=2, script=str(script))
    assert time.monotonic() - began < 30  # from the start of the run, set-up included
    assert done.returncode == 1 and f'File "{script}"' not in done.stderr  # torchrun's has none
    lines = own_lines(done)
    if kind == "error":
        assert lines == ["train_gpt.py: error: only here"]
    else:  # torchrun may stop rank 0 before it has noticed and said so
        assert time.time() - (tmp_path / "now").stat().st_mtime < 10
        assert len(lines) <= 1 and all("another rank has stopped" in line for line in lines)


def test_more_processes_than_gpus_is_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(train_gpt.UserError, match="finds 2 GPUs .*: start 2 processes"):
        train_gpt.start_device("auto", None)


# ---- run.sh


STUB = """#!/bin/sh
# A Python that has torch and some GPUs, and prints what it is asked to run.
case "$*" in
    -) exit 0 ;;
    *device_count*) echo $GPUS ;;
    *cached_fineweb.py*) echo "fetch $2" ;;
    *huggingface_hub*) exit 0 ;;
    *) echo "run $*" ;;
esac
"""


@pytest.mark.parametrize(
    ("gpus", "arguments", "processes", "shards"),
    [
        (0, "--num_iterations 3", 1, 0),
        (1, "--num_iterations 3", 1, 7),
        (8, "--num_iterations 3", 8, 7),
        (5, "", 4, 7),
        (3, "--batch_seqs 6", 3, 7),
        (3, "--batch_seqs=4", 2, 7),
        (8, "--record 2025-01-26_BatchSize", 8, 7),
        (8, "--record=2024-11-24_WindowWarmup", 8, 10),
        (8, "--device cpu", 1, 0),
        (8, "--device=cpu", 1, 0),
        (8, "--record demo", 8, 0),
        (8, "--record=demo", 8, 0),
        (8, "--train_files x", 8, 0),
        (8, "--help", 1, 0),
        (8, "--list_records", 1, 0),
        (8, "--diff demo demo", 1, 0),
    ],
)
def test_run_sh_launches_a_divisor_of_the_batch(gpus, arguments, processes, shards, tmp_path):
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    shutil.copy(HERE / "run.sh", tmp_path)
    shutil.copy(HERE / "requirements.txt", tmp_path)
    done = subprocess.run(
        ["./run.sh", *arguments.split()],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(stub), "GPUS": str(gpus)},
        capture_output=True,
        text=True,
        check=True,
    )
    *before, launch = done.stdout.splitlines()
    script = f"{tmp_path}/train_gpt.py {arguments}".rstrip()
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={processes} "
    assert launch == f"run {torchrun if processes > 1 else ''}{script}"
    assert before == ([f"fetch {shards}"] if shards else [])
    said = f"{gpus} GPUs cannot share" in done.stderr
    assert said == (gpus > 1 and processes not in (1, gpus))


def test_run_sh_makes_runs_with_different_seeds_and_their_statistics(tmp_path):
    """The real launcher and tool, in a copy of the project that finds this Python set up."""
    for name in ("run.sh", "train_gpt.py", "requirements.txt"):
        shutil.copy(HERE / name, tmp_path)
    for name in ("tools", "data"):
        (tmp_path / name).symlink_to(HERE / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    shutil.copy(HERE / "requirements.txt", tmp_path / ".venv" / ".installed-run")
    shutil.copy(HERE / "tools" / "requirements.txt", tmp_path / ".venv" / ".installed-tools")
    size = "--num_layers 2 --model_dim 16 --num_heads 1 --head_dim 16 --seq_len 128"
    size += " --val_seq_len 128 --val_tokens 128 --num_iterations 2 --device cpu"

    def call(words: str):
        command = ["./run.sh", *words.split()]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = call(f"{size} --runs 2 --muon_lr 0.06 --seed=5")
    assert done.returncode == 0, done.stderr
    logs = sorted((tmp_path / "logs").glob("*.txt"))
    assert [re.search(r"_seed(\d)\.txt", log.name)[1] for log in logs] == ["5", "6"]
    assert all(f"\nseed: {seed}\n" in log.read_text() for seed, log in enumerate(logs, 5))
    losses = [val_losses(log.read_text())[2] for log in logs]
    row = done.stdout.splitlines()[-1].split()
    assert row[:3] == ["A", "2", f"{np.mean(losses):.4f}"] and losses[0] != losses[1]
    assert "--muon_lr 0.06" in " ".join(row)

    failed = call("--runs 3 --device cpu --seq_len 5")
    assert failed.returncode == 2 and failed.stderr.count("--seq_len 5: must be") == 1
    for words in ("--runs", "--runs=", "--runs 0", "--runs=many"):
        failed = call(words)
        assert failed.returncode == 1 and "must be a number of runs" in failed.stderr
