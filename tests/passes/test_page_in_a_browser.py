"""The page of a report in a real browser, headless: where things are at 1400 px, and what is painted.

Skipped only where there is no browser; `test_page.py` checks the structure everywhere.
"""

import html
import json
import re
import shutil
import subprocess
import zlib
from itertools import pairwise

import pytest

from inductor_passes.base import Refused
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break
from tests.passes.test_page import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser on PATH: looked for {', '.join(BROWSERS)}"
)

WIDTH, HEIGHT = 1400, 1000
# Written into a copy of the page: what a reader would measure.
MEASURE = """
<script>
const box = each => { const r = each.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
const spills = [...document.querySelectorAll("svg g")].filter(group => {
  const rect = box(group.querySelector("rect"));
  return [...group.querySelectorAll("text")].some(text => box(text)[2] > rect[2] || box(text)[3] > rect[3] + 1);
});
document.body.innerHTML = "<pre id='found'>" + JSON.stringify({
  width: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight,
  verdict: box(document.querySelector(".verdict")),
  figures: [...document.querySelectorAll("figure")].map(box),
  sections: [...document.querySelectorAll("section")].map(box),
  smallest: Math.min(...[...document.querySelectorAll("svg text")].map(
    each => parseFloat(getComputedStyle(each).fontSize) * each.getCTM().a)),
  spills: spills.map(each => each.textContent),
}) + "</pre>";
</script>
"""


def run(page, tmp_path, *options):
    flags = [
        *(
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
        ),
        *(
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ),
    ]
    place = (f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={WIDTH},{HEIGHT}")
    command = [BROWSER, *flags, *place, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measured(given, tmp_path):
    page = given.to_html(tmp_path / "page.html")
    page.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    (found,) = re.findall(r"<pre id=\"found\">(.*?)</pre>", run(page, tmp_path, "--dump-dom"), re.S)
    return json.loads(html.unescape(found))


def troubled(number):
    name = "model.layers.1.mlp"
    long = "the input of gemm_combine comes from gated_activation, not from gather_gemm_act, " * 3
    return report(
        number,
        refused=(Refused(name, "fused_moe_1", long), Refused("model.layers.2.mlp", "combine_26", "no")),
        graph_breaks=(
            Break("print", "/a/very/long" * 20 + "/model.py:7 in forward", "print(x)" * 40, (name,)),
        ),
        capture_hazards=(Hazard("item", "aten.item", "its output is read on the host", name),),
    )


@pytest.mark.parametrize("given", [report(1), report(2), report(12), report(48), troubled(48)])
def test_everything_is_within_the_width_and_side_by_side(given, tmp_path):
    found = measured(given, tmp_path)
    assert found["width"] <= WIDTH
    assert found["verdict"][1] < 100 and found["verdict"][3] < 250
    for before, after in zip(found["figures"][::2], found["figures"][1::2], strict=True):
        assert before[1] == after[1] and before[2] <= after[0] and after[2] <= WIDTH
        assert before[2] - before[0] > 0.4 * WIDTH
    assert not found["spills"] and found["smallest"] >= 10.5
    assert all(above[3] <= below[1] for above, below in pairwise(found["sections"]))


def test_forty_eight_layers_are_one_screen_and_a_bit(tmp_path):
    assert measured(report(48), tmp_path)["height"] < 1.3 * HEIGHT


def pixels(png, rows):
    """The first rows of a screenshot, which is RGB or RGBA with 8 bits, as tuples."""
    data, at, packed = png.read_bytes(), 8, b""
    width, _, depth, kind = _header(data)
    size = {2: 3, 6: 4}[kind]
    assert depth == 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        packed += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    raw, stride, above, found = zlib.decompress(packed), width * size, bytes(width * size), []
    for row in range(rows):
        line = raw[row * (stride + 1) : (row + 1) * (stride + 1)]
        above = _unfiltered(line[0], bytearray(line[1:]), above, size)
        found.append([tuple(above[x : x + 3]) for x in range(0, stride, size)])
    return found


def _header(data):
    numbers = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    return *numbers, data[24], data[25]


def _unfiltered(kind, line, above, size):
    for x in range(len(line)):
        left, up = line[x - size] if x >= size else 0, above[x]
        corner = above[x - size] if x >= size else 0
        guess = (0, left, up, (left + up) // 2, _nearest(left, up, corner))[kind]
        line[x] = (line[x] + guess) & 255
    return bytes(line)


def _nearest(left, up, corner):
    return min((left, up, corner), key=lambda each: abs(left + up - corner - each))


@pytest.mark.parametrize(
    ("given", "colour"),
    [(report(48), (230, 245, 236)), (troubled(12), (253, 242, 220))],
    ids=["good", "warn"],
)
def test_a_screenshot_shows_the_verdict_in_its_colour(given, colour, tmp_path):
    page, picture = given.to_html(tmp_path / "page.html"), tmp_path / "page.png"
    run(page, tmp_path, f"--screenshot={picture}")
    assert _header(picture.read_bytes())[:2] == (WIDTH, HEIGHT)
    seen = pixels(picture, 110)
    assert seen[109].count(colour) > 0.7 * WIDTH
    assert seen[5].count((255, 255, 255)) == WIDTH  # nothing at the edge
