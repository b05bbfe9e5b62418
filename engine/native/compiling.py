"""From C++ to a shared library, once per machine and version."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "int8.cpp"))
COMPILERS = ("c++", "g++", "clang++")
# Reordered sums are welcome, but NaN and infinity must keep their meaning, so -ffast-math is not among these.
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"),
)
COMPILE_S = 120.0


class NotCompiled(Exception):
    """There is no library for this machine; the message says why."""


def compiled_library() -> Path:
    """The library, compiled now unless an earlier process has done it. Seconds the first time.

    Safe to call from several processes at once: each compiles into a file of its own and moves it into place. Raises
    NotCompiled.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NotCompiled(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    folder = _private_folder()
    library = folder / f"kernels-{_key(compiler)}.so"
    if library.exists():
        return library
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", unfinished, *map(str, SOURCES)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if result.returncode:
            raise NotCompiled(f"{compiler} failed: {result.stderr.strip()[:500]}")
        os.replace(unfinished, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{compiler} could not run: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return library


def _private_folder() -> Path:
    """A folder that nobody else can write to: what lies in it is loaded into this process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "splitserve"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise NotCompiled(f"{folder} cannot be used: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NotCompiled(f"others can write to {folder}")
    return folder


def _key(compiler: str) -> str:
    """Equal where the same library would come out: source, flags, compiler and instruction set."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{compiler} could not run: {error}") from error
    digest = hashlib.blake2b(version + " ".join(FLAGS).encode(), digest_size=12)
    for source in SOURCES:
        digest.update(source.read_bytes())
    digest.update(platform.machine().encode() + _instruction_set())
    return digest.hexdigest()


def _instruction_set() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
