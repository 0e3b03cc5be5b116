"""A C extension that really compiles and loads: Triton and torch need a compiler and Python.h at run time."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from colocate_grpo.doctor.finding import Context, Finding, fail, ok

SOURCE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "doctor_probe", "", -1, methods};
PyMODINIT_FUNC PyInit_doctor_probe(void) { return PyModule_Create(&module); }
"""
MEND = "apt install gcc python3-dev (the headers of this Python)"


def check(context: Context) -> Finding:
    compiler = context.environment.get("CC") or _find("gcc", context) or _find("cc", context)
    if not compiler:
        return fail("no C compiler (gcc) in PATH", MEND)
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "doctor_probe.so"
        (Path(directory) / "probe.c").write_text(SOURCE)
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-shared", "-fPIC", f"-I{include}", str(Path(directory) / "probe.c"), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return fail(f"{compiler}: {done.stderr.strip().splitlines()[0][:160]}", MEND)
        assert _load(library).answer() == 42
    return ok(f"{compiler} compiles against {include}/Python.h")


def _find(name: str, context: Context) -> str | None:
    return shutil.which(name, path=context.environment.get("PATH", ""))


def _load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor_probe", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
