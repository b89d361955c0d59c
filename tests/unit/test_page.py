"""The page in a real headless Chromium: console, numbers against comparison.json, phone width, sorting."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import comparison_results as made
import pytest
from odb_workflow.comparison.analysis import analyze
from odb_workflow.comparison.collect import collect_arm, collect_lengths
from odb_workflow.comparison.draw import draw_all
from odb_workflow.comparison.metrics import BY_KEY
from odb_workflow.comparison.page import example_records, render, resolve
from odb_workflow.comparison.style import themed_svg
from odb_workflow.runtime.files import dump_json
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--virtual-time-budget=4000",
)  # fmt: skip


def browse(page: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a page; returns the DOM after its scripts ran (none with --screenshot) and the console lines."""
    profile = page.parent / "profile"
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    shutil.rmtree(profile, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class Elements(html.parser.HTMLParser):
    """Texts of the elements that carry a path into comparison.json, and all texts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str]] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self._open: tuple[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note paths and addresses."""
        values = dict(attrs)
        if "data-path" in values:
            self._open = (values["data-path"] or "", values["data-value"] or "")
        for name in ("src", "href", "xlink:href"):
            if values.get(name):
                self.addresses.append(values[name] or "")

    def handle_data(self, data: str) -> None:
        """Note texts."""
        self.texts.append(data)
        if self._open is not None:
            self.numbers.append((*self._open, data.strip()))
            self._open = None


@pytest.fixture(scope="module")
def page(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A page of four arms of which one is missing, and the content of its comparison.json."""
    base = tmp_path_factory.mktemp("page")
    root = made.write_run(base / "demo")
    arms = [collect_arm(root, name) for name in ("odb", "standard", "length_grouped", "untrained")]
    comparison = analyze(
        arms, run="demo", reference="standard", scripts=repository / "workflow_scripts",
        study_command="./run.sh study", reproduce_command="./run.sh all",
    )  # fmt: skip
    figures = draw_all(comparison, arms, collect_lengths(root), base / "figures")
    strict = json.loads(dump_json(comparison))
    examples = base / "examples"
    examples.mkdir()
    (examples / "cpu.json").write_text('{"what": "a <b>run</b>", "train_loss": 1.5}')
    (examples / "broken.json").write_text("{")
    text = render(strict, figures, config_text="run: demo  # <script>", examples=example_records(examples))
    (base / "comparison.html").write_text(text, encoding="utf-8")
    return base / "comparison.html", strict


def assert_numbers_agree(text: str, document: dict, at_least: int) -> None:
    """Each element with a path shows the value that the document has there."""
    numbers = Elements(text).numbers
    assert len(numbers) >= at_least
    for path, value, shown in numbers:
        stored = resolve(document, path)
        assert json.loads(value) == stored, path
        if stored is None:
            assert shown in {"missing", "not finite", "–"}, path
            continue
        if shown.startswith("<"):
            assert stored < float(shown[1:]), path
            continue
        digits = shown.replace(",", "").lstrip("+")
        if path.startswith("arms.") and ".metrics." in path:
            expected = BY_KEY[path.rsplit(".", 1)[1]].show(stored).replace(",", "")
            assert digits == expected, path
        else:
            scale = 100 if "mmmu.difference" in path or "reduction" in path or "accuracy" in path else 1
            places = len(digits.partition(".")[2])
            assert float(digits) == pytest.approx(stored * scale, abs=0.5001 * 10**-places), path


def test_numbers_of_the_file(page: tuple[Path, dict]) -> None:
    """Without a browser: what is written agrees, and nothing is loaded from anywhere."""
    path, document = page
    text = path.read_text(encoding="utf-8")
    assert_numbers_agree(text, document, at_least=100)
    assert all(address.startswith(("#", "data:")) for address in Elements(text).addresses)
    assert not re.search(r"url\((?!#)|@import|<link[^>]+stylesheet|<script[^>]+src", text)
    assert "a &lt;b&gt;run&lt;/b&gt;" in text and "# &lt;script&gt;" in text, "texts are escaped"
    assert "not comparable with leaderboards" in " ".join(text.split())
    assert "./run.sh study" in text and "length_grouped" in text


def test_ids_are_unique(page: tuple[Path, dict]) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page[0].read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids))


def test_svg_takes_its_colors_from_the_page() -> None:
    source = (
        '<?xml version="1.0"?><svg width="3pt" id="a"><path style="fill: #1b1f24; stroke: #0072b2"/></svg>'
    )
    assert themed_svg(source, "x") == (
        '<svg id="x-a"><path style="fill: var(--ink, #1b1f24); stroke: var(--arm-0, #0072b2)"/></svg>'
    )


@needs_chromium
def test_page_in_chromium(page: tuple[Path, dict]) -> None:
    path, document = page
    dom, console = browse(path, "--dump-dom")
    assert console == []
    assert_numbers_agree(dom, document, at_least=100)
    assert 'id="theme" type="button">theme: auto' in dom, "the script ran"
    for size, name, flags in (
        ("1280,2400", "desktop", ()),
        ("1280,2400", "dark", ("--blink-settings=preferredColorScheme=0",)),
    ):
        picture = path.parent / f"{name}.png"
        browse(path, f"--window-size={size}", f"--screenshot={picture}", *flags)
        with Image.open(picture) as image:
            assert image.size[0] == 1280
            corner = image.convert("L").getpixel((5, 5))
            assert (corner > 200) == (name == "desktop"), (
                "the ground is light, and dark where that is asked for"
            )


@needs_chromium
def test_console_errors_are_seen(page: tuple[Path, dict]) -> None:
    """The check above would notice an error."""
    broken = page[0].parent / "broken.html"
    broken.write_text(
        page[0].read_text(encoding="utf-8").replace("</body>", "<script>nothing.here()</script></body>")
    )
    assert len(browse(broken, "--dump-dom")[1]) == 1


@needs_chromium
def test_sorting_and_phone_width(page: tuple[Path, dict]) -> None:
    """A heading sorts, missing values last; at 390 pixels the page itself does not scroll sideways."""
    text = page[0].read_text(encoding="utf-8")
    probe = """<script>
    var heads = document.querySelectorAll("#arms-table thead th button"), found = [];
    [1, 1, 0].forEach(function (column) {
      heads[column].click();
      found.push(Array.from(document.querySelectorAll("#arms-table tbody tr b")).map(function (b) {
        return b.textContent; }).join(" "));
    });
    var root = document.documentElement;
    parent.postMessage(JSON.stringify({orders: found, width: root.clientWidth, wide: root.scrollWidth}), "*");
    </script></body>"""
    (page[0].parent / "inner.html").write_text(text.replace("</body>", probe), encoding="utf-8")
    outer = page[0].parent / "outer.html"
    outer.write_text(
        '<body><script>addEventListener("message", function (e) { document.body.dataset.found = e.data; });'
        '</script><iframe src="inner.html" style="width:390px;height:800px;border:0"></iframe></body>'
    )
    dom, console = browse(outer, "--dump-dom")
    assert console == []
    match = re.search(r'data-found="([^"]+)"', dom)
    assert match, dom[:500]
    found = json.loads(match.group(1).replace("&quot;", '"'))
    assert found["orders"][0] == "odb standard length_grouped untrained"
    assert found["orders"][1] == "standard odb length_grouped untrained"
    assert found["orders"][2] == "length_grouped odb standard untrained"
    assert found["width"] == 390 and found["wide"] <= 390


def test_the_headline_says_better_or_worse_as_the_sentence_does(page: tuple[Path, dict]) -> None:
    path, document = page
    text = path.read_text(encoding="utf-8")
    tiles = re.findall(r'<div class="tile">.*?</div>', text, re.DOTALL)
    verdicts = [
        block["sentence"].partition(":")[0]
        for item in document["differences"]
        if item["arm"] != "untrained"
        for block in (item["validation_loss"], item["mmmu"])
    ]
    assert verdicts
    for verdict, tile in zip(verdicts, [tile for tile in tiles if "difference</span>" in tile], strict=True):
        assert f'<span class="soft">{verdict}</span>' in tile


def test_windows_and_published_losses_are_explained(page: tuple[Path, dict]) -> None:
    text = " ".join(page[0].read_text(encoding="utf-8").split())
    assert "up to ten pieces of about equal time" in text
    assert "as published, kind not stated" in text
