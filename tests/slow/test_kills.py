"""Twenty kills and twenty SIGTERMs, each with a resume."""

import os
import subprocess
import sys

from conftest import ROOT


def test_twenty_stops_of_each_kind_change_no_bit():
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "test_resume.py")]
    command += ["-k", "random_moments"]
    done = subprocess.run(command, env=os.environ | {"KILLS": "20"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
