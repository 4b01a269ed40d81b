"""Pictures of docs/pictures and files of the example, from one real run of the demo: its terminal,
report and dashboard; and the fingerprint of the texts that they show.

python docs/make_pictures.py
    # runs the demo (a few minutes), then creates all of them
    python docs/make_pictures.py --keep FOLDER
        # keeps the run there; a FOLDER with a run is used again

The terminal is drawn from the bytes that the run wrote to a terminal. Lines are omitted in one
place, which states their number.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyte
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
EXAMPLE = ROOT / "examples" / "tiny-qwen2-on-a-cpu"
COMMAND = (
    "autotune run --model .demo/model --gpus cpu --space demo --global-batch 64"
    " --memory-limit 1150M --budget 4m"
)
SHAPE = "--hidden 64 --heads 2 --kv-heads 2 --intermediate 128 --layers 8 --vocab 512"
COLUMNS, LINES = 116, 400
LANDMARKS = ("candidates; at most", "recommended", "Confirmed by", "Written:")
"""Beginnings of the parts of the output that the picture contains."""

FINGERPRINTS = PICTURES / "texts.json"
"""Hashes of the texts of the program that the pictures show: a test compares them with those of
today's program, so that a picture of other texts is noticed.
"""

LARGEST_BYTES = 300_000
FLAGS = ("--no-sandbox", "--disable-gpu", "--force-device-scale-factor=1")
TERMINAL, REPORT, REPORT_DARK, PHONE, DASHBOARD, TRIAL = (
    f"{name}.{kind}"
    for name, kind in (
        ("terminal", "svg"),
        ("report", "png"),
        ("report-dark", "png"),
        ("report-phone", "png"),
        ("dashboard", "png"),
        ("dashboard-trials", "png"),
    )
)
NAMES = (TERMINAL, REPORT, REPORT_DARK, PHONE, DASHBOARD, TRIAL)


def run_demo(folder: Path) -> bytes:
    """Return every byte that the demo wrote to a terminal of COLUMNS columns."""
    subprocess.run(
        [sys.executable, "-m", "autotune.worker.synthetic", *SHAPE.split(), ".demo/model"],
        cwd=folder,
        check=True,
    )
    # The demo measures anew, whatever this machine measured before: it gets a record of its own.
    settings = {
        "COLUMNS": str(COLUMNS),
        "TERM": "xterm-256color",
        "XDG_DATA_HOME": str(folder / "record"),
        "HF_HUB_OFFLINE": "1",
    }
    there = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **settings}
    there["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{there['PATH']}"
    there.pop("NO_COLOR", None)
    parent, child = pty.openpty()
    with subprocess.Popen(
        [*COMMAND.split(), "--out", "demo-out"], cwd=folder, env=there, stdout=child, stderr=child
    ) as process:
        os.close(child)
        written = b"".join(_read(parent))
    if process.returncode != 0:
        raise SystemExit(
            f"the demo ended with {process.returncode}:\n{written.decode(errors='replace')}"
        )
    return written


def _read(terminal: int) -> Iterator[bytes]:
    # A terminal whose other end was closed answers with an error instead of an end.
    with contextlib.suppress(OSError):
        while block := os.read(terminal, 65536):
            yield block


def lines_of(written: bytes, folder: Path) -> list[Text]:
    """Return the final content of the terminal, including its scrollback."""
    # Where the run happened to lie says nothing.
    written = written.replace(f"sqlite:///{folder}/".encode(), b"sqlite:///")
    screen = pyte.Screen(COLUMNS, LINES)
    pyte.ByteStream(screen).feed(written)
    lines = [_styled(screen.buffer[number]) for number in range(LINES)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def _styled(row: Mapping[int, pyte.screens.Char]) -> Text:
    line = Text()
    for (colour, bold), cells in itertools.groupby(
        (row[column] for column in range(COLUMNS)), lambda cell: (cell.fg, cell.bold)
    ):
        named = (
            None
            if colour == "default"
            else colour.replace("bright", "bright_").replace("brown", "yellow")
        )
        line.append("".join(cell.data for cell in cells), Style(color=named, bold=bold or None))
    line.rstrip()
    return line


def shortened(lines: Sequence[Text], kept: Sequence[range]) -> list[Text]:
    """These lines, and between them how many are not shown."""
    shown: list[Text] = []
    for number, part in enumerate(kept):
        if number:
            left_out = part.start - kept[number - 1].stop
            shown += [Text(), Text(f"  ... {left_out} lines ...", style="dim"), Text()]
        shown += [lines[index] for index in part]
    return shown


def draw_terminal(written: bytes, folder: Path, to: Path) -> None:
    lines = lines_of(written, folder)
    where = {
        word: next(number for number, line in enumerate(lines) if word in line.plain)
        for word in LANDMARKS
    }
    head, table, words, end = where.values()
    kept = (range(head + 8), range(table, words + 1), range(end, len(lines)))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (COMMAND, "bold")))
    for line in shortened(lines, kept):
        console.print(line, soft_wrap=True, crop=False)
    drawn = console.export_svg(title="autotune run", clear=False)
    # No font is fetched from anywhere: where Fira Code is not installed, the viewer's own
    # monospaced one is taken.
    to.write_text(re.sub(r"@font-face\s*\{.*?\}", "", drawn, flags=re.DOTALL))


@contextlib.contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "autotune", "dashboard", "demo-out", "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def draw_pages(folder: Path) -> None:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        report = (folder / "demo-out" / "report.html").as_uri()
        _draw(browser, report, PICTURES / REPORT, dark=False, ready=_report_is_drawn)
        _draw(browser, report, PICTURES / REPORT_DARK, dark=True, ready=_report_is_drawn)
        _draw(browser, report, PICTURES / PHONE, dark=False, ready=_report_is_drawn, width=390)
        with dashboard(folder) as url:
            _draw(
                browser,
                f"{url}/studies/1",
                PICTURES / DASHBOARD,
                dark=False,
                ready=_dashboard_is_drawn,
                height=2050,
            )
            trial = f"{url}/studies/1/trials?numbers={_most_telling(folder)}"
            _draw(
                browser,
                trial,
                PICTURES / TRIAL,
                dark=False,
                ready=lambda page: _trial_is_drawn(page, folder),
            )
        browser.close()


def _most_telling(folder: Path) -> int:
    """The trial that ran out of memory, where one did."""
    trials = json.loads((folder / "demo-out" / "recommendation.json").read_text())["trials"]
    return next((int(trial["trial"]) for trial in trials if trial["outcome"].startswith("oom")), 0)


def _places(folder: Path) -> list[tuple[str, str]]:
    """Return the paths of this run and its programs with their replacements."""
    written = folder / "demo-out"
    return [
        (f"sqlite:///{written}", "sqlite:///."),
        (str(written), "."),
        (f"{folder}/", ""),
        (sys.prefix, ".venv"),
        (f"{ROOT}/", ""),
    ]


REPLACE = """(places) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode())
    for (const [there, here] of places) {
      const text = texts.currentNode;
      text.nodeValue = text.nodeValue.replaceAll(there, here);
    }
}"""


def renew_example(folder: Path) -> None:
    """Copy the files of this run, with paths as seen from the example's folder; its own README
    stays.
    """
    written = folder / "demo-out"
    for name in (
        "recommendation.json",
        "recommended.yaml",
        "accelerate.yaml",
        "launch.sh",
        "placeholder/train.jsonl",
    ):
        text = (written / name).read_text()
        for there, here in _places(folder):
            text = text.replace(there, here)
        (EXAMPLE / name).write_text(text)


def _draw(
    browser: Browser,
    url: str,
    to: Path,
    *,
    dark: bool,
    ready: Callable[[Page], None],
    width: int = 1100,
    height: int = 1500,
) -> None:
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page.set_default_timeout(180_000)
    page.goto(url)
    ready(page)
    page.screenshot(path=str(to))
    page.close()


def _report_is_drawn(page: Page) -> None:
    page.wait_for_selector("body[data-drawn]")
    _is_quiet(page)


def _dashboard_is_drawn(page: Page) -> None:
    # It asks again every few seconds, so that its network is never idle for long.
    page.wait_for_function("document.body.innerText.length > 400")
    page.wait_for_timeout(6000)


def _trial_is_drawn(page: Page, folder: Path) -> None:
    _dashboard_is_drawn(page)
    page.evaluate(REPLACE, _places(folder))


def _is_quiet(page: Page) -> None:
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(2500)


def fingerprints() -> dict[str, str]:
    """Return a hash of the words that a small search on a simulated machine shows, for the
    terminal and for the page. Figures, paths and the order of the probes have no effect.
    """
    sys.path.insert(0, str(ROOT))
    from tests.report.shown_texts import page_text, terminal_text

    hashes = {}
    for kind, text in (("terminal", terminal_text()), ("report", page_text())):
        words = sorted(set(re.findall(r"[A-Za-z]{3,}", text)))
        hashes[kind] = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
    return hashes


def write_fingerprints() -> None:
    FINGERPRINTS.write_text(json.dumps(fingerprints(), indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="where the run is kept, or lies already"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / "terminal.bytes"
        if not written.exists():
            written.write_bytes(run_demo(folder))
        PICTURES.mkdir(exist_ok=True)
        draw_terminal(written.read_bytes(), folder, PICTURES / TERMINAL)
        draw_pages(folder)
        renew_example(folder)
        write_fingerprints()
    for picture in (PICTURES / name for name in NAMES):
        size = picture.stat().st_size
        print(f"{picture.relative_to(ROOT)}  {size / 1000:.0f} kB")
        if size > LARGEST_BYTES:
            raise SystemExit(f"{picture} is larger than {LARGEST_BYTES} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
