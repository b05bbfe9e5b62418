"""What a NIXL peer must know to read from us."""

import msgspec

MAX_ENDPOINT_BYTES = 64 << 10


class EndpointError(ValueError):
    """Bytes that are no endpoint of this kind."""


class NixlEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses are virtual addresses in the peer's process."""

    agent: str  # unique per incarnation
    metadata: bytes
    address: int  # of the pool
    page_bytes: int
    num_pages: int
    generations: int  # address of num_pages 64-bit words in host memory
    device: int | None  # None: the pool is in host memory; else index of the CUDA device

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "NixlEndpoint":
        """Raises EndpointError for anything that is not a possible endpoint."""
        if len(data) > MAX_ENDPOINT_BYTES:
            raise EndpointError(f"{len(data)} bytes exceed {MAX_ENDPOINT_BYTES}")
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EndpointError(str(error)) from error
        if not endpoint.agent or min(endpoint.page_bytes, endpoint.num_pages) < 1:
            raise EndpointError("no agent, or no pages")
        if not 0 < endpoint.address <= endpoint.address + endpoint.page_bytes * endpoint.num_pages < 1 << 64:
            raise EndpointError("the pool lies outside the address space")
        if not 0 < endpoint.generations < (1 << 64) - 8 * endpoint.num_pages:
            raise EndpointError("the generations lie outside the address space")
        return endpoint
