#!/usr/bin/env bash
# Set up and train, with one command on any machine.
#
#   ./run.sh [SCRIPT.py] [flags]       train: a record on GPUs, a demo of 1 to 2 minutes without one.
#                                      SCRIPT.py is a fork, such as forks/train_gpt_2026.py; the
#                                      default is train_gpt.py
#   ./run.sh [SCRIPT.py] --runs N [flags]
#                                      make N runs with seeds from --seed on, then print statistics;
#                                      weights are saved only with --keep 1 or more
#   ./run.sh [SCRIPT.py] --seconds N [flags]
#                                      train as many steps as take N seconds on this machine; also
#                                      with --runs and --compare
#   ./run.sh --compare "A" "B" [flags] make runs with flags A and with flags B in turn, until it is
#                                      clear whether B helps; A and B may begin with a SCRIPT.py
#   ./run.sh tools/NAME.py [flags]     set up, install what this tool needs, and run it
#   ./run.sh setup                     only set up, and print what this machine has
#   ./run.sh test                      set up, install what the tests need, and run all tests but
#                                      the slow ones, in a process for each core (at most 4)
#   ./run.sh test [PATH] [flags]       the same in one process: the tests of PATH, such as
#                                      tests/test_model.py, with flags of pytest's
#   ./run.sh test slow | gpu           only the slow tests | only those that need a GPU
#   ./run.sh [SCRIPT.py] --help        this page, and the flags of a script
#
# NPROC=n uses n GPUs. PYTHON=path names another Python (3.11 or later): run.sh starts it if it has
# torch, or else makes an environment from it. run.sh uses a .venv that it did not make if nothing
# is missing in it, and never changes it.
if [ -z "${BASH_VERSION-}" ]; then # another shell, as by `sh run.sh`
    echo "run.sh: this is a script of bash: start it by bash $0, or by its path alone" >&2
    exit 1
fi
set -euo pipefail +o posix # bash started as sh reads less than bash

unset CDPATH # cd would look for folders elsewhere
file="${BASH_SOURCE[0]}"
while [ -L "$file" ]; do # macOS may lack readlink -f
    link="$(readlink "$file")"
    case "$link" in
    /*) file="$link" ;;
    *) file="$(dirname "$file")/$link" ;;
    esac
done
here="$(cd -P "$(dirname "$file")" && pwd)"
python="${PYTHON:-python3}"
case "$python" in
[!/]*/*) python="$PWD/$python" ;; # so that it is still found after a cd
esac
venv="$here/.venv"

# Python reads our files, and prints, as UTF-8 in any locale. PYTHONOPTIMIZE would strip docstrings
# and assertions, which tools and this script need. PYTHONSAFEPATH would hide what lies beside them.
export PYTHONUTF8=1
unset PYTHONOPTIMIZE PYTHONSAFEPATH

# Compiled code is cached in the project, because /tmp is often emptied by a reboot.
if [ -w "$here" ]; then
    export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$here/.cache/inductor}"
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$here/.cache/triton}"
fi

# Some things must be set before Python starts. OpenMP's threads spin while they wait for each other:
# on a busy machine, a long spin makes a step several times as long; on an idle one, a short spin
# costs a little (BENCHMARKS.md). The fourth field of /proc/loadavg, such as 2/80, says how many
# threads can run now, including this one.
if [ -r /proc/loadavg ]; then
    busy=yes
    for _ in 1 2 3; do
        read -r _ _ _ threads _ </proc/loadavg
        [ "${threads%/*}" -gt 1 ] || busy=
        sleep 0.01
    done
    if [ "$busy" ] && [ -z "${OMP_WAIT_POLICY-}${GOMP_SPINCOUNT-}" ]; then
        export GOMP_SPINCOUNT=1000
    fi
fi

die() {
    echo "run.sh: $*" >&2
    exit 1
}

has_gpu() { # nvidia-smi may also say that it found none
    grep -q '^GPU [0-9]*: ' <<<"$(nvidia-smi -L 2>/dev/null)"
}

# Without -P, Python's -c, -m and - import files of the current folder, such as an ast.py.

import_torch() { # import what training needs; the last line of an error says what is missing
    "$1" -P - <<'EOF'
import numpy, torch, tqdm
if torch.cuda.is_available():
    import huggingface_hub  # downloads FineWeb
version = tuple(map(int, torch.__version__.split(".")[:2]))
assert version >= (2, 11), "torch is older than 2.11"
EOF
}

# Whether this Python can train, as in many containers.
has_torch() { import_torch "$1" 2>/dev/null; }

has_pip() { "$1" -P -c 'import pip' 2>/dev/null; }

packages_missing() { # packages_missing FOLDER: print what is missing of its requirements.txt
    "$python" -P - "$here/$1/requirements.txt" <<'EOF'
import re, sys
from importlib.metadata import PackageNotFoundError, distribution
missing = []
for name in re.findall(r"(?m)^[\w-]+", open(sys.argv[1]).read()):
    try:
        distribution(name)
    except PackageNotFoundError:
        if name == "triton":  # PyTorch's CUDA build brings its own, and macOS has none
            import torch
            if torch.version.cuda or sys.platform != "linux":
                continue
        missing.append(name)
print(", ".join(missing))
EOF
}

version_of() { "$1" -P -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null; }

is_named() { # whether .venv was made from PYTHON's Python; if PYTHON names none, any will do
    [ -z "${PYTHON-}" ] || [ "$(version_of "$python")" = "$(version_of "$venv/bin/python")" ]
}

is_foreign() { # whether run.sh may not make or change .venv
    if [ -L "$venv" ]; then # its target is never replaced, so it must be complete
        ! marked "$here/requirements.txt" run
    else
        case "$(ls -A "$venv" 2>/dev/null)" in
        "" | *.made-by-run.sh* | *.installed-*) return 1 ;;
        *) return 0 ;;
        esac
    fi
}

advise() { # advise REASON FILE: stop, and say why $python will not do, and how to install FILE
    local command
    "$python" -P -c "" 2>/dev/null ||
        die "$python is missing, or is not Python 3.11 or later: name another with PYTHON=path," \
            "or move $venv away, which is not run.sh's to change"
    if has_pip "$python"; then
        printf -v command '%q -m pip install -r %q' "$python" "$here/$2"
    else
        printf -v command 'uv pip install --python %q -r %q' "$python" "$here/$2"
    fi
    die "$python $1, and $venv is not run.sh's to change. This helps: $command" \
        "(or move $venv away, and run.sh makes its own; or name another Python with PYTHON=path)"
}

must_write() { # stop if nothing can be installed
    local place="$here"
    [ ! -e "$venv" ] || place="$venv"
    if [ ! -w "$place" ]; then
        die "cannot write to $place, where packages are to be installed:" \
            "copy the project to a folder that you can write to, and start it there"
    fi
}

make_venv() { # make_venv [flags of venv]: make .venv, in place of an older one
    local base
    # This Python is outside all environments: $python may be in .venv, if that is activated.
    # An older Python does not know -P.
    base="$("$python" -P -c 'import sys; print(sys._base_executable)' 2>/dev/null)" ||
        die "$python is not Python 3.11 or later: install that, or name one with PYTHON=path"
    "$base" -P -c 'import venv, ensurepip' 2>/dev/null ||
        die "Python's venv module is missing: apt-get install python3-venv (Debian, Ubuntu)," \
            "or your system's package for it, then try again"
    if [ -e "$venv/bin/python" ] && ! is_named; then
        echo "run.sh: $venv is of another Python than $PYTHON: replacing it" >&2
    fi
    # If this is interrupted, the next run.sh knows that .venv is its own, and incomplete.
    mkdir -p "$venv"
    touch "$venv/.made-by-run.sh"
    rm -f "$venv"/.installed-*
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .made-by-run.sh -exec rm -rf {} +
    "$base" -P -m venv "$@" "$venv"
}

# One run.sh at a time installs packages; others wait, then find them installed. The lock belongs to
# the open file, which Python inherits, and ends when the file is closed.
lock() {
    must_write
    progress "installing"
    [ -w "$here" ] || return 0
    exec 9>"$here/.run.lock"
    # If Python is too old, make_venv stops.
    "$python" -P -c 'import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    print(f"run.sh: no lock ({error.strerror}): start no other run.sh until this has installed")
' >&2 2>/dev/null || true
}

unlock() {
    exec 9>&-
    progress "starting Python, which imports torch"
}

progress() { # progress TEXT: print this after two seconds, then every ten, not the text before
    exec 8>&-
    exec 8> >(say_progress "$1" >/dev/null) # it ends when the other end is closed, here or by Python
    export RUN_SH_TICKER=8                  # for tools/console.py
}

say_progress() {
    local seconds=0 last= before
    while true; do
        before=$SECONDS
        read -r -t 2 || true
        [ "$SECONDS" -gt "$before" ] || return 0 # read returned early: the other end is closed
        seconds=$((seconds + 2))
        [ $((seconds % 10)) = 2 ] || continue
        if [ "$1" = installing ]; then # torch takes gigabytes
            read -r last < <(tail -n 1 "$venv/pip.log" 2>/dev/null) || true
        fi
        echo "run.sh: $1, $seconds s${last:+: ${last:0:100}}" >&2
    done
}

pip_install() { # pip_install FLAGS: errors are shown, the rest is for say_progress
    "$venv/bin/python" -P -m pip --disable-pip-version-check install --progress-bar off "$@" \
        >"$venv/pip.log"
}

# Each requirements.txt is installed once: .venv keeps a copy to see whether it has changed. If the
# Python of which .venv was made is gone, its python is a link to nothing.
marked() { cmp -s "$1" "$venv/.installed-$2" && [ -x "$venv/bin/python" ] && is_named; }
mark() { cp "$1" "$venv/.installed-$2"; }

venv_has_torch() {
    if is_foreign; then
        is_named && has_torch "$venv/bin/python"
    else
        marked "$here/requirements.txt" run
    fi
}

setup() { # choose a Python with torch: the one that PYTHON names, .venv's, python3 or a new .venv's
    if [ "${PYTHON-}" ] && has_torch "$python"; then return; fi
    if ! venv_has_torch; then
        if [ -z "${PYTHON-}" ] && has_torch "$python"; then return; fi
        if is_foreign; then
            if is_named; then python="$venv/bin/python"; fi
            advise "cannot train ($(import_torch "$python" 2>&1 | tail -n 1))" requirements.txt
        fi
        lock
        venv_has_torch || install
        unlock
    fi
    python="$venv/bin/python"
}

install() { # make .venv, and install requirements.txt
    echo "run.sh: setting up $venv (once)" >&2
    make_venv
    if ! has_gpu; then # PyTorch's smaller CPU build; if that fails, pip's build follows
        pip_install --retries 1 --timeout 20 --index-url https://download.pytorch.org/whl/cpu \
            "$(grep '^torch==' "$here/requirements.txt")" 2>/dev/null || true
    fi
    pip_install -r "$here/requirements.txt" ||
        die "pip could not install requirements.txt: see its message above"
    mark "$here/requirements.txt" run
}

setup_more() { # setup_more FOLDER: set up, and install FOLDER/requirements.txt
    local missing
    setup
    if is_foreign; then
        missing="$(packages_missing "$1")"
        [ -z "$missing" ] || advise "lacks $missing" "$1/requirements.txt"
        return
    fi
    if ! marked "$here/$1/requirements.txt" "$1"; then
        lock
        marked "$here/$1/requirements.txt" "$1" || install_more "$1"
        unlock
    fi
    python="$venv/bin/python"
}

install_more() { # install_more FOLDER: install FOLDER/requirements.txt into .venv
    local requirements="$1/requirements.txt"
    echo "run.sh: installing $requirements (once)" >&2
    if [ "$python" != "$venv/bin/python" ]; then # that Python has torch: .venv is for the rest
        if ! has_pip "$venv/bin/python" || ! is_named; then make_venv --system-site-packages; fi
        python="$venv/bin/python"
        # If that Python is itself a virtual environment, .venv does not see its packages.
        has_torch "$python" || pip_install -r "$here/requirements.txt" ||
            die "pip could not install requirements.txt: see its message above"
    fi
    # PyTorch's CUDA build brings its own Triton. The tests' Triton is for the CPU build.
    local wanted="$venv/.wanted"
    if "$python" -P -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
        grep -v '^triton' "$here/$requirements" >"$wanted"
    else
        cp "$here/$requirements" "$wanted"
    fi
    pip_install -r "$wanted" ||
        die "pip could not install $requirements: see its message above"
    mark "$here/$requirements" "$1"
}

progress "starting Python, which imports torch"
case "${1:-}" in
setup)
    setup
    exec "$python" "$here/tools/machine.py"
    ;;
test)
    shift
    setup_more tools
    setup_more tests
    # Tests share the cores. Each process starts with neighbouring tests, which share fixtures, and
    # takes tests from the others when it is done. A GPU's memory fits one process.
    if [ $# = 0 ] && ! has_gpu; then
        set -- -n auto --maxprocesses 4 --dist worksteal
    elif [ -n "${1:-}" ] && [ -d "$here/tests/$1" ]; then
        set -- "tests/$1" "${@:2}"
    fi
    # pytest starts in the project, where pyproject.toml names the tests. So a path that exists only
    # relative to the current folder is made absolute.
    words=()
    for word in "$@"; do
        case "$word" in
        -* | /*) ;;
        */* | *.py*)
            path="${word%%::*}"
            if [ ! -e "$here/$path" ] && [ -e "$path" ]; then word="$PWD/$word"; fi
            ;;
        esac
        words+=("$word")
    done
    cd "$here"
    exec "$python" -P -m pytest ${words[@]+"${words[@]}"} # bash 3 rejects a plain empty list
    ;;
tools | tools/* | ./tools/*)
    tool="${1#./}"
    tool="${tool%.py}.py"
    if ! grep -qs __main__ "$here/$tool"; then # other files are not programs
        cd "$here"
        known=$(grep -l __main__ tools/*.py)
        die "there is no tool $tool; there are" $known
    fi
    case "$tool" in
    tools/records* | tools/history* | tools/bench* | tools/bundle* | tools/machine* | tools/evaluate*) setup ;;
    tools/sample*) setup_more data ;;
    *) setup_more tools ;;
    esac
    exec "$python" "$here/$tool" "${@:2}"
    ;;
*)
    start=tools/start.py with=
    case " $* " in
    *" --compare "*) start=tools/compare.py with=tools ;;
    *" --runs"*) with=tools ;; # leaderboard.py prints the statistics
    esac
    case "$start $* " in
    tools/start.py*" --help "* | tools/start.py*" -h "*) # this file's page, then the script's
        sed -n '2,/^set /s/^# \{0,1\}//p' "$here/run.sh"
        ;;
    *" --help "* | *" -h "*) # the docstring; no Python is needed for it
        sed '1s/^"""//; /^"""$/,$d' "$here/$start"
        exit
        ;;
    esac
    if [ -n "$with" ]; then setup_more "$with"; else setup; fi
    exec "$python" "$here/$start" "$@"
    ;;
esac
