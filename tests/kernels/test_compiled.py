"""Every kernel compiles for the GPUs it is meant for, within their means. ``pytest -s`` prints the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def test_registers_hold_everything_and_shared_memory_suffices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A process of its own: this one interprets kernels, and Triton is either or.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "splitserve.engine.kernels.compiled", "--json"]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    table = json.loads(printed)
    for row in table:
        print("{build:<44} sm_{capability:<4}{registers:>4} registers {shared_bytes:>7} bytes shared".format(**row))
    assert {row["capability"] for row in table} == set(SHARED_BYTES)
    assert [row for row in table if row["local_bytes"]] == []
    assert [row for row in table if row["shared_bytes"] > SHARED_BYTES[row["capability"]]] == []
