"""The README's picture of a run's report, from a real run: python benchmarks/report_picture.py out/pretrain

Needs Chromium (`make test-pages` installs what else it needs).
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from hf_memopt.reports.run_report import write_run_report

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "report.png"


def main(folder: str) -> None:
    page = write_run_report(folder)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": 980, "height": 1180})
        shown.goto(page.resolve().as_uri())
        PICTURE.parent.mkdir(exist_ok=True)
        shown.screenshot(path=PICTURE)
        browser.close()
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main(*sys.argv[1:])
