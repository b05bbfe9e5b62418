"""Build the sdist, the wheel from it, install that wheel without its dependencies and import every module.

The bare environment borrows the dependencies of the one that runs this, but not the project: what is missing in the
wheel is missed. A script of its own, because building takes longer than a test should.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

KINDS = (".py", ".cpp")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, timeout=600)


def sources() -> list[str]:
    """Files of the package as the links in ``src`` lay it out."""
    source = ROOT / "src"
    return [
        str((Path(folder) / name).relative_to(source))
        for folder, _, names in os.walk(source, followlinks=True)
        for name in names
        if name.endswith(KINDS)
    ]


def module_name(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", place, ROOT)
        (wheel,) = place.glob("*.whl")
        packed = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(KINDS)]
        modules = sorted(module_name(name) for name in packed if name.endswith(".py"))
        difference = set(sources()) ^ set(packed)
        assert not difference, f"the wheel lacks, or has too many: {sorted(difference)}"
        run(sys.executable, "-m", "venv", place / "bare")
        python = place / "bare" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        (site,) = (place / "bare" / "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        empty = place / "empty"
        empty.mkdir()
        check = (
            "import importlib, sys; root = importlib.import_module('splitserve').__file__;"
            f"assert root.startswith({str(site)!r}), root;"
            f"[importlib.import_module(name) for name in {modules!r}]; print(len({modules!r}), 'modules imported')"
        )
        run(python, "-c", check, cwd=empty)


if __name__ == "__main__":
    main()
