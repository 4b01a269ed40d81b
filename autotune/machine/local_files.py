"""Files of this machine: detection of changes without reading the content, and of network file
systems.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from autotune.catalog.model_lookup import hub_cache
from autotune.core.errors import BadInput
from autotune.core.files import read_text

MAX_FILES = 20_000
MAX_NAME_LENGTH = 1024


def record_folder() -> Path:
    """Return the folder of everything that was measured for this user."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "autotune"


def stamp(name: str, *, repository: str = "models") -> str | None:
    """Hash the sizes and times of local files; for a hub id return the cached commit.

    None: neither exists, or the folder has more than MAX_FILES files.
    """
    if not name.strip() or "\0" in name or len(name) > MAX_NAME_LENGTH:
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return _of([path], path.parent)
    if path.is_dir():
        files: list[Path] = []
        for folder, subfolders, names in os.walk(path):
            subfolders.sort()
            files += [Path(folder, file) for file in sorted(names)]
            if len(files) > MAX_FILES:
                return None
        return _of(files, path)
    try:
        ref = hub_cache() / f"{repository}--{name.replace('/', '--')}" / "refs" / "main"
        return read_text(ref, largest_bytes=1024, way_out="").strip() or None
    except BadInput:
        return None


def _of(files: list[Path], below: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        for file in files:
            status = file.stat()
            name = file.relative_to(below)
            mark = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(mark.encode("utf-8", "surrogateescape"))
    except OSError:  # changed while reading
        return None
    return digest.hexdigest()[:16]


# https://www.sqlite.org/howtocorrupt.html#_filesystems_with_broken_or_missing_lock_implementations
_NETWORK = frozenset(
    """
    9p acfs afs beegfs ceph cifs coda davfs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs3 nfs4
    ocfs2 orangefs panfs pvfs2 smb smb2 smb3 smbfs vastfs wekafs
    """.split()
)

# Other FUSE file systems count as remote: sshfs, s3fs, gcsfuse, juicefs.
_LOCAL_FUSE = frozenset(
    "fuseblk fuse.fuse-overlayfs fuse.lxcfs fuse.ntfs-3g fuse.ext2 fuse.exfat".split()
)


def refuse_network_storage(url: str, mounts: Path = Path("/proc/self/mounts")) -> None:
    """Raise BadInput for an SQLite file on a network file system."""
    # Imported here: an answer from the record must load nothing heavy.
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        address = make_url(url)
    except ArgumentError:
        return  # reported when the storage is opened
    is_sqlite = address.get_backend_name() == "sqlite"
    file = str(address.database)
    if not is_sqlite or address.database in (None, "", ":memory:") or file.startswith("file:"):
        return
    kind = file_system_of(Path(file), mounts)
    if kind is None or not is_network(kind):
        return
    raise BadInput(
        f"{Path(file)} is on a network file system ({kind}), where SQLite can't keep a study: its"
        " locks do not hold there.",
        way_out=(
            "Give --storage a disk of this machine, like --storage"
            " sqlite:////tmp/autotune-study.db, or a PostgreSQL server, like --storage"
            " postgresql+psycopg://me@host/autotune. The results may stay where --out says."
        ),
    )


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the path's file system; None if unknown."""
    path = path.expanduser().resolve()
    depth = 0
    kind = None
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(_unescaped(fields[1]))
        holds_path = point == path or point in path.parents
        # A later mount on the same point hides an earlier one.
        if holds_path and len(point.parts) >= depth:
            depth = len(point.parts)
            kind = fields[2]
    return kind


def is_network(kind: str) -> bool:
    return kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def _unescaped(field: str) -> str:
    """Decode /proc's octal escapes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
