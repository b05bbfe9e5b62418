"""A gateway's connections to all workers: one link for each replica that Serve routes to, kept up to date."""

import asyncio
import logging

from ray.serve.handle import DeploymentHandle

from splitserve.cluster.replica_directory import ReplicaDirectory
from splitserve.cluster.telemetry import Telemetry
from splitserve.cluster.worker_link import WorkerLink
from splitserve.engine.protocol import StepReport, WorkerId
from splitserve.router.load_view import LoadView

logger = logging.getLogger("ray.serve")

RECONNECT_S = 1.0
FIRST_CALL_TIMEOUT_S = 60.0


class WorkerLinks:
    """Follows the replica directory. A worker is in ``view`` while its feed is open."""

    def __init__(
        self,
        gateway: str,
        pools: list[DeploymentHandle],
        directory: ReplicaDirectory,
        view: LoadView,
        telemetry: Telemetry,
    ) -> None:
        self._gateway = gateway
        self._pools = {pool.deployment_name: pool for pool in pools}
        self._directory = directory
        self._view = view
        self._telemetry = telemetry
        self._links: dict[WorkerId, WorkerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._follower: dict[WorkerId, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def get(self, worker: WorkerId) -> WorkerLink | None:
        """The link to a worker whose feed is open."""
        return self._links.get(worker) if worker in self._view else None

    def start(self) -> None:
        """Begin to follow, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._directory.listen(lambda: loop.call_soon_threadsafe(self._reconcile))
        for pool in self._pools.values():
            self._keep(asyncio.create_task(self._first_call(pool)))
        self._reconcile()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a worker has come or gone, or after ``timeout_s``."""
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _first_call(self, pool: DeploymentHandle) -> None:
        """Serve tells a process of a deployment's replicas once it has called one."""
        while True:
            response = pool.endpoint.remote(target=None)
            try:
                async with asyncio.timeout(FIRST_CALL_TIMEOUT_S):
                    await response
                return
            except Exception as error:
                response.cancel()
                logger.warning("no replica of %s answers yet: %s", pool.deployment_name, type(error).__name__)
                await asyncio.sleep(RECONNECT_S)

    def _reconcile(self) -> None:
        known: set[WorkerId] = set()
        for deployment, replicas in self._directory.replicas().items():
            pool = self._pools.get(deployment)
            if pool is None:
                continue
            for replica in map(WorkerId, replicas):
                known.add(replica)
                if replica not in self._follower:
                    self._follower[replica] = task = asyncio.create_task(self._follow(replica, pool))
                    self._keep(task)
        self._view.set_draining(w.worker for w in self._view if w.worker not in known)
        for worker, link in self._links.items():
            if worker not in known and not link.busy:
                self._follower[worker].cancel()

    async def _follow(self, worker: WorkerId, pool: DeploymentHandle) -> None:
        """Keep a feed open to one replica as long as Serve knows it."""
        try:
            while any(worker in replicas for replicas in self._directory.replicas().values()):
                link = self._links[worker] = WorkerLink(worker, pool, self._gateway, self._take_in)
                why = await link.run()
                self._gone(worker, why)
                await asyncio.sleep(RECONNECT_S)
        finally:
            self._gone(worker, "Serve has taken it out of routing")
            self._follower.pop(worker, None)

    def _take_in(self, report: StepReport) -> None:
        new = report.worker not in self._view
        self._view.update(report)
        self._telemetry.take_in(report)
        if new and report.worker in self._view:
            logger.info("%s worker %s is connected", report.role, report.worker)
            self._news.set()
        elif report.worker in self._view and not self._links[report.worker].busy:
            self._close_if_draining(report.worker)

    def _close_if_draining(self, worker: WorkerId) -> None:
        view = self._view.get(worker)
        if view is not None and view.draining and worker in self._follower:
            self._follower[worker].cancel()

    def _gone(self, worker: WorkerId, why: str) -> None:
        if self._links.pop(worker, None) is None:
            return
        logger.info("worker %s is gone: %s", worker, why)
        self._view.remove(worker)
        self._telemetry.forget(worker)
        self._news.set()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
