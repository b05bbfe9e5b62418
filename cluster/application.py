"""The Serve application: a gateway in front of two pools of the same worker class."""

from msgspec.structs import replace
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from splitserve.cluster.gateway import Gateway
from splitserve.cluster.pinned_router import PinnedRouter
from splitserve.cluster.settings import AppSettings, PoolSettings
from splitserve.cluster.worker import Worker
from splitserve.engine.protocol import Role

ONGOING_REQUESTS = 100_000  # feeds are long calls, and admission is not Serve's
GATEWAY_SHUTDOWN_S = 60.0
HEALTH_PERIOD_S = 5.0
CONSTRUCTOR_TRIES = 3  # a model that can't be loaded will not get better


def application(settings: AppSettings) -> Application:
    """Deployments ``Gateway`` (the ingress), ``PrefillPool`` and ``DecodePool``; nothing runs yet."""
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=settings.gateways,
        max_ongoing_requests=ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=GATEWAY_SHUTDOWN_S,
        health_check_period_s=HEALTH_PERIOD_S,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        ray_actor_options={"num_cpus": 0},
    )
    prefill = _pool("PrefillPool", settings, settings.prefill, Role.PREFILL)
    decode = _pool("DecodePool", settings, settings.decode, Role.DECODE)
    return gateway.bind(settings, prefill, decode)


def _pool(name: str, settings: AppSettings, pool: PoolSettings, role: Role) -> Application:
    threads = settings.engine.threads or max(1, int(pool.cpus))
    deployment = serve.deployment(
        Worker,
        name=name,
        num_replicas=pool.workers,
        max_ongoing_requests=ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=pool.shutdown_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD_S,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        ray_actor_options={"num_cpus": pool.cpus, "num_gpus": pool.gpus},
        request_router_config=RequestRouterConfig(request_router_class=PinnedRouter),
    )
    return deployment.bind(replace(settings.engine, threads=threads), role.value)
