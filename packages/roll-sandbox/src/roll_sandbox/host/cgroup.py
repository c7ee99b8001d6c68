"""Cgroups, versions 1 and 2: bounds on the processes and memory of a sandbox, and a count of its CPU time.

Groups are made below this process's group, so that the bounds of a container or job still apply. With version 2 that
group must delegate the controllers; where it cannot (it has processes of its own), its parent is tried.
"""

from __future__ import annotations

import errno
import os
import time

_CONTROLLERS = ("pids", "memory")
_CPU = "cpuacct"
"""The controller that counts CPU time in version 1, where it is mounted; in version 2 every group counts it."""
_PREFIX = "roll-sandbox-"
_REMOVE_S = 5.0
_SWEEP_S = 0.5
"""How long removing the groups of killed spawners may delay the start of another one."""
_NETWORK_SHARE = 8
"""1/8 of the memory may go to network buffers with version 1, which counts them separately."""


def _read(path):
    with open(path) as file:
        return file.read()


def _write(path, value):
    with open(path, "w") as file:
        file.write(str(value))


def _mounts():
    """Yield the mount point, path of the root in the hierarchy, type and options of every cgroup file system."""
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            yield fields[4], fields[3], kind, options.split(",")


def _own_directory(mount, root, path):
    """Return the directory of the group `path` under a mount of its hierarchy."""
    inside = os.path.relpath(path, root) if root != "/" else path.lstrip("/")
    return mount if inside in (".", "") or inside.startswith("..") else os.path.join(mount, inside)


def _find_base_directories():
    """Return, by controller, the directory below which groups can be made; {} if none can."""
    own = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(",") if names else ["unified"]:
            own[name] = path
    found = {}
    for mount, root, kind, options in _mounts():
        if kind == "cgroup":
            for name in (*_CONTROLLERS, _CPU):
                if name in options and name in own:
                    found[name] = _own_directory(mount, root, own[name])
        elif "unified" in own:
            directory = _own_directory(mount, root, own["unified"])
            for base in (directory, os.path.dirname(directory)):
                if base.startswith(mount) and _delegates_controllers(base):
                    found.update({name: found.get(name, base) for name in _CONTROLLERS})
                    break
    return found if set(_CONTROLLERS) <= set(found) else {}


def _delegates_controllers(base):
    """Return whether groups below `base` can have both controllers; enable them if possible."""
    control = os.path.join(base, "cgroup.subtree_control")
    try:
        if not set(_CONTROLLERS) <= set(_read(control).split()):
            _write(control, " ".join("+" + name for name in _CONTROLLERS))
        return set(_CONTROLLERS) <= set(_read(control).split())
    except OSError:
        return False


class CgroupPool:
    """All control groups of one spawner, in a directory named after its pid."""

    def __init__(self):
        self.roots = []
        self.by_controller = {}
        bases = _find_base_directories()
        _sweep(bases.values())
        for name, base in bases.items():
            root = os.path.join(base, _PREFIX + str(os.getpid()))
            if root not in self.roots:
                try:
                    os.mkdir(root)
                    if not os.path.exists(os.path.join(root, "cgroup.clone_children")):
                        _write(os.path.join(root, "cgroup.subtree_control"), "+pids +memory")
                except OSError:
                    if name == _CPU:
                        continue
                    self.close()
                    self.by_controller = {}
                    return
                self.roots.append(root)
            self.by_controller[name] = root

    @property
    def available(self):
        """Whether groups can be made here."""
        return bool(self.by_controller)

    @property
    def count_cpu(self):
        """Whether the groups count CPU time."""
        return _CPU in self.by_controller or bool(self.roots and os.path.exists(self.roots[0] + "/cpu.stat"))

    def make(self, slot):
        """Make the group of a slot."""
        return Cgroup({name: os.path.join(root, str(slot)) for name, root in self.by_controller.items()})

    def close(self):
        """Remove all groups; their processes must have ended."""
        for root in self.roots:
            for name in os.listdir(root) if os.path.isdir(root) else ():
                if os.path.isdir(os.path.join(root, name)):
                    _remove(os.path.join(root, name))
            _remove(root)
        self.roots = []


class Cgroup:
    """A control group that bounds the processes in it."""

    def __init__(self, directories):
        self.directories = directories
        for directory in set(directories.values()):
            os.makedirs(directory, exist_ok=True)
        self.version = 1 if os.path.exists(directories["memory"] + "/memory.limit_in_bytes") else 2
        self.bounds = None
        counter = self.cpu_counter()
        self.cpu = os.open(counter, os.O_RDONLY | os.O_CLOEXEC) if counter else -1
        """File descriptor of the CPU counter, which agents read whatever file system they see."""

    def set_limits(self, max_processes, memory_bytes):
        """Set the bounds, if they differ from the present ones."""
        if self.bounds == (max_processes, memory_bytes):
            return
        _write(self.directories["pids"] + "/pids.max", max_processes)
        memory = self.directories["memory"]
        if self.version == 2:
            _write(memory + "/memory.max", memory_bytes)
            _try_write(memory + "/memory.swap.max", 0)
        else:
            _try_write(memory + "/memory.memsw.limit_in_bytes", -1)
            _write(memory + "/memory.limit_in_bytes", memory_bytes)
            _try_write(memory + "/memory.memsw.limit_in_bytes", memory_bytes)
            # Data in loopback sockets is not in the limit above, and counts against the host's limit on socket memory.
            _try_write(memory + "/memory.kmem.tcp.limit_in_bytes", memory_bytes // _NETWORK_SHARE)
        self.bounds = (max_processes, memory_bytes)

    def enter(self):
        """Move this process into the group."""
        for directory in set(self.directories.values()):
            _write(directory + "/cgroup.procs", 0)

    def members(self):
        """List the pids of the live processes in the group, as this process sees them."""
        try:
            return [int(word) for word in _read(self.directories["pids"] + "/cgroup.procs").split()]
        except OSError:
            return []  # the group was removed

    def kill(self):
        """Kill everything in the group at once, and return whether the kernel can (version 2, from Linux 5.14)."""
        path = self.directories["pids"] + "/cgroup.kill"
        if not os.path.exists(path):
            return False
        _write(path, 1)
        return True

    def cpu_counter(self):
        """Return the file that counts the CPU time of all processes ever in the group; empty if nothing counts it."""
        if self.version == 2:
            return self.directories["memory"] + "/cpu.stat"
        return self.directories[_CPU] + "/cpuacct.usage" if _CPU in self.directories else ""

    def counters(self):
        """Return the files that count OOM kills and refused forks, each with the word before its count."""
        memory = "memory.oom_control" if self.version == 1 else "memory.events"
        return (
            (os.path.join(self.directories["memory"], memory), "oom_kill"),
            (os.path.join(self.directories["pids"], "pids.events"), "max"),
        )


def _try_write(path, value):
    try:
        _write(path, value)
    except OSError:
        return  # no swap accounting here


def _remove(directory, give_up=None):
    """Remove a group; retry until `give_up`, since the kernel releases ended processes a moment after their end."""
    give_up = time.monotonic() + _REMOVE_S if give_up is None else give_up
    while True:
        try:
            os.rmdir(directory)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > give_up:
                return
            time.sleep(0.005)


def _sweep(bases):
    """Remove the groups that killed spawners left. CgroupPool still in use are left to the next spawner."""
    give_up = time.monotonic() + _SWEEP_S
    for base in set(bases):
        for name in os.listdir(base):
            number = name[len(_PREFIX) :]
            if name.startswith(_PREFIX) and number.isdigit() and not os.path.exists("/proc/" + number):
                _remove_tree(os.path.join(base, name), give_up)


def _remove_tree(directory, give_up):
    try:
        for entry in os.listdir(directory):
            if os.path.isdir(os.path.join(directory, entry)):
                _remove(os.path.join(directory, entry), give_up)
    except FileNotFoundError:
        return  # another spawner was faster
    _remove(directory, give_up)
