"""The chaos run is clean, and would say so if it were not."""

import asyncio

import pytest

from splitserve.bench.chaos import Chaos
from splitserve.bench.chaos_request import Answer, Asked, Way, expected_token
from splitserve.cluster.leg import LegLost
from splitserve.engine.protocol import FinishReason, RequestId, SamplingParams, SequenceUpdate

PROMPT = (1, 2, 3)
SEED = 7
RIGHT = [expected_token(SEED, position) for position in (3, 4)]


def test_requests_over_killed_workers_end_right_and_leave_nothing_behind() -> None:
    found = asyncio.run(Chaos(seed=1, longest_freeze_s=0.3).run(requests=24, kill_every=24))
    assert (found.requests, found.kills) == (24, 1)
    assert (found.leaked_pages, found.wrong_tokens, found.unfinished) == (0, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "finish", "wrong"),
    [
        (RIGHT, FinishReason.LENGTH, 0),
        ([RIGHT[0], RIGHT[0]], FinishReason.LENGTH, 1),  # another position's token
        ([*RIGHT, expected_token(SEED, 5)], FinishReason.LENGTH, 1),  # one too many
        (RIGHT[:1], FinishReason.LENGTH, 1),  # one is missing
        (RIGHT[:1], FinishReason.HANDED_OVER, 0),  # it is still to come
    ],
)
def test_an_answer_is_compared_token_by_token(tokens: list[int], finish: FinishReason, wrong: int) -> None:
    answer = answer_of_two_tokens()
    answer.take(SequenceUpdate(RequestId("r"), tokens, finish))
    assert answer.wrong == wrong


def test_a_worker_that_could_not_go_on_gives_no_answer() -> None:
    with pytest.raises(LegLost, match="no room"):
        answer_of_two_tokens().take(SequenceUpdate(RequestId("r"), [], FinishReason.ERROR, error="no room"))


def answer_of_two_tokens() -> Answer:
    sampling = SamplingParams(max_tokens=2, seed=SEED)
    return Answer(Asked("r", PROMPT, sampling, Way.ONE_WORKER, "left", "right", leaves_after_s=None, gives_up=True))
