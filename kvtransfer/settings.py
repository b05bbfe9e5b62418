"""Configuration of a worker's transport: frozen, complete at start, unknown keys refused."""

from typing import Annotated

import msgspec

Rate = Annotated[float, msgspec.Meta(ge=0)]
Deadline = Annotated[float, msgspec.Meta(gt=0, le=86_400)]  # seconds


class TransportSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How pages move, the same on all workers of a cluster.

    ``backend`` is the name of a NIXL plugin: UCX (RDMA, NVLink, shared memory, TCP), LIBFABRIC (AWS EFA), or another
    that reads remote memory. ``parameters`` are that plugin's own, all of them text. For UCX: ``num_workers``,
    ``ucx_devices`` (as "mlx5_0:1,mlx5_1:1"), ``ucx_error_handling_mode`` (leave it at "peer": "none" turns a dead peer
    into a transfer without end) and ``engine_config``, UCX settings without their prefix (as "TLS=rc,cuda").

    UCX also reads its environment, once, when a worker makes its agent; set it for the worker's process:

    - ``UCX_TLS``: which transports it may choose from ("tcp"; "rc,cuda,sm,self"); default: all that work.
    - ``UCX_NET_DEVICES``: which network devices ("eth0"; "mlx5_0:1"); default: all. On a host with several networks
      name the one that peers reach.
    - ``UCX_PROTO_INFO=y`` prints which transport it chose for which sizes.

    It chooses the fastest path on which both sides agree, and TCP when there is no other, without a word: ``probe.py``
    measures what came out of it.
    """

    backend: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "UCX"
    parameters: dict[str, str] = {}
    floor_bytes_per_s: Rate = 500e6  # a measured rate below this is worth a warning; 0: never
    probe_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 8 << 20  # read from a peer to measure its rate
    probe_s: Deadline = 10.0  # how long measuring one peer may take
