"""Every source path that the documentation names exists, and no page was left in the middle of a merge."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = "auditor|benchmarks|build|clients|docker|gateway|launcher|model_repository|orchestrator|runtime|tests|tools"
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "build" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()]
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(missing)}"
