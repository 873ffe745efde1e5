"""PTX and SASS of a kernel, by the CUDA toolkit's programs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from attnforge.codegen.render import Source
from attnforge.runtime.build.cache import obtain
from attnforge.runtime.build.compilation import write_source
from attnforge.runtime.build.errors import CompileError, NoCompilerError
from attnforge.runtime.build.toolchain import (
    NVCC_FLAGS,
    NVCC_PLACES,
    NVCC_REMEDY,
    find_nvcc,
    find_program,
    run,
)


def ptx(source: Source) -> str:
    """What nvcc makes of a GPU kernel before ptxas. Raises NoCompilerError, CompileError, ValueError for a CPU's."""
    _expect_gpu(source)
    nvcc = find_nvcc(os.environ)
    if nvcc is None:
        raise NoCompilerError(f"{NVCC_PLACES}; {NVCC_REMEDY}")
    with tempfile.TemporaryDirectory() as name:
        path = write_source(source, Path(name))
        flags = tuple(flag for flag in NVCC_FLAGS if flag not in ("-cubin", "--ptxas-options=-v"))
        arch = f"-arch={source.arch.nvcc_name.replace('sm_', 'compute_')}"
        command = (str(nvcc), "-ptx", *flags, arch, "-o", "kernel.ptx", path.name)
        code, log = run(command, Path(name))
        if code != 0:
            raise CompileError(source.slug, command, path, log)
        return (Path(name) / "kernel.ptx").read_text()


def sass(source: Source) -> str:
    """The machine code of a GPU kernel, compiled now if it is not in the cache. Errors as `ptx` and `obtain`."""
    _expect_gpu(source)
    entry = obtain(source)
    for tool, options in (("nvdisasm", ("-c",)), ("cuobjdump", ("-sass",))):
        program = find_program(tool, os.environ)
        if program is not None:
            code, text = run((str(program), *options, str(entry.path)), entry.directory)
            if code != 0:
                raise CompileError(source.slug, (tool, *options), entry.path, text)
            return text
    raise NoCompilerError(
        "neither nvdisasm nor cuobjdump is in $CUDA_HOME/bin, $CUDA_PATH/bin, PATH or a pip package; install the CUDA "
        "toolkit or `pip install nvidia-cuda-nvdisasm`"
    )


def _expect_gpu(source: Source) -> None:
    if not source.arch.is_gpu:
        raise ValueError(
            f"{source.slug}: a CPU kernel has neither PTX nor SASS; use --what source or registers"
        )
