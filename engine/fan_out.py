"""Several answers to one prompt: as many requests, which share the prompt's pages through the prefix cache."""

from hashlib import blake2b

from msgspec.structs import replace

from splitserve.engine.protocol import Request, RequestId

_SEED_MASK = (1 << 64) - 1


def fan_out(request: Request, count: int) -> list[Request]:
    """``count`` requests named ``{id}-{index}`` that differ in their seeds. The first answers as ``request`` would.

    Only the first asks for the prompt's log-probabilities, which are the same for all. Raises ValueError for a
    ``count`` below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    choices = []
    for index in range(count):
        sampling = request.sampling
        if index:
            sampling = replace(sampling, seed=_seed_of(sampling.seed, index), prompt_logprobs=None)
        choices.append(replace(request, request_id=RequestId(f"{request.request_id}-{index}"), sampling=sampling))
    return choices


def _seed_of(seed: int, index: int) -> int:
    """64 bits that depend on both and look like neither, so that seeds next to each other share no answers."""
    key = (seed & _SEED_MASK).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(key, digest_size=8, person=b"choice").digest(), "little")
