"""Configuration of a whole application: frozen, complete at start, unknown keys refused by name."""

from typing import Annotated

import msgspec

from splitserve.engine.settings import EngineSettings, Positive, Seconds

Count = Annotated[int, msgspec.Meta(ge=0)]


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP side and the way of a request."""

    served_name: str | None = None  # what clients put into "model"; None: the model's own path or id
    placement_wait_s: Seconds = 5.0  # how long a request waits for a worker when none is connected
    token_wait_s: Seconds = 600.0  # longest silence of a worker about a request before it counts as lost
    attempts: Positive = 3  # placements of one request, the first included
    max_body_bytes: Positive = 4 << 20
    tokenizer_threads: Positive = 2


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers of one pool and what each reserves from Ray."""

    workers: Positive = 1
    cpus: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    gpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    shutdown_s: Seconds = 120.0  # how long a worker may go on with its requests and leases when it is to stop


class ListenSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where gateways listen by themselves."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    shutdown_s: Seconds = 30.0  # how long open connections may go on when a gateway is to stop


class AppSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything ``build_app`` needs."""

    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    gateway: GatewaySettings = msgspec.field(default_factory=GatewaySettings)
    prefill: PoolSettings = msgspec.field(default_factory=PoolSettings)
    decode: PoolSettings = msgspec.field(default_factory=PoolSettings)
    gateways: Positive = 1
    listen: ListenSettings | None = None  # None: reached through Ray Serve's HTTP proxies

    @property
    def served_name(self) -> str:
        return self.gateway.served_name or self.engine.model
