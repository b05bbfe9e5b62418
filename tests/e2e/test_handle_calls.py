"""Calls from another Ray program: the documented example, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from e2e.server import Server

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(server: Server, script: Path | str) -> str:
    command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=server.env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_example_runs(smollm2: Server) -> None:
    output = run(smollm2, EXAMPLES / "call_from_ray.py")
    assert "chat: The capital of France is Paris." in output
    assert smollm2.complete(prompt="One, two, three,", temperature=0, max_tokens=8)["choices"][0]["text"] in output
    assert output.count("generate:") >= 1
    assert "length" in output


def test_errors_arrive_as_what_they_are(smollm2: Server) -> None:
    output = run(
        smollm2,
        "import ray; from ray import serve\n"
        "from splitserve.cluster.api.errors import BadRequest, ModelNotFound\n"
        "ray.init(address='auto', logging_level='error'); handle = serve.get_app_handle('splitserve')\n"
        "try: handle.complete.remote({'model': 'other', 'prompt': 'a'}).result(timeout_s=30)\n"
        "except ModelNotFound as error: print('model', error.param)\n"
        "try: list(handle.options(stream=True).generate.remote({'prompt_token_ids': [-1]}))\n"
        "except BadRequest as error: print('bad', error.param)\n",
    )
    assert "model model" in output
    assert "bad prompt_token_ids" in output
    assert smollm2.settled()
