# SPDX-License-Identifier: Apache-2.0

"""Reports the load of this process to a Segue agent, by a small file that both map into memory.

A report is a store to memory: no system call and no waiting. The layout of the file is described in
docs/operate/load-sources.md. Python 3.9 or later, on 64-bit Linux.

    load = segue_load.Reporter("/run/shop/load", capacity=8)
    with load:          # around each request
        ...

In place of a file, it may be a BPF map: a path in a BPF file system is the pin of a map. The agent
reads a file at an interval, but a map when a connection is offered. If there is no such pin, the
process needs CAP_BPF to create the map. Maps work on x86-64 and on 64-bit ARM.

Threads may share a Reporter. A Reporter counts one process. A forked process must close the
Reporter of its parent, and make its own. The parent's slot stays taken, even after the parent has
died, until the forked process closes that Reporter, executes another program or ends.

A Reporter holds a file descriptor: a process that closes all descriptors, as daemons do when they
start, must do so before it makes one.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
import threading

_FILE_SIZE = 4096
_HEADER_SIZE = 64
_SLOT_SIZE = 8
_SLOTS = (_FILE_SIZE - _HEADER_SIZE) // _SLOT_SIZE
_MAGIC = int.from_bytes(b"segueshm", sys.byteorder)
_VERSION = 1

# The commands of bpf(2), and its number.
_MAP_CREATE, _OBJ_PIN, _OBJ_GET, _GET_INFO, _BTF_LOAD = 0, 6, 7, 15, 18
_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_BPF_FS_MAGIC = 0xCAFE4A11
_MMAPABLE = 1 << 10


def _bpf(path, command, attributes):
    """Makes the system call bpf(2), whose argument is a union bpf_attr."""
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.create_string_buffer(attributes, 120)
    result = libc.syscall(_SYS_BPF[platform.machine()], command, argument, 120)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"bpf(2) command {command}: {os.strerror(number)}", path)
    return result


def _is_pin(path):
    """Tells whether a path is in a BPF file system, so that it names a pinned map."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = ctypes.create_string_buffer(120)  # struct statfs, which begins with the type
    folder = os.path.dirname(path) or "."
    if libc.statfs(os.fsencode(folder), result) != 0:
        return False
    return struct.unpack_from("=Q", result)[0] & 0xFFFFFFFF == _BPF_FS_MAGIC


def _open_map(path):
    """Returns a descriptor of the map with this pin, which is made if there is none."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    get = struct.pack("=QII", ctypes.addressof(name), 0, 0)
    try:
        fd = _bpf(path, _OBJ_GET, get)
    except FileNotFoundError:
        try:
            _create_map(path, name)
        except FileExistsError:
            pass  # another process has made it
        fd = _bpf(path, _OBJ_GET, get)
    info = ctypes.create_string_buffer(24)
    _bpf(path, _GET_INFO, struct.pack("=IIQ", fd, 24, ctypes.addressof(info)))
    kind, _, _, size, entries, flags = struct.unpack("=6I", info)
    if (kind, size, entries) != (2, _FILE_SIZE, 1) or not flags & _MMAPABLE:
        os.close(fd)
        raise ValueError(f"{path}: not a map of load reports")
    return fd


def _create_map(path, name):
    """Creates a map, and pins it with mode 0660.

    The kernel lets processes open the pin of a map only if the types of key and value are known:
    type 1 is a 32-bit number, 2 a 64-bit number, 3 an array of type 2.
    """
    integer, array = 1 << 24, 3 << 24
    types = struct.pack("=14I", 1, integer, 4, 32, 1, integer, 8, 64, 0, array, 0, 2, 1, _FILE_SIZE // 8)
    names = b"\0n\0"
    header = struct.pack("=HBB5I", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(names))
    btf = ctypes.create_string_buffer(header + types + names, len(header + types + names))
    attributes = struct.pack("=QQI", ctypes.addressof(btf), 0, len(btf))
    types_fd = _bpf(path, _BTF_LOAD, attributes)
    try:
        attributes = struct.pack(
            "=7I16s4I", 2, 4, _FILE_SIZE, 1, _MMAPABLE, 0, 0, b"segue_load", 0, types_fd, 1, 3
        )
        fd = _bpf(path, _MAP_CREATE, attributes)
    finally:
        os.close(types_fd)
    try:
        _bpf(path, _OBJ_PIN, struct.pack("=QII", ctypes.addressof(name), fd, 0))
    finally:
        os.close(fd)
    os.chmod(path, 0o660)


class Reporter:
    """This process's slot in the file at path, which is made if there is none.

    capacity is how many requests this process serves at a time when it is full, at least 1. Raises
    OSError, or ValueError for a file of another kind.
    """

    def __init__(self, path, capacity):
        if capacity < 1:
            raise ValueError(f"{path}: capacity is {capacity}, below 1")
        self._fd = self._open(path)
        try:
            # The items have 64 bits. A single store writes each, so no reader sees half of it.
            self._words = memoryview(self._page).cast("Q")
            self._check(path)
            slot = self._take(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise
        # If another process changes the number of used slots meanwhile, the agent corrects it.
        (used,) = struct.unpack_from("=I", self._page, 12)
        if used <= slot:
            struct.pack_into("=I", self._page, 12, slot + 1)
        struct.pack_into("=I", self._page, 16, 0)
        self._pid = os.getpid()
        self._slot = _HEADER_SIZE // _SLOT_SIZE + slot
        self._mutex = threading.Lock()
        self.set(0, capacity)

    def _open(self, path):
        """Maps the file or the map, and returns a descriptor that keeps the lock.

        A mapping alone would not keep it: on overlayfs the kernel maps the underlying file instead.
        """
        if _is_pin(path):
            fd = _open_map(path)
            try:
                self._page = mmap.mmap(fd, _FILE_SIZE)
            finally:
                os.close(fd)
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            size = os.fstat(fd).st_size
            if size == 0:
                os.ftruncate(fd, _FILE_SIZE)
            elif size != _FILE_SIZE:
                raise ValueError(f"{path}: size is {size} bytes, not {_FILE_SIZE}")
            self._page = mmap.mmap(fd, _FILE_SIZE)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, path):
        """Writes the header of a new file, or checks that of an existing one.

        Several processes may write it at the same time, because all write the same.
        """
        if self._words[0] == 0:
            struct.pack_into("=I", self._page, 8, _VERSION)
            self._words[0] = _MAGIC
        (version,) = struct.unpack_from("=I", self._page, 8)
        if self._words[0] != _MAGIC or version != _VERSION:
            raise ValueError(f"{path}: not a file of load reports, version {_VERSION}")

    @staticmethod
    def _take(fd, path):
        """Locks the first free slot and returns its index."""
        for slot in range(_SLOTS):
            start = _HEADER_SIZE + slot * _SLOT_SIZE
            # struct flock: type, whence, start, length, process.
            lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, start, _SLOT_SIZE, 0)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
                return slot
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
        raise OSError(errno.ENOSPC, f"all {_SLOTS} slots are taken", path)

    def set(self, busy, capacity):
        """Replaces both numbers at once. With capacity 0 this process does not count."""
        with self._mutex:
            self._busy, self._capacity = busy, capacity
            self._store()

    def begin(self):
        """Counts one more request (or worker, in the unit of the capacity) as busy."""
        with self._mutex:
            self._busy += 1
            self._store()

    def end(self):
        """Undoes one begin. Without one to undo it does nothing."""
        with self._mutex:
            self._busy = max(0, self._busy - 1)
            self._store()

    def _store(self):
        self._words[self._slot] = self._capacity << 32 | self._busy

    def close(self):
        """Releases the slot. A forked process leaves its parent's slot to the parent."""
        if os.getpid() == self._pid:
            self.set(0, 0)
        self._words.release()
        self._page.close()
        os.close(self._fd)

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *exception):
        self.end()
