#!/bin/sh
# Set up and train, with one command on any machine: ./run.sh --help lists the commands. This finds
# a Python, and starts tools/setup.py with it.
file="$(readlink -f "$0")" # a link may lead here, also by another link
here="${file%/*}"
# Python reads our files, and prints, as UTF-8 in any locale. PYTHONOPTIMIZE would strip docstrings
# and assertions, which tools need. PYTHONSAFEPATH would hide what lies beside a script.
export PYTHONUTF8=1
unset PYTHONOPTIMIZE PYTHONSAFEPATH
code='import sys; sys.version_info < (3, 11) or print(sys.executable)'
for name in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 "$here/.venv/bin/python"
do
    python="$("$name" -c "$code" 2>/dev/null)"
    [ -z "$python" ] || exec "$python" -P "$here/tools/setup.py" "$@"
    [ -z "$PYTHON" ] || break
done
echo "run.sh: ${PYTHON:-python3} is not Python 3.11 or later: name one with PYTHON=path" >&2
exit 1
