"""A compiled kernel that was built against another library."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

Path("kernels.c").write_text(
    "extern int of_another_version(void); int PyInit_kernels(void) { return of_another_version(); }"
)
include = sysconfig.get_paths()["include"]
subprocess.run(
    ["gcc", "-shared", "-fPIC", f"-I{include}", "kernels.c", "-o", "kernels.so"], check=True
)

import kernels  # noqa: E402, F401
