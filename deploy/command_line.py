"""The command ``splitserve``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from splitserve import __version__
from splitserve.deploy.ray_environment import prepare_ray_environment


def parser() -> argparse.ArgumentParser:
    """``dest`` of each option of ``serve`` is the dotted configuration key that it overrides."""
    top = argparse.ArgumentParser(
        prog="splitserve", description="LLM serving with prefill and decode on separate workers."
    )
    top.add_argument("--version", action="version", version=f"splitserve {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model: join a running Ray cluster, or start one on this machine until Ctrl-C.",
        argument_default=argparse.SUPPRESS,
    )
    serve.add_argument("--config", type=Path, default=None, help="YAML file; options given here override it")
    serve.add_argument(
        "--model",
        dest="engine.model",
        metavar="PATH",
        help="GGUF file (of parts the first), folder of safetensors, org/name@revision of the hub, or smollm2",
    )
    serve.add_argument(
        "--dtype", dest="engine.dtype", metavar="DTYPE", help="auto (default), float32, float16, bfloat16 or int8"
    )
    serve.add_argument(
        "--attention", dest="engine.attention", metavar="KIND", help="auto (default), torch, native or triton"
    )
    serve.add_argument(
        "--served-name", dest="gateway.served_name", metavar="NAME", help='the "model" that clients ask for'
    )
    serve.add_argument("--prefill", dest="prefill.workers", type=int, metavar="N", help="prefill workers")
    serve.add_argument("--decode", dest="decode.workers", type=int, metavar="N", help="decode workers")
    serve.add_argument("--host", dest="listen.host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", dest="listen.port", type=int, metavar="P", help="port to listen on (default 8000)")
    serve.add_argument(
        "--ray-address", dest="ray_address", metavar="ADDRESS", help="of a Ray cluster; auto (default) or local"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a failure to start, 2 for wrong options or configuration, 130 for Ctrl-C
    before anything was started.
    """
    options: dict[str, Any] = vars(parser().parse_args(argv))
    del options["command"]
    try:
        return _serve(options)
    except KeyboardInterrupt:
        return 130


def _serve(options: dict[str, Any]) -> int:
    prepare_ray_environment()  # so what imports Ray is imported after it

    from splitserve.deploy.config import ConfigError, serve_settings
    from splitserve.deploy.serving import StartFailed, serve_until_stopped

    try:
        settings = serve_settings(options.pop("config"), options)
        serve_until_stopped(settings)
    except ConfigError as error:
        print(f"splitserve: {error}", file=sys.stderr)
        return 2
    except StartFailed as error:
        print(f"splitserve: {error}", file=sys.stderr)
        return 1
    return 0
