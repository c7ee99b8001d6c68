"""Control groups (cgroups, versions 1 and 2): bound a sandbox's processes and memory, and count its CPU time.

Groups are created below the group of this process, so that the bounds of a container or job still apply. With version
2, that group must delegate the controllers; if it cannot, since it contains processes, its parent is tried.
"""

from __future__ import annotations

import errno
import os
import time

_CONTROLLERS = ("pids", "memory")
_CPU_CONTROLLER = "cpuacct"
"""The controller that counts CPU time in version 1, if it is mounted; in version 2 every group counts it."""
_PREFIX = "roll-sandbox-"
_REMOVE_TIMEOUT_S = 5.0
_CLEANUP_TIMEOUT_S = 0.5
"""Maximum seconds by which removing the groups of killed spawners may delay the start of a spawner."""
_NETWORK_MEMORY_DIVISOR = 8
"""Divisor of the memory limit for network buffers, which version 1 counts separately."""


def _read_file(path):
    with open(path) as file:
        return file.read()


def _write_file(path, value):
    with open(path, "w") as file:
        file.write(str(value))


def _list_mounts():
    """Yield, for every cgroup file system, its mount point, the path of its root in the hierarchy, type and options."""
    for line in _read_file("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            yield fields[4], fields[3], kind, options.split(",")


def _find_own_directory(mount, root, path):
    """Return the directory of the group `path` in the cgroup file system at `mount`, whose root is the group `root`."""
    inside = os.path.relpath(path, root) if root != "/" else path.lstrip("/")
    return mount if inside in (".", "") or inside.startswith("..") else os.path.join(mount, inside)


def _find_base_directories():
    """Return, by controller, the directory below which groups can be created; {} if no groups can be created."""
    paths = {}
    for line in _read_file("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(",") if names else ["unified"]:
            paths[name] = path
    bases = {}
    for mount, root, kind, options in _list_mounts():
        if kind == "cgroup":
            for name in (*_CONTROLLERS, _CPU_CONTROLLER):
                if name in options and name in paths:
                    bases[name] = _find_own_directory(mount, root, paths[name])
        elif "unified" in paths:
            directory = _find_own_directory(mount, root, paths["unified"])
            # In version 2, only a group without processes can delegate controllers to the groups below it ("No Internal
            # Process Constraint", cgroup-v2.rst).
            for base in (directory, os.path.dirname(directory)):
                if base.startswith(mount) and _delegate_controllers(base):
                    bases.update({name: bases.get(name, base) for name in _CONTROLLERS})
                    break
    return bases if set(_CONTROLLERS) <= set(bases) else {}


def _delegate_controllers(base):
    """Enable the controllers `pids` and `memory` for groups below `base`; return False if that is not possible."""
    control = os.path.join(base, "cgroup.subtree_control")
    try:
        if not set(_CONTROLLERS) <= set(_read_file(control).split()):
            _write_file(control, " ".join("+" + name for name in _CONTROLLERS))
        return set(_CONTROLLERS) <= set(_read_file(control).split())
    except OSError:
        return False


class CgroupPool:
    """All control groups of one spawner, in a directory named after its pid."""

    def __init__(self):
        self.roots = []
        self.by_controller = {}
        bases = _find_base_directories()
        _remove_leftovers(bases.values())
        for name, base in bases.items():
            root = os.path.join(base, _PREFIX + str(os.getpid()))
            if root not in self.roots:
                try:
                    os.mkdir(root)
                    # Only version 1 has this file; its groups need no permission for controllers below them.
                    if not os.path.exists(os.path.join(root, "cgroup.clone_children")):
                        _write_file(os.path.join(root, "cgroup.subtree_control"), "+pids +memory")
                except OSError:
                    if name == _CPU_CONTROLLER:
                        continue
                    self.close()
                    self.by_controller = {}
                    return
                self.roots.append(root)
            self.by_controller[name] = root

    @property
    def is_available(self):
        """True if groups can be created here."""
        return bool(self.by_controller)

    @property
    def counts_cpu(self):
        """True if the groups count CPU time."""
        return _CPU_CONTROLLER in self.by_controller or bool(self.roots and os.path.exists(self.roots[0] + "/cpu.stat"))

    def make_group(self, slot):
        """Create and return the group of the slot with this number."""
        return Cgroup({name: os.path.join(root, str(slot)) for name, root in self.by_controller.items()})

    def close(self):
        """Remove all groups; their processes must have ended."""
        for root in self.roots:
            for name in os.listdir(root) if os.path.isdir(root) else ():
                if os.path.isdir(os.path.join(root, name)):
                    _remove_group(os.path.join(root, name))
            _remove_group(root)
        self.roots = []


class Cgroup:
    """A control group, with one directory per controller; it limits the resources of the processes in the group."""

    def __init__(self, directories):
        self.directories = directories
        for directory in set(directories.values()):
            os.makedirs(directory, exist_ok=True)
        self.version = 1 if os.path.exists(directories["memory"] + "/memory.limit_in_bytes") else 2
        self.bounds = None
        counter = self.find_cpu_counter()
        self.cpu = os.open(counter, os.O_RDONLY | os.O_CLOEXEC) if counter else -1
        """File descriptor of the CPU counter, which agents inherit, since they cannot open its path; -1 if there is no
        counter."""

    def set_limits(self, max_processes, memory_bytes):
        """Set the limits if they differ from the current limits."""
        if self.bounds == (max_processes, memory_bytes):
            return
        _write_file(self.directories["pids"] + "/pids.max", max_processes)
        memory = self.directories["memory"]
        if self.version == 2:
            _write_file(memory + "/memory.max", memory_bytes)
            # `memory.max` does not bound swap: a program that reaches it would continue, slowly.
            _try_write(memory + "/memory.swap.max", 0)
        else:
            # The limit including swap must not be below the limit without swap (cgroup-v1/memory.rst): lift it first.
            _try_write(memory + "/memory.memsw.limit_in_bytes", -1)
            _write_file(memory + "/memory.limit_in_bytes", memory_bytes)
            _try_write(memory + "/memory.memsw.limit_in_bytes", memory_bytes)
            # Data in loopback sockets does not count against the limit above, but against the host's socket memory.
            _try_write(memory + "/memory.kmem.tcp.limit_in_bytes", memory_bytes // _NETWORK_MEMORY_DIVISOR)
        self.bounds = (max_processes, memory_bytes)

    def enter(self):
        """Move this process into the control group."""
        for directory in set(self.directories.values()):
            # 0 stands for the writing process (cgroups(7)).
            _write_file(directory + "/cgroup.procs", 0)

    def list_pids(self):
        """List the pids of the live processes in the group, in the PID namespace of this process."""
        try:
            return [int(word) for word in _read_file(self.directories["pids"] + "/cgroup.procs").split()]
        except OSError:
            return []  # the group was removed

    def kill(self):
        """Kill all processes in the group at once; return False if that is not supported (version 1, Linux < 5.14)."""
        path = self.directories["pids"] + "/cgroup.kill"
        if not os.path.exists(path):
            return False
        _write_file(path, 1)
        return True

    def find_cpu_counter(self):
        """Return the path of the CPU counter, which includes all former processes of the group; empty if there is no
        counter.
        """
        if self.version == 2:
            return self.directories["memory"] + "/cpu.stat"
        return self.directories[_CPU_CONTROLLER] + "/cpuacct.usage" if _CPU_CONTROLLER in self.directories else ""

    def list_counters(self):
        """Return the files that count OOM kills and refused forks, each with the word that precedes the count."""
        memory = "memory.oom_control" if self.version == 1 else "memory.events"
        return (
            (os.path.join(self.directories["memory"], memory), "oom_kill"),
            (os.path.join(self.directories["pids"], "pids.events"), "max"),
        )


def _try_write(path, value):
    try:
        _write_file(path, value)
    except OSError:
        return  # no swap accounting here


def _remove_group(directory, deadline=None):
    """Remove a group; retry until the time `deadline`, since the kernel releases processes a moment after their end."""
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S if deadline is None else deadline
    while True:
        try:
            os.rmdir(directory)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return
            time.sleep(0.005)


def _remove_leftovers(bases):
    """Remove the groups of killed spawners. Groups that still have processes are left for the next spawner."""
    deadline = time.monotonic() + _CLEANUP_TIMEOUT_S
    for base in set(bases):
        for name in os.listdir(base):
            number = name[len(_PREFIX) :]
            # If another process has the spawner's pid by now, the group stays until that has ended.
            if name.startswith(_PREFIX) and number.isdigit() and not os.path.exists("/proc/" + number):
                _remove_tree(os.path.join(base, name), deadline)


def _remove_tree(directory, deadline):
    try:
        for entry in os.listdir(directory):
            if os.path.isdir(os.path.join(directory, entry)):
                _remove_group(os.path.join(directory, entry), deadline)
    except FileNotFoundError:
        return  # another spawner was faster
    _remove_group(directory, deadline)
