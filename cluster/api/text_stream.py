"""From tokens to text: detokenise, look for stop strings, count.

The only place where tokens become text, so a character or a stop string that spans tokens, steps or workers needs no
care anywhere else.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from splitserve.cluster.api.errors import InternalError, WorkerLost
from splitserve.cluster.api.service import Tokens
from splitserve.engine.detokenizer import Decoder, IncrementalDetokenizer
from splitserve.engine.protocol import FinishReason
from splitserve.engine.stop_strings import StopStrings


class TextStream:
    """The text of one request. Iterate ``pieces`` once; the other attributes are final when it has ended.

    ``completion_tokens`` counts up to and including the token that completed a stop string, also where more had
    already been computed: it depends on the text, not on timing.
    """

    def __init__(
        self,
        tokens: AsyncGenerator[Tokens, None],
        tokenizer: Decoder,
        stops: Sequence[str] = (),
        follows: Sequence[int] = (),
    ) -> None:
        """``follows`` are tokens whose text this one goes on from: a blank at its beginning counts then."""
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None  # "stop" or "length"
        self._tokens = tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, follows)
        self._stops = StopStrings(stops) if stops else None

    async def pieces(self) -> AsyncGenerator[str, None]:
        """New text, never empty. Ends with ``finish_reason`` set, or raises ``ApiError``: there is no third way.

        Closes the tokens' generator on every path, which aborts a request that still runs (a stop string was found,
        the reader left).
        """
        async with aclosing(self._tokens) as items:
            async for item in items:
                if item.cached_tokens is not None:
                    self.cached_tokens = item.cached_tokens
                text = self._push(item.token_ids)
                if self.finish_reason is None and item.finish is not None:
                    self._check_finish(item.finish)
                    text += self._flush()
                    self.finish_reason = self.finish_reason or item.finish.value
                if text:
                    yield text
                if self.finish_reason is not None:
                    return
        raise InternalError("The generation ended without a reason.")

    def _push(self, token_ids: list[int]) -> str:
        if self._stops is None:
            self.completion_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        return self._search(self._detokenize_each(token_ids))

    def _detokenize_each(self, token_ids: list[int]) -> Iterable[str]:
        for token_id in token_ids:
            self.completion_tokens += 1
            yield self._detokenizer.push([token_id])

    def _flush(self) -> str:
        if self._stops is None:
            return self._detokenizer.flush()
        text = self._search([self._detokenizer.flush()])
        return text if self.finish_reason else text + self._stops.flush()

    def _search(self, pieces: Iterable[str]) -> str:
        """What may be sent of ``pieces``; ends at a stop string, which also sets ``finish_reason``."""
        assert self._stops is not None
        found = ""
        for piece in pieces:
            if not piece:
                continue
            scanned = self._stops.push(piece)
            found += scanned.emit
            if scanned.matched is not None:
                self.finish_reason = FinishReason.STOP.value
                break
        return found

    @staticmethod
    def _check_finish(finish: FinishReason) -> None:
        if finish is FinishReason.ABORT:
            raise WorkerLost("The request was aborted before it was complete.")
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            raise InternalError
