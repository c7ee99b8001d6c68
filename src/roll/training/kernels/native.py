"""The functions of `fused.c` and `attention.c`, compiled for this machine at first use.

    *.c ─ the C compiler, once per machine and version ─► $ROLL_CACHE/native/fused-<hash>.so ─► ctypes

Without a compiler, or where the library cannot be built or loaded, PyTorch's operations are used, which are slower but
equivalent. The library shares PyTorch's OpenMP runtime and its threads.

The compiler is called directly: `torch.utils.cpp_extension` takes as long, needs ninja, and a build that is killed
leaves a lock file on which every later build waits forever.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["NativeLibrary", "load_native_library"]

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("numbers.h", "fused.c", "attention.c"))
# Compiler flags and timeout of the build of the kernels.
VECTOR_FLAGS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
COMPILER_FLAGS = (
    *VECTOR_FLAGS,
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
COMPILE_TIMEOUT_S = 60.0


class NativeLibrary:
    """Calls the compiled C functions of `fused.c` and `attention.c`.

    Tensors must be contiguous, and of the dtype that the C function declares.

    Args:
        library: The loaded library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def query(self, name: str) -> int:
        """Call a function without arguments and return its result."""
        return int(getattr(self._library, name)())

    def call(self, name: str, *arguments: Tensor | float | int | None) -> None:
        """Call a function with as many threads as torch uses. Tensors are passed as addresses, numbers as C values."""
        function = getattr(self._library, name)
        values: list[ctypes.c_void_p | ctypes.c_float | ctypes.c_int64] = []
        for argument in arguments:
            if argument is None:
                values.append(ctypes.c_void_p(None))
            elif isinstance(argument, Tensor):
                assert argument.is_contiguous(), f"{name} requires contiguous tensors"
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, float):
                values.append(ctypes.c_float(argument))
            else:
                values.append(ctypes.c_int64(argument))
        function(*values, ctypes.c_int(torch.get_num_threads()))


@cache
def load_native_library() -> NativeLibrary | None:
    """Return the library of C functions, or `None` if it cannot be built. The first call takes about a second."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or os.name != "posix":
        logger.info("no C compiler found: the trainer uses PyTorch's own element-wise operations")
        return None
    try:
        return NativeLibrary(ctypes.CDLL(str(_build(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or error
        logger.warning(
            "fused.c cannot be compiled (%s): the trainer uses PyTorch's own element-wise operations", reason
        )
        return None


def _build(compiler: str) -> Path:
    """Build the C library if needed and return its path. Concurrent builds are safe, because writes are atomic."""
    root = os.environ.get("ROLL_CACHE")
    directory = (Path(root) if root else Path.home() / ".cache" / "roll") / "native"
    build = repr((COMPILER_FLAGS, compiler, _read_processor_features())).encode()
    key = hashlib.sha256(b"\0".join([*(source.read_bytes() for source in SOURCES), build]))
    path = directory / f"fused-{key.hexdigest()[:16]}.so"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        output = Path(place) / path.name
        sources = [str(source) for source in SOURCES if source.suffix == ".c"]
        command = [compiler, *COMPILER_FLAGS, *sources, "-o", str(output), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        output.replace(path)
    return path


def _read_processor_features() -> str:
    """Return the CPU features that affect `-march=native`, because different machines may share the build cache."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
