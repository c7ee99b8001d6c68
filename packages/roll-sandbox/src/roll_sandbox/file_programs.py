"""Programs that read, write, save and restore files in a sandbox. They run there without privileges, like any program.

On an error, a program writes the `errno` to file descriptor 3 and exits with code 1.
"""

from __future__ import annotations

__all__ = ["LOAD", "READ", "SAVE", "WRITE"]

_TEMPLATE = """
import errno, os, stat, sys
def work():
{body}
try:
    work()
except OSError as error:
    os.write(3, str(error.errno or errno.EIO).encode())
    os._exit(1)
os._exit(0)
"""


def _make_program(body: str) -> str:
    return _TEMPLATE.format(body="\n".join("    " + line for line in body.strip().splitlines()))


READ = _make_program("""
file = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
state = os.fstat(file)
if stat.S_ISDIR(state.st_mode):
    raise OSError(errno.EISDIR, "")
if not stat.S_ISREG(state.st_mode):
    raise OSError(errno.EINVAL, "")
left = int(sys.argv[2])
while True:
    data = os.read(file, 1 << 16)
    if not data:
        break
    left -= len(data)
    if left < 0:
        raise OSError(errno.EFBIG, "")
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
""")

WRITE = _make_program("""
path = sys.argv[1]
os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
if not stat.S_ISREG(os.fstat(file).st_mode):
    raise OSError(errno.EINVAL, "")
os.ftruncate(file, 0)
while True:
    view = memoryview(os.read(0, 1 << 20))
    if not view:
        break
    while view:
        view = view[os.write(file, view):]
os.fchmod(file, int(sys.argv[2]))
""")

SAVE = _make_program("""
import tarfile
sink = os.fdopen(1, "wb", closefd=False)
with sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
    for place in sys.argv[1:]:
        name, _, path = place.partition("=")
        archive.add(path, name)
""")

LOAD = _make_program("""
import shutil, tarfile
roots = dict(place.split("=", 1) for place in sys.argv[1:])
with os.fdopen(0, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r:") as archive:
    members, kept = [], set()
    for member in archive.getmembers():
        root, _, rest = member.name.partition("/")
        member.name = rest or "."
        members.append((member, roots[root]))
        if member.isdir():
            kept.add(os.path.normpath(os.path.join(roots[root], member.name)))
        if member.islnk():
            other, _, member.linkname = member.linkname.partition("/")
            if other != root:
                raise OSError(errno.EXDEV, "")
    for path in roots.values():  # directories that stay are not replaced: shells may be in them
        for directory, names, files in os.walk(path, topdown=False):
            for name in files + names:
                entry = os.path.join(directory, name)
                if os.path.islink(entry) or not os.path.isdir(entry):
                    os.unlink(entry)
                elif entry not in kept:
                    shutil.rmtree(entry)
    archive.extraction_filter = lambda member, path: member  # the sandbox is the limit, links may point anywhere
    for member, root in members:
        archive.extract(member, root, set_attrs=True, numeric_owner=True)
""")
