"""A Serve request router that sends each call to the replica it names in its ``target`` argument.

Serve has no public way to call one particular replica; placement is decided before the call, in ``router.placement``.
"""

import logging

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from splitserve.cluster import replica_directory  # the module: Serve copies this file's own globals by value

logger = logging.getLogger("ray.serve")


class PinnedRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Routes by the ``target`` keyword. When the target is gone the call goes to another replica, which refuses it by
    name:
    raising or returning nothing would leave the caller waiting until its own deadline.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        target = pending_request.kwargs.get("target") if pending_request is not None else None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target:
                return [[replica]]
        return [[replica] for replica in candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        try:
            replica_directory.directory.update(
                self._deployment_id.name, frozenset(r.replica_id.unique_id for r in replicas)
            )
        except Exception:
            logger.exception("the replica directory was not updated")
