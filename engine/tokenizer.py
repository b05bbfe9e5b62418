"""Text to tokens and back, through the tokenizer that belongs to a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError as JinjaError

from splitserve.engine.token_bytes import TokenBytes
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.location import TOKENIZER_FILES, locate


class TemplateError(Exception):
    """The model's chat template refuses these messages. The message is the template's own sentence."""


class Tokenizer:
    """A fast Hugging Face tokenizer. Safe to call from several threads: nothing here changes its settings."""

    def __init__(self, pretrained: Any) -> None:
        """``pretrained`` is a transformers tokenizer with a Rust backend. Raises ModelLoadError for any other, and for
        one whose text is not its tokens' bytes joined.
        """
        backend = getattr(pretrained, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(
                f"{type(pretrained).__name__} has no Rust backend, which is needed to tokenise in threads"
            )
        backend.no_truncation()
        backend.no_padding()
        self._pretrained = pretrained
        self._backend = backend
        self.vocab_size: int = len(pretrained)  # with added tokens
        self.special_token_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self._bytes = TokenBytes(backend, self.special_token_ids)
        eos = pretrained.eos_token_id
        self.eos_token_ids = frozenset[int]() if eos is None else frozenset([int(eos)])

    @property
    def has_chat_template(self) -> bool:
        return self._pretrained.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens that the tokenizer adds by itself (such as a
        beginning-of-sequence).
        """
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins.

        ``messages`` have ``role`` and ``content`` (text). Raises TemplateError when there is no template or it refuses
        them.
        """
        if not self.has_chat_template:
            raise TemplateError("this model has no chat template; use completions")
        try:
            text: str = self._pretrained.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (JinjaError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(str(error)) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out. Ids outside the vocabulary are left out, too."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that has begun, in UTF-8; need not be whole characters. Empty for a special token
        and outside the vocabulary.
        """
        return self._bytes.within(token_id)

    def first_token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that begins with it: ``token_bytes``, with some tokenizers less a space."""
        return self._bytes.first(token_id)

    def id_to_piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None outside the vocabulary. Not text."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of what ``weights.open_model`` opens by the same word; takes seconds, reads no weights.

    Raises ModelLoadError.
    """
    # Imported here, because workers use this package and must not pay seconds and memory for transformers (which in
    # turn imports torch wherever it is installed).
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = locate(model, TOKENIZER_FILES)
    try:
        if place.is_file():
            # AutoTokenizer would first read the model's config from the file, which takes ten times as long as this.
            pretrained = PreTrainedTokenizerFast.from_pretrained(
                str(place.parent), gguf_file=place.name, local_files_only=True
            )
        else:
            pretrained = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise ModelLoadError(f"{place} holds no tokenizer that can be loaded: {error}") from error
    return Tokenizer(pretrained)
