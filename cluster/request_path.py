"""The way of a request: place, prefill, hand over, decode.

::

                          ┌── EXPECT ──first token, proceed──┐
                    early │    │                             ▼
    place ──▶ PREFILL ──ticket─│──── first token ────────▶ DECODE ──▶ done
      │          │             └─ lost, no room ─┘           ▲ │
      │          └── ended with its first token ──▶ done     │ │
      └── nobody prefills ───────────────────────────────────┘ │
      ▲                                                        │
      └── a leg was lost: the tokens so far become part of the prompt, and the request is placed anew

A prompt that takes a while is offered by an early ticket, before its first token: the decode worker then fetches its
pages while the rest is computed (EXPECT). That leg can only save time. Should it end without a token, the request goes
on with the ticket that comes with the first token, as one does that was never offered early.

What may live here: the order of these phases and who cleans up after each. Choosing workers is ``router.placement``,
talking to them ``worker_link``, text the API's.
"""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from random import Random

from msgspec.structs import replace

from splitserve.cluster.api.errors import NoWorker, WorkerLost
from splitserve.cluster.api.service import Tokens
from splitserve.cluster.leg import Leg, LegLost
from splitserve.cluster.settings import GatewaySettings
from splitserve.cluster.telemetry import Telemetry
from splitserve.cluster.worker_link import WorkerLink
from splitserve.cluster.worker_links import WorkerLinks
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.protocol import FinishReason, Request, RequestId, SamplingParams, SequenceUpdate, WorkerId
from splitserve.router.load_view import LoadView
from splitserve.router.placement import NobodyThere, Placement, place

logger = logging.getLogger("ray.serve")

RETRY_AFTER_S = 5.0


class RequestPath:
    """Takes requests from prompt tokens to output tokens. One for all requests of a gateway."""

    def __init__(
        self, links: WorkerLinks, view: LoadView, hasher: PageHasher, settings: GatewaySettings, telemetry: Telemetry
    ) -> None:
        self._links = links
        self._view = view
        self._hasher = hasher
        self._settings = settings
        self._telemetry = telemetry
        self._rng = Random()

    async def run(self, prompt: Sequence[int], sampling: SamplingParams) -> AsyncGenerator[Tokens, None]:
        """All tokens of one request; the last item has ``finish``. Closing it ends what runs for the request anywhere.

        Raises NoWorker and WorkerLost, before or after the first item.
        """
        name = secrets.token_hex(8)
        original = Request(RequestId(name), tuple(prompt), self._hasher.chain(prompt), sampling)
        drawn: list[int] = []
        loss: LegLost | None = None
        for attempt in range(self._settings.attempts):
            request = replace(self._advanced(original, drawn), request_id=RequestId(f"{name}-{attempt}"))
            try:
                placement = await self._place(request)
                if attempt:
                    self._telemetry.recovered.inc()
                async with aclosing(self._attempt(request, placement)) as items:
                    async for tokens in items:
                        # What a later worker finds in its cache was not saved on the client's prompt.
                        yield dataclasses.replace(tokens, cached_tokens=None) if drawn else tokens
                        if tokens.finish is not None:
                            return
                        drawn += tokens.token_ids
            except LegLost as lost:
                loss = lost
        raise WorkerLost(f"The request was lost on its way {self._settings.attempts} times, at last because: {loss}.")

    async def _place(self, request: Request) -> Placement:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._settings.placement_wait_s
        while True:
            try:
                return place(request.page_hashes, len(request.prompt), self._view, self._rng)
            except NobodyThere:
                left_s = deadline - clock()
                if left_s <= 0:
                    raise NoWorker("No worker is ready at the moment.", retry_after_s=RETRY_AFTER_S) from None
                await self._links.wait_for_change(left_s)

    async def _attempt(self, request: Request, placement: Placement) -> AsyncGenerator[Tokens, None]:
        if placement.prefill is None:
            with self._leg(placement.decode, request, lambda link: link.decode(request, None)) as leg:
                async for tokens in self._tokens(leg):
                    yield tokens
            return

        with ExitStack() as legs:
            update, early = await self._prefill(request, placement, legs)
            first = tokens_of(update)
            if update.finish is not FinishReason.HANDED_OVER:
                yield first
                return

            following, ticket = self._advanced(request, update.tokens), update.ticket
            with self._lease(placement.prefill, request.request_id) as lease:
                if early is None:
                    decode = self._leg(placement.decode, following, lambda link: link.decode(following, ticket))
                    leg = legs.enter_context(decode)
                else:
                    leg = early
                    self._proceed(placement.decode, leg, following)
                yield first
                try:
                    async for tokens in self._tokens(leg):
                        lease.ended = True
                        yield tokens
                    return
                except LegLost as lost:
                    if early is None or lease.ended:
                        raise
                    logger.info("request %s goes on with its final ticket: %s", request.request_id, lost)
                legs.close()

                # Another name: what is still said of the leg before must not be taken for this one's.
                again = replace(following, request_id=RequestId(f"{request.request_id}-final"))
                worker = (await self._place(again)).decode
                with self._leg(worker, again, lambda link: link.decode(again, ticket)) as leg:
                    async for tokens in self._tokens(leg):
                        lease.ended = True
                        yield tokens

    async def _prefill(
        self, request: Request, placement: Placement, legs: ExitStack
    ) -> tuple[SequenceUpdate, Leg | None]:
        """The prefill worker's last word, and the leg that has been fetching pages meanwhile, which ``legs`` owns."""
        assert placement.prefill is not None
        early: Leg | None = None
        with self._leg(placement.prefill, request, lambda link: link.prefill(request)) as leg:
            update = await leg.next(self._settings.token_wait_s)
            while update.finish is None:
                if early is None and update.ticket is not None:
                    early = self._expect(placement.decode, request, update.ticket, legs)
                update = await leg.next(self._settings.token_wait_s)
        return update, early

    def _expect(self, worker: WorkerId, request: Request, ticket: bytes, legs: ExitStack) -> Leg | None:
        """A leg that fetches pages while they are computed. None: the worker is not there."""
        # What there is to say of the prompt is said where it is computed.
        expected = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
        try:
            return legs.enter_context(self._leg(worker, expected, lambda link: link.expect(expected, ticket)))
        except LegLost:
            return None

    def _proceed(self, worker: WorkerId, leg: Leg, following: Request) -> None:
        link = self._links.get(worker)
        if link is not None:
            link.proceed(leg, following)

    async def _tokens(self, leg: Leg) -> AsyncGenerator[Tokens, None]:
        while True:
            update = await leg.next(self._settings.token_wait_s)
            if update.transfer is not None:
                self._telemetry.transferred(leg.request_id, update.transfer)
            tokens = tokens_of(update)
            yield tokens
            if tokens.finish is not None:
                return

    def _advanced(self, request: Request, drawn: Sequence[int]) -> Request:
        """The request as it stands after ``drawn``: for whoever goes on with it these are part of the prompt, with a
        note that they are output. What is said of the client's prompt came with the first of them.
        """
        if not drawn:
            return request
        prompt = (*request.prompt, *drawn)
        left = request.sampling.max_tokens - len(drawn)
        rest = replace(request.sampling, max_tokens=left, prompt_logprobs=None)
        names = self._hasher.chain(prompt, request.page_hashes, salt=request.cache_salt)
        return replace(request, prompt=prompt, page_hashes=names, sampling=rest, drawn=request.drawn + len(drawn))

    @contextmanager
    def _leg(self, worker: WorkerId, request: Request, start: Callable[[WorkerLink], Leg]) -> Iterator[Leg]:
        """A request on one worker; ended there if it has not ended by itself."""
        link = self._links.get(worker)
        if link is None:
            raise LegLost(f"worker {worker} is not connected")
        self._view.sent(worker, request.request_id, request.page_hashes, len(request.prompt))
        leg = start(link)
        try:
            yield leg
        finally:
            self._view.ended(worker, request.request_id)
            if not leg.settled:
                link.abort(request.request_id)

    @contextmanager
    def _lease(self, worker: WorkerId, request_id: RequestId) -> Iterator["Lease"]:
        """Pages that wait on a worker; given up there unless the one they were for has settled the matter."""
        lease = Lease()
        try:
            yield lease
        finally:
            link = self._links.get(worker)
            if not lease.ended and link is not None:
                link.abort(request_id)


class Lease:
    """What the gateway knows of a lease: whether the decode worker has fetched or refused its pages."""

    ended = False


def tokens_of(update: SequenceUpdate) -> Tokens:
    """What a worker's update means for the client. Raises LegLost where the worker could not go on."""
    if update.finish in (FinishReason.ERROR, FinishReason.ABORT):
        raise LegLost(update.error or "the worker ended it")
    finish = None if update.finish is FinishReason.HANDED_OVER else update.finish
    return Tokens(update.tokens, finish, update.cached_tokens, update.logprobs, update.prompt_logprobs)
