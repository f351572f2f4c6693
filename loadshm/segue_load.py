# SPDX-License-Identifier: Apache-2.0

"""Reports the load of this process to a Segue agent, by a small file that both map into memory.

A report is a store to memory: no system call and no waiting. The layout of the file is described in
docs/operate/load-sources.md. Python 3.9 or later, on 64-bit Linux.

    load = segue_load.Reporter("/run/shop/load", capacity=8)
    with load:          # around each request
        ...

Threads may share a Reporter. A Reporter counts one process. A forked process must close the
Reporter of its parent, and make its own. The parent's slot stays taken, even after the parent has
died, until the forked process closes that Reporter, executes another program or ends.

A Reporter holds a file descriptor: a process that closes all descriptors, as daemons do when they
start, must do so before it makes one.
"""

import errno
import fcntl
import mmap
import os
import struct
import sys
import threading

_FILE_SIZE = 4096
_HEADER_SIZE = 64
_SLOT_SIZE = 8
_SLOTS = (_FILE_SIZE - _HEADER_SIZE) // _SLOT_SIZE
_MAGIC = int.from_bytes(b"segueshm", sys.byteorder)
_VERSION = 1


class Reporter:
    """This process's slot in the file at path, which is made if there is none.

    capacity is how many requests this process serves at a time when it is full, at least 1. Raises
    OSError, or ValueError for a file of another kind.
    """

    def __init__(self, path, capacity):
        if capacity < 1:
            raise ValueError(f"{path}: capacity is {capacity}, below 1")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            size = os.fstat(fd).st_size
            if size == 0:
                os.ftruncate(fd, _FILE_SIZE)
            elif size != _FILE_SIZE:
                raise ValueError(f"{path}: size is {size} bytes, not {_FILE_SIZE}")
            # The mmap object keeps a duplicate of the descriptor, which keeps the lock. A mapping
            # alone would not: on overlayfs the kernel maps the underlying file instead.
            self._page = mmap.mmap(fd, _FILE_SIZE)
            # The items have 64 bits. A single store writes each, so no reader sees half of it.
            self._words = memoryview(self._page).cast("Q")
            self._check(path)
            slot = self._take(fd, path)
        finally:
            os.close(fd)
        self._pid = os.getpid()
        self._slot = _HEADER_SIZE // _SLOT_SIZE + slot
        self._mutex = threading.Lock()
        self.set(0, capacity)

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

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *exception):
        self.end()
