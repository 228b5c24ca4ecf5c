"""All odd values for each flag of each script, and for each word of each tool."""

import pytest

import script
from test_odd_values import ODD, TOOLS, try_runs, try_script, try_tool


@pytest.mark.parametrize("path", script.of_project(), ids=lambda path: path.stem)
def test_all_odd_values_of_a_script_s_flags(path, capsys, monkeypatch, elsewhere):
    try_script(path, len(ODD), capsys, monkeypatch)


def test_odd_values_of_flags_in_runs(tmp_path, capsys, monkeypatch):
    """Eight for each flag: all of them take half an hour."""
    try_runs(tmp_path, 8, capsys, monkeypatch)


@pytest.mark.parametrize("tool", TOOLS)
def test_all_odd_words_of_a_tool(tool, capsys, monkeypatch, trained, elsewhere):
    try_tool(tool, len(ODD), capsys, monkeypatch, trained)
