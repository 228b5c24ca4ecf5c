"""What a log says about a run: our logs, and the public project's."""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from train_gpt import RULE

FILE = re.compile(r"([\w/]+\.py):(\n|$)")  # the first line of another file's part
STEP = re.compile(
    r"step:(\d+)/(\d+)(?: (val|train)_loss:(\S+))?((?: val_\w+:\S+)*) "
    r"train_time:(?:(\d+)ms|([\d.]+)s) step_avg:(nan|[\d.]+)ms(?: \w+:\S+)*"
)  # logs of the optimizer benchmark have seconds and other fields
# Runs of one group may differ in these. The name of the script is one: its source is compared.
OF_ONE_RUN = {"script", "seed", "run_id", "resume", "device"}
OF_ONE_RUN |= {"val_loss_every", "save_every", "keep"}
# What rule 1 of the optimizer benchmark fixes: model, data and batch. Its runs have a context_len.
# Trained weights to begin with would be more passes than it counts.
OF_BENCHMARK = {"context_len": "1024", "num_layers": "12", "num_heads": "6", "head_dim": "128"}
OF_BENCHMARK |= {"model_dim": "768", "vocab_size": "50304", "attn_scale": "0.12", "rope": "half"}
OF_BENCHMARK |= {"rope_base": "1024.0", "norm_eps": str(2.0**-23), "logit_softcap": "15.0"}
OF_BENCHMARK |= {"val_tokens": "10485760", "epochs": "1", "init_from": ""}
FINEWEB = {"train_files": "fineweb_train_*.bin", "val_files": "fineweb_val_*.bin"}
BENCHMARK_BATCH, BENCHMARK_PARAMETERS = 524288, 162354816
TARGET = 3.28  # the public leaderboard's loss to reach, with GPT-2 small


@cache
def published() -> dict[str, dict]:
    """Return the published results of records on 8 H100s, by name, or by name and flags if one was
    published in two forms; {} if the file is missing.

    minutes: the official time. mean, deviation, runs: the last validation loss over that many runs.
    (The deviation of 2024-11-19 is estimated; adamw's is the one that the optimizer benchmark
    takes as known.) target: the loss to reach, if it is not TARGET.
    losses, seconds: the curve, by step. one_h100: the same of a run on one H100. flags_of_logs:
    those that make the form of which the public logs are. folder: of the public logs, if it has
    another name.
    """
    path = Path(__file__).with_name("published.json")
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def flags_in(text: str) -> dict[str, str]:
    """Return the flags in a text and their values, each after a space; without OF_ONE_RUN."""
    found = re.findall(r"--(\w+)((?: (?!--)\S+)*)", text)
    return {name: values for name, values in found if name not in OF_ONE_RUN}


@dataclass
class Run:
    """What a log says about a run; None or empty for what is missing."""

    path: Path
    source: str = ""  # of the script
    files: dict[str, str] = field(default_factory=dict)  # sources of other files by name
    settings: dict[str, str] = field(default_factory=dict)
    machine: str = ""  # software and hardware, as in the log
    record: str | None = None
    flags: str = ""
    kernels: str = ""  # names of the kernels in use
    kernels_off: dict[str, str] = field(default_factory=dict)  # why others are not, by name
    torch: str | None = None
    gpu: str | None = None
    memory: str | None = None  # MiB allocated/reserved
    devices: str | None = None  # such as 8 x NVIDIA H100; for a CPU, `gpu` has its model
    parameters: int | None = None
    resume: str = ""  # the command that resumes it, if it was saved and not finished
    replaced: list[str] = field(default_factory=list)  # source or data, if a resumed run had others
    steps: int = 0  # of the whole run
    curve: dict[int, tuple[float, float]] = field(default_factory=dict)  # step: loss, seconds
    last: tuple[int, float] = (0, 0.0)  # the last step that it reports, and seconds up to there
    step_ms: float | None = None
    skips_ten: bool = False  # the clock begins at step 10, as in early public logs
    digits: int = 4  # of a loss: 5 in our logs, and in public ones of the optimizer benchmark

    @property
    def name(self) -> str:
        """The script, record and flags; of a public log of no record, its folder (this_pr)."""
        known = [self.settings.get("script"), self.record or self.path.parent.name]
        name = " ".join(word for word in known if word) + self.flags
        return name or self.path.stem

    @property
    def published(self) -> dict | None:
        """The published result of its record, in the form that its flags make."""
        for name, result in published().items():
            if name.startswith(f"{self.record} --") and name[len(self.record) :] in self.flags:
                return result
        return published().get(self.record)

    @property
    def target(self) -> float:
        """The loss that its record is to reach."""
        return (self.published or {}).get("target", TARGET)

    @property
    def loss(self) -> float:
        return self.curve[self.steps][0]

    @property
    def seconds(self) -> float:
        return self.curve[self.steps][1]

    @property
    def group(self) -> tuple:
        settings = tuple((k, v) for k, v in self.settings.items() if k not in OF_ONE_RUN)
        files = tuple(sorted(self.files.items()))
        return self.source, files, settings, self.kernels, self.torch, self.gpu

    @property
    def known_deviation(self) -> float | None:
        """The deviation of a loss that the optimizer benchmark takes as known, for our runs that
        keep to its rule 1. Public logs do not say whose they are."""
        keeps = self.is_of_benchmark and not self.against_benchmark
        return published()["adamw"]["deviation"] if keeps else None

    @property
    def is_of_benchmark(self) -> bool:
        """Whether it is one of our runs of the optimizer benchmark, of any size."""
        return "context_len" in self.settings

    @property
    def against_benchmark(self) -> list[str]:
        """What differs from the model, data and batch that the optimizer benchmark fixes."""
        differences = []
        for name, value in OF_BENCHMARK.items():
            if self.settings.get(name, value) != value:
                own = self.settings[name]
                differences.append(f"--{name} {own}" + (f", not {value}" if value else ""))
        for name, value in FINEWEB.items():
            if Path(self.settings.get(name, value)).name != value:
                differences.append(f"--{name} {self.settings[name]}, not {value}")
        tokens = int(self.settings.get("batch_seqs", 8)) * int(self.settings.get("seq_len", 65536))
        if tokens != BENCHMARK_BATCH:
            differences.append(f"a batch of {tokens} tokens, not {BENCHMARK_BATCH}")
        if self.parameters not in (None, BENCHMARK_PARAMETERS):
            differences.append(f"{self.parameters} parameters, not {BENCHMARK_PARAMETERS}")
        return differences

    @property
    def on_fineweb(self) -> bool:
        """Whether the data is FineWeb. Public logs have no settings: their data is FineWeb."""
        files = [self.settings.get(name, "fineweb_") for name in ("train_files", "val_files")]
        return all(Path(pattern).name.startswith("fineweb_") for pattern in files)


def read_log(path: Path, whole: bool = True) -> Run:
    """Return the run of a log, or its last trial. ValueError if the file is no log, or, with
    `whole`, if the run is not finished."""
    return read_trials(path, whole)[-1]


def read_trials(
    path: Path, whole: bool = True, at: int | None = None, name: str = "val_loss"
) -> list[Run]:
    """Return the runs of a log: some public logs have several. `at` is a step that counts as the
    last one, and `name` is the field with the loss. ValueError as for read_log."""
    text = path.read_bytes().decode("utf-8")  # UnicodeDecodeError is a ValueError
    parts = [part.strip("\n") for part in re.split(f"^{RULE}$", text, flags=re.M)]
    *head, results = [part for part in parts if part] or [""]  # logs of 2024 begin with a rule
    first = re.search("^step:", results, re.M)
    has_begun = first or (not whole and re.search("^record ", results, re.M))
    if not has_begun or (first and first.start() and not head):  # some public logs: steps alone
        raise ValueError('has no line of a step after a line of 100 "=": this is no whole log')
    runs = []
    for lines in trials_of(results):
        run = run_of(path, head, results)
        read_steps(run, lines, whole, at, name)
        for record, known in published().items():
            lies_there = known.get("folder", record) in path.resolve().parts
            # A record's folder may also hold runs of the one before, which have other steps.
            if lies_there and not run.settings and lines and lines[-1][2] == [*known["losses"]][-1]:
                run.record, run.flags = record, known.get("flags_of_logs", "")
        runs.append(run)
    return runs


def trials_of(results: str) -> list[list[re.Match]]:
    """Return the lines of steps of each trial. If the step decreases, another trial begins in a
    public log, but a resumed run in one of ours."""
    is_ours = re.search(r"^record ", results, re.M)
    trials, last = [[]], -1
    for line in results.splitlines():
        if not line.startswith("step:"):
            continue
        match = STEP.fullmatch(line)
        if not match:
            raise ValueError(f"has a malformed line: {line[:80]!r}")
        if int(match[1]) < last and not is_ours:
            trials.append([])
        last = int(match[1])
        trials[-1].append(match)
    return trials


def run_of(path: Path, head: list[str], results: str) -> Run:
    """Return a run, without its steps, of the parts of a log: `results` is the last one."""
    source, *parts = head or [""]
    run = Run(path, source)
    while parts and (match := FILE.match(parts[-1])):
        run.files[match[1]] = parts.pop()[match.end() :]
    run.machine = "\n".join([*parts, results])
    if match := re.search(r"^record (\S+)(.*)$", results, re.M):  # it is one of ours
        run.record = match[1]
        run.settings = dict(re.findall(r"^(\w+): (.*)$", parts[-1] if parts else "", re.M))
        run.flags = "".join(f" --{name}{values}" for name, values in flags_in(match[2]).items())
    # A resumed run names its kernels again; they may have changed.
    run.kernels = "; ".join(dict.fromkeys(re.findall(r"^kernels: ([\w ]+)", results, re.M)))
    run.kernels_off = dict(re.findall(r"^kernel (\w+) is off: (.*)$", results, re.M))
    if match := re.search(r"^(?:Running )?(?:Py)?torch (\S+)", run.machine, re.M | re.I):
        run.torch = match[1]
    if match := re.search(r"^on (\d+ x .+), log in ", results, re.M):
        cpu = re.search(r"^(?:Model name|machdep.cpu.brand_string): +(.+)$", run.machine, re.M)
        run.devices = match[1]
        run.gpu = match[1].replace("CPU", cpu[1]) if cpu else match[1]
    elif names := re.findall(r"^\|\s+\d+\s+(NVIDIA .+?)\s+(?:On|Off)\s", run.machine, re.M):
        run.gpu = f"{len(names)} x {names[0]}"
    elif match := re.search(r" on (NVIDIA .+) with world_size (\d+)$", run.machine, re.M):
        run.gpu = f"{match[2]} x {match[1]}"
    if match := re.search(r"^peak memory allocated: (\d+) MiB reserved: (\d+) MiB", results, re.M):
        run.memory = f"{match[1]}/{match[2]}"
    if match := re.search(r"^parameters: (\d+)", results, re.M):
        run.parameters = int(match[1])
    changed = re.findall(r"^the (\w+) is not the one with which this run began$", results, re.M)
    run.replaced = [*dict.fromkeys(changed)]
    if match := re.search(r"resume with (.+)\Z", results):  # its last line
        run.resume = match[1]
    return run


def read_steps(run: Run, lines: list[re.Match], whole: bool, at: int | None, name: str) -> None:
    """Take over what the lines of steps say; see read_trials."""
    for match in lines:
        step, average = int(match[1]), float(match[8])
        if at is not None and step > at:
            continue  # not break: a resumed run repeats steps
        run.skips_ten |= step > 0 and math.isnan(average)
        seconds = float(match[7]) if match[7] else int(match[6]) / 1000
        run.last = step, seconds
        if match[3] != "val":
            continue
        losses = {"val_loss": match[4], **dict(re.findall(r"(\w+):(\S+)", match[5]))}
        if name not in losses:
            raise ValueError(f"has no {name} at step {step}, but {', '.join(losses)}")
        if not re.fullmatch(r"\d+\.\d+", losses[name]):
            raise ValueError(f"has a loss of {losses[name]} at step {step}")
        run.curve = {k: v for k, v in run.curve.items() if k < step}  # a resumed run repeats some
        run.curve[step] = float(losses[name]), seconds
        run.digits = len(losses[name].partition(".")[2])
        run.step_ms = average if math.isfinite(average) else None
    run.steps = at or (int(lines[-1][2]) if lines else 0)
    if whole and run.steps not in run.curve:
        last = int(lines[-1][1])
        if last >= run.steps:
            raise ValueError(f"has no validation at step {run.steps}")
        remedy = f": --at {max(run.curve)} reads its last validation" if run.curve else ""
        raise ValueError(f"is truncated: it ends at step {last} of {run.steps}{remedy}")


def is_finished(path: Path) -> bool:
    """Return whether a file is the log of a finished run."""
    try:
        return bool(read_log(path))
    except (OSError, ValueError):
        return False


def objects_in(path: Path) -> Iterator[dict]:
    """Yield the objects of a file with one in each line; none if there is no file. The last line
    may be being written. Another one that is torn, as by a full disk, is named and left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            print(f"{path}:{number} is not JSON: left out", file=sys.stderr)


def read_metrics(path: Path) -> list[dict]:
    """Return a row of a run's .jsonl for each step, up to the last one that was written; [] if
    there is no file. Of a step's several objects, later fields count. null stands for a number that
    was not finite: it is read as NaN."""
    rows, last = {}, 0
    for row in objects_in(path):
        if type(row.get("step")) is not int:
            continue
        last = row["step"]
        row = {name: math.nan if value is None else value for name, value in row.items()}
        rows[last] = rows.get(last, {}) | row
    return [rows[step] for step in sorted(rows) if step <= last]
