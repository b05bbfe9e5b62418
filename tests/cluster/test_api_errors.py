"""The tree of errors and the table that answers them."""

import copy
import gc

import pytest

from splitserve.cluster.api.errors import ANSWERS, ApiError, ContextTooLong, InternalError, answer_of, envelope, headers


def all_subclasses(cls: type[ApiError]) -> list[type[ApiError]]:
    return [found for child in cls.__subclasses__() for found in (child, *all_subclasses(child))]


def test_every_error_has_a_row_and_every_row_an_error():
    assert set(ANSWERS) == set(all_subclasses(ApiError))


def test_codes_are_distinct_and_the_drawn_tree_is_complete():
    codes = [answer.code for answer in ANSWERS.values()]
    assert len(codes) == len(set(codes))
    import splitserve.cluster.api.errors as module

    for cls in ANSWERS:
        assert f"── {cls.__name__}" in (module.__doc__ or "")


@pytest.mark.parametrize("cls", all_subclasses(ApiError))
def test_an_error_survives_a_copy_between_processes(cls):
    error = cls("sentence", "field", 2.5)
    twin = copy.copy(error)  # by the same protocol as a transfer to another process
    assert type(twin) is cls
    assert (twin.message, twin.param, twin.retry_after_s) == ("sentence", "field", 2.5)
    assert str(twin) == "sentence"


@pytest.mark.parametrize("cls", all_subclasses(ApiError))
def test_status_type_and_retry_agree(cls):
    answer = answer_of(cls("x"))
    assert 400 <= answer.status < 600
    assert answer.type == ("invalid_request_error" if answer.status < 500 and answer.status != 429 else "server_error")
    assert headers(cls("x"))["x-should-retry"] == ("true" if answer.retryable else "false")
    assert envelope(cls("x", "field"))["error"] == {
        "message": "x",
        "type": answer.type,
        "param": "field",
        "code": answer.code,
    }


def test_a_class_without_a_row_answers_as_internal_error():
    assert answer_of(ApiError("x")) == ANSWERS[InternalError]


def test_a_class_derived_on_the_way_answers_as_its_base():
    derived = type("Derived", (RuntimeError, ContextTooLong), {})
    try:
        assert answer_of(derived("x")) == ANSWERS[ContextTooLong]
    finally:
        del derived
        gc.collect()  # or the walk over all subclasses would meet it


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.0, "1"), (0.2, "1"), (3.0, "3"), (3.1, "4")])
def test_retry_after_is_in_whole_seconds(retry_after_s, header):
    assert headers(InternalError(retry_after_s=retry_after_s))["retry-after"] == header


def test_context_too_long_names_limit_owner_and_sizes():
    error = ContextTooLong.of(512, "the decode pool", 500, 100, "prompt")
    for part in ("512", "the decode pool", "500", "100", "600"):
        assert part in error.message
