"""run.sh really installs, by venv and pip: small packages with the names of large ones."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import zipfile

from runs import HANGS
from train_gpt import HERE

REQUIRED = {"requirements.txt": "torch==2.13.0\n", "tools/requirements.txt": "scipy<2\n"}
CODE = "import sys, torch; print('started by', sys.prefix, 'with torch of', torch.__file__)"


def test_a_machine_without_torch_is_set_up_once_and_lends_its_torch(tmp_path):
    """Two commands begin at once, after another was interrupted. Then .venv gets what more a
    command needs, and its torch is lent to another project."""
    for package in ("torch-2.13.0", "scipy-1.17.1"):
        with zipfile.ZipFile(tmp_path / f"{package}-py3-none-any.whl", "w") as wheel:
            name, version = package.split("-")
            info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{package}.dist-info/METADATA", info)
            wheel.writestr(f"{package}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{package}.dist-info/RECORD", "")
    one, two = tmp_path / "one [1]", tmp_path / "two"
    for project in (one, two):
        (project / "tools").mkdir(parents=True)
        for name in ("run.sh", "tools/setup.py"):
            shutil.copy(HERE / name, project / name)
        files = REQUIRED | {"tools/launch.py": CODE, "tools/machine.py": CODE}
        for name, text in files.items():
            (project / name).write_text(text)
    # A python3 of this version that has no packages.
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", tmp_path / "base"])
    env = {"PATH": f"{tmp_path}/base/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}

    def begin(project, *words: str, **variables: str) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [project / "run.sh", *words]
        return subprocess.Popen(command, env=env | variables, process_group=0, **options)

    def end(process: subprocess.Popen) -> tuple[str, str]:
        out, err = process.communicate(timeout=HANGS)
        assert process.returncode == 0, err
        return out, err

    interrupted = begin(one, "setup")
    while "installing" not in interrupted.stderr.readline():
        assert interrupted.poll() is None
    os.killpg(interrupted.pid, signal.SIGINT)
    assert interrupted.wait(HANGS) == -signal.SIGINT
    with open(one / ".run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [begin(one, "setup"), begin(one, "--seed", "3")]
        for process in both:
            assert "waiting for another run.sh" in process.stderr.readline()
    ended = [end(process) for process in both]
    assert sum("installing torch" in err for _, err in ended) == 1
    torch = f"with torch of {one}/.venv/lib/"
    assert all(out.startswith(f"started by {one}/.venv {torch}") for out, _ in ended)
    assert "installing scipy" in end(begin(one, "--runs=2"))[1]
    assert end(begin(one, "--runs=2"))[1] == end(begin(one, "--seed", "3"))[1] == ""

    lender = f"{one}/.venv/bin/python"
    assert end(begin(two, "setup", PYTHON=lender))[0].startswith(f"started by {one}/.venv {torch}")
    subprocess.run([lender, "-m", "pip", "uninstall", "-qy", "scipy"], check=True)
    out, _ = end(begin(two, "--runs=2", PYTHON=lender))
    assert out.startswith(f"started by {two}/.venv {torch}")
