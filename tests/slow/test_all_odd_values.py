"""All odd values for each flag of each script and for each word of each tool."""

import pytest

from test_odd_values import (
    ODD,
    test_odd_values_of_a_script_s_flags,  # noqa: F401
    test_odd_words_of_a_tool,  # noqa: F401
)


@pytest.fixture
def count() -> int:
    return len(ODD)
