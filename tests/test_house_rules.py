"""What is said of the code holds: modules named in the documents exist, files stay small, names say something."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kvtransfer", "router", "cluster", "deploy", "bench")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LONGEST_FILE_LINES = 400
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED_MODULE = re.compile(r"`((?:engine|kvtransfer|router|cluster|deploy|bench)/[\w/]+\.(?:py|yaml))`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def test_every_module_named_in_the_architecture_exists_and_every_module_is_named() -> None:
    named = set(NAMED_MODULE.findall((ROOT / "docs" / "architecture.md").read_text()))
    existing = {str(path.relative_to(ROOT)) for path in MODULES}
    assert named <= existing
    unnamed = {m for m in existing - named if not m.endswith("__init__.py") and not m.startswith("cluster/api/")}
    assert unnamed - {"engine/weights/model_files.py", "engine/weights/errors.py"} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_in_documents_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_files_are_small_and_named_after_something() -> None:
    assert [path.name for path in MODULES if len(path.read_text().splitlines()) > LONGEST_FILE_LINES] == []
    assert [path.name for path in MODULES if path.stem in EMPTY_NAMES] == []


def test_nothing_can_be_unpickled() -> None:
    forbidden = re.compile(
        r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal)\b|torch\.load\(|yaml\.load\(", re.M
    )
    assert [path.name for path in MODULES if forbidden.search(path.read_text())] == []
