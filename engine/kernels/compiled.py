# mypy: allow-untyped-calls
"""Every kernel compiled for the GPUs it is meant for, without having one: what it takes of registers and shared memory.

``python -m splitserve.engine.kernels.compiled`` prints the table. TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from splitserve.engine.kernels.builds import BUILDS, Build

SHARED_BYTES = {
    80: 163 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}  # most per block, by compute capability (CUDA C++ guide)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program (thread block) of a compiled kernel takes."""

    build: str
    capability: int
    registers: int  # per thread
    local_bytes: int  # per thread, of spilled registers and of arrays that registers can't hold
    shared_bytes: int

    def row(self) -> str:
        """One line of the table."""
        return (
            f"{self.build:<44} sm_{self.capability:<4} {self.registers:>4} registers "
            f"{self.local_bytes:>4} B local {self.shared_bytes / 1024:>6.1f} KiB shared"
        )


def compile_for(build: Build, capability: int) -> Resources:
    """Compile one kernel; raises what Triton raises when it can't."""
    names = build.kernel.arg_names
    signature = {name: "constexpr" if name in build.constants else build.types[name] for name in names}
    # The doors' tensors are aligned, which decides how wide loads are and how they are staged.
    aligned: dict[tuple[int], list[list[Any]]] = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in build.aligned
    }
    source = ASTSource(build.kernel, signature, dict(build.constants), aligned)
    options: Mapping[str, int] = {"num_warps": build.warps, "num_stages": build.stages}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, local = _usage(result.asm["cubin"])
    return Resources(build.name, capability, registers, local, result.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", printed)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {printed!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def compile_all(capabilities: Iterable[int] = tuple(SHARED_BYTES), processes: int = 2) -> list[Resources]:
    """All builds for all targets."""
    wanted = [(build, capability) for build in range(len(BUILDS)) for capability in capabilities]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_compile, wanted))


def _compile(wanted: tuple[int, int]) -> Resources:
    build, capability = wanted
    return compile_for(BUILDS[build], capability)


def main(arguments: Sequence[str]) -> None:
    """Print the table, or the same as JSON."""
    table = compile_all()
    if "--json" in arguments:
        print(json.dumps([asdict(resources) for resources in table]))
    else:
        print("\n".join(resources.row() for resources in table))


if __name__ == "__main__":
    main(sys.argv[1:])
