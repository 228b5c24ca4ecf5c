"""Draw what a terminal showed as an SVG, such as README's picture of the demo.

    script -qec "stty cols 100 rows 30; ./run.sh" run.typescript    # records the terminal (Linux)
    .venv/bin/python data/draw_terminal.py run.typescript data/demo.svg "$ ./run.sh" \\
        "no GPU" "parameters:" "step:0" "step:160" " 200/320, loss" "step:320"

It draws the command, and the last line that holds each of the other texts, in their order. A line
of a progress bar ends where the bar is drawn anew.
"""

import re
import sys
from html import escape
from pathlib import Path

SIZE, ADVANCE, LEADING = 13, 7.83, 19  # of a letter in pixels: height, width, and that of a line
MARGIN = 14
BEGINNING = """<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}">
<rect width="100%" height="100%" rx="6" fill="#15191f"/>
<g font-family="monospace" font-size="{size}" fill="#d8dee6" xml:space="preserve">
"""


def draw(lines: list[str]) -> str:
    """Return an SVG of lines. Each has the width of its letters, whatever the reader's font is."""
    width = 2 * MARGIN + ADVANCE * max(map(len, lines))
    svg = BEGINNING.format(width=width, height=2 * MARGIN + LEADING * len(lines), size=SIZE)
    for i, line in enumerate(lines):
        place = f'x="{MARGIN}" y="{MARGIN + LEADING * (i + 0.75):.0f}"'
        svg += f'<text {place} textLength="{ADVANCE * len(line):.0f}">{escape(line)}</text>\n'
    return f"{svg}</g>\n</svg>\n"


def main() -> None:
    """Draw the lines that the command line names. ValueError if one was not shown."""
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    typescript, out, command, *texts = sys.argv[1:]
    shown = Path(typescript).read_text("utf-8", errors="replace")
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown))  # without colors
    lines = [command]
    for text in texts:
        found = [line for line in shown if text in line]
        if not found:
            raise ValueError(f"{typescript} has no line with {text!r}")
        lines.append(found[-1].rstrip())
    Path(out).write_text(draw(lines), "utf-8")


if __name__ == "__main__":
    main()
