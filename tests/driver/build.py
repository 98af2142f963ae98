"""Stubs of every CUDA library that a PyTorch wheel asks for, out of the symbols its libraries leave open.

    python tests/driver/build.py VENV [LIBRARY...]    # with torch and nvidia-cuda-runtime-cu12, for its headers

LIBRARY is another package's (libbitsandbytes_cuda121.so), whose kernels are launched through the same runtime.
What needs an answer has one in `runtime.c`, `driver.c` or `ANSWERS`; everything else returns 0. The stubs come into
VENV/driver, where `record.py` looks for them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
#: Functions by library that have to write something: what they hand out is never looked into.
ANSWERS = {
    "libcublas": """
        int cublasCreate_v2(void **h) { *h = some; return 0; }
        int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
        int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
        int cublasGetStream_v2(void *h, void **s) { *s = 0; return 0; }
        int cublasGetVersion_v2(void *h, int *v) { *v = 12100; return 0; }""",
    "libcublasLt": """
        int cublasLtMatmulDescCreate(void **p, int a, int b) { *p = some; return 0; }
        int cublasLtMatrixLayoutCreate(void **p, int a, long r, long c, long l) { *p = some; return 0; }
        int cublasLtMatmulPreferenceCreate(void **p) { *p = some; return 0; }
        int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n,
                                           void *r, int *found) { memset(r, 0, 96); *found = 1; return 0; }""",
    "libcusparse": """
        int cusparseCreate(void **p) { *p = some; return 0; }""",
    "libcudnn": """
        int cudnnCreate(void **p) { *p = some; return 0; }
        unsigned long cudnnGetVersion(void) { return CUDNN; }
        unsigned long cudnnGetCudartVersion(void) { return 12010; }
        const char *cudnnGetErrorString(int e) { return "no error"; }""",
    "libnccl": """
        int ncclGetVersion(int *v) { *v = 22005; return 0; }
        int ncclCommInitRank(void **c, int n, char *id, int r) { *c = some; return 0; }
        int ncclCommInitRankConfig(void **c, int n, char *id, int r, void *o) { *c = some; return 0; }
        int ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }
        const char *ncclGetErrorString(int e) { return "no error"; }
        const char *ncclGetLastError(void *c) { return "no error"; }""",
}
_HEAD = "#include <string.h>\nstatic char some[65536];\n"
#: `crt/host_defines.h`, which is in another wheel: `driver_types.h` needs no more of it.
_DEFINES = "".join(f"#define {name}\n" for name in (
    "__device_builtin__", "__device_builtin_texture_type__", "__device_builtin_surface_type__", "__cudart_builtin__",
    "CUDARTAPI", "__host__", "__device__")) + "".join(
    f"#define {name}(n) __attribute__((aligned(n)))\n" for name in ("__align__", "__builtin_align__"))


def main(venv: Path, *others: Path) -> None:
    """Write VENV/driver/lib*.so."""
    (site,) = venv.glob("lib/python3*/site-packages")
    out = venv / "driver"
    (out / "crt").mkdir(parents=True, exist_ok=True)
    (out / "crt" / "host_defines.h").write_text(_DEFINES)
    for real in (site / "nvidia" / "cuda_runtime" / "lib").glob("libcudart*"):
        real.unlink()  # PyTorch would find it first
    include = [f"-I{out}", f"-I{site}/nvidia/cuda_runtime/include"]
    for library, names in _wanted(site / "torch" / "lib", others).items():
        stem = library.partition(".")[0]
        own = {"libcudart": HERE / "runtime.c", "libcuda": HERE / "driver.c"}.get(stem)
        code = own.read_text() if own else _HEAD + ANSWERS.get(stem, "").replace(
            "CUDNN", "8902" if library.endswith("8") else "90100")
        made = set(re.findall(r"\b(\w+)\(", code)) if own or stem in ANSWERS else set()
        code += "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names - made))
        source = out / f"{library}.c"
        source.write_text(code)
        versions = out / f"{library}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        versioned = [f"-Wl,--version-script={versions}"] if stem not in ("libcuda", "libnccl", "libcusparseLt") else []
        if stem == "libcuda":  # as which Triton's launcher is linked
            (out / "libcuda.so").unlink(missing_ok=True)
            (out / "libcuda.so").symlink_to(library)
        subprocess.run(["gcc", "-O1", "-w", "-shared", "-fPIC", *include, "-o", out / library, source,
                        f"-Wl,-soname,{library}", *versioned], check=True)


def _wanted(libraries: Path, further: tuple[Path, ...]) -> dict[str, set[str]]:
    """Open symbols of PyTorch's and further libraries by the CUDA library that has them."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for one in libraries.glob("*.so*"):
        needed = subprocess.run(["readelf", "-d", one], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"\[(lib(?:cu|nv|nccl)[\w-]*\.so[.\d]*)\]", needed):
            if not (libraries / library).exists():
                wanted[library] |= set()
    others = {"nccl": "libnccl", "cusparseLt": "libcusparseLt", "cu": "libcuda"}
    wanted.setdefault("libcuda.so.1", set())
    for one in (*libraries.glob("*.so*"), *further):
        table = subprocess.run(["nm", "-D", "--undefined-only", one], capture_output=True, text=True, check=True).stdout
        for name, _, version in (line.split()[-1].partition("@") for line in table.splitlines()):
            start = next((stem for stem in others if name.startswith(stem) and not name.startswith("cuda")), None)
            if version in wanted:
                wanted[version].add(name)
            elif not version and start is not None:
                for library in wanted:
                    if library.partition(".")[0] == others[start]:
                        wanted[library].add(name)
    loaded = ("cuMemAddressFree", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemExportToShareableHandle",
              "cuMemImportFromShareableHandle", "cuCtxSetCurrent",
              "cuCtxGetLimit", "cuCtxSetLimit")  # by name, not by the linker; the last two by Triton
    wanted["libcuda.so.1"] |= set(loaded)
    return wanted


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
