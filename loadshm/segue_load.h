/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reports the load of this process to a Segue agent, through a small file that both map into
 * memory. A report is one atomic operation on memory, without a system call, a lock or a wait.
 * docs/operate/load-sources.md describes the layout of the file.
 *
 *	struct segue_load load;
 *	int err = segue_load_open(&load, "/run/shop/load", 8);   0, or a negative errno
 *	segue_load_begin(&load);                                 before a request
 *	segue_load_end(&load);                                   after it
 *	segue_load_close(&load);
 *
 * In place of a file, it may be a BPF map: a path in a BPF file system is the pin of a map. The agent
 * reads a file at an interval, but a map when a connection is offered. If there is no such pin, the
 * process needs CAP_BPF to create the map.
 *
 * It needs C99 or C++ with GCC or Clang, on 64-bit Linux. Threads may share a struct segue_load. A
 * forked process shares its parent's slot, and is counted with it, until it closes the slot,
 * executes another program or ends. To be counted on its own, it closes that slot and opens the
 * file again.
 *
 * If the parent starts as root, its children may be unable to open the file. Then the parent calls
 * segue_load_prepare instead of segue_load_open, and each child that serves requests calls
 * segue_load_join before it begins the first one. All children together have one capacity.
 *
 * A descriptor stays open while the slot is taken. A process that closes all descriptors, as
 * daemons do when they start, must do so before it opens the file.
 */
#ifndef SEGUE_LOAD_H
#define SEGUE_LOAD_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/bpf.h>
#include <linux/magic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#error "segue_load.h needs open file description locks: define _GNU_SOURCE before the first #include"
#endif

enum { SEGUE_LOAD_FILE_SIZE = 4096, SEGUE_LOAD_HEADER_SIZE = 64, SEGUE_LOAD_VERSION = 1 };

/* The file as it lies in memory, in the byte order of the machine. */
struct segue_load_file {
	char magic[8]; /* "segueshm" */
	uint32_t version;
	uint32_t used;	   /* no process has used a slot from this one on */
	uint32_t capacity; /* of all processes together; 0: the sum of the slots */
	unsigned char unused[SEGUE_LOAD_HEADER_SIZE - 20]; /* zero */
	/* One for each process that reports: capacity << 32 | busy. */
	uint64_t slots[(SEGUE_LOAD_FILE_SIZE - SEGUE_LOAD_HEADER_SIZE) / sizeof(uint64_t)];
};

/* This process's slot. */
struct segue_load {
	struct segue_load_file *file;
	uint64_t *word; /* NULL: this process has no slot yet */
	int fd;		/* keeps the lock on the slot */
	pid_t pid;	/* the process that took the slot */
};

/* Replaces both numbers at once. capacity is at least 1; with 0 this process does not count. */
static inline void segue_load_set(struct segue_load *load, uint32_t busy, uint32_t capacity)
{
	__atomic_store_n(load->word, (uint64_t)capacity << 32 | busy, __ATOMIC_RELAXED);
}

/* Counts one more request (or worker, in the unit of the capacity) as busy. */
static inline void segue_load_begin(struct segue_load *load)
{
	__atomic_fetch_add(load->word, 1, __ATOMIC_RELAXED);
}

/* Undoes one segue_load_begin. If no request is busy, it does nothing. */
static inline void segue_load_end(struct segue_load *load)
{
	uint64_t old = __atomic_load_n(load->word, __ATOMIC_RELAXED);

	while ((uint32_t)old != 0 &&
	       !__atomic_compare_exchange_n(load->word, &old, old - 1, 1, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED))
		;
}

/* Writes the header of a new file, or checks that of an existing one. Several processes may write
 * it at the same time, because all write the same. */
static inline int segue_load_header(struct segue_load_file *file)
{
	static const char magic[8] = { 's', 'e', 'g', 'u', 'e', 's', 'h', 'm' };
	uint64_t word, now;

	memcpy(&word, magic, sizeof(word));
	now = __atomic_load_n((uint64_t *)(void *)file->magic, __ATOMIC_ACQUIRE);
	if (now == 0) {
		file->version = SEGUE_LOAD_VERSION;
		__atomic_store_n((uint64_t *)(void *)file->magic, word, __ATOMIC_RELEASE);
		return 0;
	}
	return now == word && file->version == SEGUE_LOAD_VERSION ? 0 : -EINVAL;
}

/* Locks the first free slot, and returns its index or a negative errno. `command` is F_OFD_SETLK for
 * a lock that belongs to the open file, or F_SETLK for a lock that belongs to this process. */
static inline int segue_load_take(int fd, struct segue_load_file *file, int command)
{
	uint32_t i, used, n = sizeof(file->slots) / sizeof(file->slots[0]);
	struct flock lock;

	for (i = 0; i < n; i++) {
		memset(&lock, 0, sizeof(lock));
		lock.l_type = F_WRLCK;
		lock.l_whence = SEEK_SET;
		lock.l_start = SEGUE_LOAD_HEADER_SIZE + (int)i * (int)sizeof(uint64_t);
		lock.l_len = sizeof(uint64_t);
		if (fcntl(fd, command, &lock) == 0)
			break;
		if (errno != EAGAIN && errno != EACCES)
			return -errno;
	}
	if (i == n)
		return -ENOSPC;
	used = __atomic_load_n(&file->used, __ATOMIC_RELAXED);
	while (used <= i && !__atomic_compare_exchange_n(&file->used, &used, i + 1, 1,
							 __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
	return (int)i;
}

/*
 * Returns a second descriptor of the open file. The lock of the slot lasts while the open file has
 * a descriptor. A mapping is not enough: on overlayfs the kernel maps the underlying file instead.
 * Numbers below 3 are left for the standard streams.
 */
static inline int segue_load_keep_open(int fd)
{
	int kept = fcntl(fd, F_DUPFD_CLOEXEC, 3);

	return kept < 0 ? -errno : kept;
}

/* Whether a path is in a BPF file system, so that it names a pinned map. */
static inline int segue_load_is_pin(const char *path)
{
	const char *slash = strrchr(path, '/');
	size_t n = slash == NULL ? 0 : (size_t)(slash - path) + 1;
	char folder[PATH_MAX] = ".";
	struct statfs fs;

	if (n >= sizeof(folder))
		return 0;
	if (n != 0) {
		memcpy(folder, path, n);
		folder[n] = '\0';
	}
	return statfs(folder, &fs) == 0 && (unsigned int)fs.f_type == BPF_FS_MAGIC;
}

/* bpf(2). Returns a negative errno on failure. */
static inline int segue_load_bpf(int command, union bpf_attr *attr)
{
	long result = syscall(__NR_bpf, command, attr, sizeof(*attr));

	return result < 0 ? -errno : (int)result;
}

/* Opens a pinned map, or pins one if fd is not -1. */
static inline int segue_load_pin(const char *path, int fd)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.pathname = (uint64_t)(uintptr_t)path;
	if (fd < 0)
		return segue_load_bpf(BPF_OBJ_GET, &attr);
	attr.bpf_fd = (uint32_t)fd;
	return segue_load_bpf(BPF_OBJ_PIN, &attr);
}

/*
 * Creates a map, and pins it with mode 0660. The kernel lets processes open the pin of a map only if
 * the types of key and value are known, and a process must open the pin to lock its slot. Type 1 is
 * a 32-bit number, type 2 a 64-bit number, and type 3 an array of type 2, for the whole file.
 */
static inline int segue_load_create(const char *path)
{
	enum { INTEGER = 1 << 24, ARRAY = 3 << 24, TYPES = 14 * 4, NAMES = 3 };
	static const struct {
		uint16_t magic;
		unsigned char version, flags;
		uint32_t header[5], types[14];
		char names[4];
	} description = {
		0xeb9f,
		1,
		0,
		{ 24, 0, TYPES, TYPES, NAMES },
		{ 1, INTEGER, 4, 32, 1, INTEGER, 8, 64, 0, ARRAY, 0, 2, 1,
		  SEGUE_LOAD_FILE_SIZE / 8 },
		{ '\0', 'n', '\0', '\0' },
	};
	union bpf_attr attr;
	int btf, map, err;

	memset(&attr, 0, sizeof(attr));
	attr.btf = (uint64_t)(uintptr_t)&description;
	attr.btf_size = 24 + TYPES + NAMES;
	btf = segue_load_bpf(BPF_BTF_LOAD, &attr);
	if (btf < 0)
		return btf;
	memset(&attr, 0, sizeof(attr));
	attr.map_type = BPF_MAP_TYPE_ARRAY;
	attr.key_size = 4;
	attr.value_size = SEGUE_LOAD_FILE_SIZE;
	attr.max_entries = 1;
	attr.map_flags = BPF_F_MMAPABLE;
	memcpy(attr.map_name, "segue_load", 10);
	attr.btf_fd = (uint32_t)btf;
	attr.btf_key_type_id = 1;
	attr.btf_value_type_id = 3;
	map = segue_load_bpf(BPF_MAP_CREATE, &attr);
	close(btf);
	if (map < 0)
		return map;
	err = segue_load_pin(path, map);
	close(map);
	if (err == 0 && chmod(path, 0660) != 0)
		err = -errno;
	return err;
}

/* -EINVAL unless a map has the type and the size of one for load reports. */
static inline int segue_load_check(int map)
{
	struct bpf_map_info info;
	union bpf_attr attr;
	int err;

	memset(&info, 0, sizeof(info));
	memset(&attr, 0, sizeof(attr));
	attr.info.bpf_fd = (uint32_t)map;
	attr.info.info_len = sizeof(info);
	attr.info.info = (uint64_t)(uintptr_t)&info;
	err = segue_load_bpf(BPF_OBJ_GET_INFO_BY_FD, &attr);
	if (err != 0)
		return err;
	return info.type == BPF_MAP_TYPE_ARRAY && info.value_size == SEGUE_LOAD_FILE_SIZE &&
			       info.max_entries == 1 && (info.map_flags & BPF_F_MMAPABLE)
		       ? 0
		       : -EINVAL;
}

/* Returns a descriptor of the map with this pin, or a negative errno. Creates the map if there is
 * none. Another process may create it at the same time. */
static inline int segue_load_map(const char *path)
{
	int map = segue_load_pin(path, -1), err;

	if (map == -ENOENT) {
		err = segue_load_create(path);
		if (err != 0 && err != -EEXIST)
			return err;
		map = segue_load_pin(path, -1);
	}
	if (map < 0)
		return map;
	err = segue_load_check(map);
	if (err == 0)
		return map;
	close(map);
	return err;
}

/* Gives a new file its size. Returns 0 or a negative errno. */
static inline int segue_load_size(int fd)
{
	struct stat st;

	if (fstat(fd, &st) != 0 || (st.st_size == 0 && ftruncate(fd, SEGUE_LOAD_FILE_SIZE) != 0))
		return -errno;
	return st.st_size == 0 || st.st_size == SEGUE_LOAD_FILE_SIZE ? 0 : -EINVAL;
}

/*
 * Maps the file, but takes no slot. Creates the file if there is none. Returns 0 or a negative
 * errno: -EINVAL for a file of another kind.
 */
static inline int segue_load_prepare(struct segue_load *load, const char *path)
{
	int is_pin = segue_load_is_pin(path), map = -1, fd, err = 0;
	void *page = MAP_FAILED;

	if (is_pin) {
		map = segue_load_map(path);
		if (map < 0)
			return map;
	}
	fd = open(path, O_RDWR | O_CLOEXEC | (is_pin ? 0 : O_CREAT), 0660);
	if (fd < 0)
		err = -errno;
	else if (!is_pin)
		err = segue_load_size(fd);
	if (err == 0) {
		page = mmap(NULL, SEGUE_LOAD_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED,
			    is_pin ? map : fd, 0);
		err = page == MAP_FAILED ? -errno
					 : segue_load_header((struct segue_load_file *)page);
	}
	if (err == 0) {
		load->file = (struct segue_load_file *)page;
		load->word = NULL;
		load->fd = segue_load_keep_open(fd);
		load->pid = 0;
		err = load->fd < 0 ? load->fd : 0;
	}
	if (fd >= 0)
		close(fd);
	if (map >= 0)
		close(map);
	if (err != 0 && page != MAP_FAILED)
		munmap(page, SEGUE_LOAD_FILE_SIZE);
	return err;
}

/*
 * Takes a slot in the file that the parent of this process has prepared. The lock belongs to this
 * process, and ends with it. capacity is that of all processes that have joined, together; it is at
 * least 1. Returns 0 or a negative errno: -ENOSPC if all slots are taken. The process must not close
 * another descriptor of the file, because that would end the lock (fcntl(2)).
 */
static inline int segue_load_join(struct segue_load *load, uint32_t capacity)
{
	int slot;

	if (capacity == 0)
		return -EINVAL;
	slot = segue_load_take(load->fd, load->file, F_SETLK);
	if (slot < 0)
		return slot;
	__atomic_store_n(&load->file->capacity, capacity, __ATOMIC_RELAXED);
	load->word = &load->file->slots[slot];
	load->pid = getpid();
	segue_load_set(load, 0, 1);
	return 0;
}

/*
 * Maps the file, and takes a slot. Creates the file if there is none. capacity is the number of
 * requests that this process serves at a time, at least 1. Returns 0 or a negative errno: -EINVAL
 * for a file of another kind or a capacity of 0, -ENOSPC if all slots are taken.
 */
static inline int segue_load_open(struct segue_load *load, const char *path, uint32_t capacity)
{
	int err, slot;

	if (capacity == 0)
		return -EINVAL;
	err = segue_load_prepare(load, path);
	if (err != 0)
		return err;
	slot = segue_load_take(load->fd, load->file, F_OFD_SETLK);
	if (slot < 0) {
		munmap(load->file, SEGUE_LOAD_FILE_SIZE);
		close(load->fd);
		return slot;
	}
	__atomic_store_n(&load->file->capacity, 0, __ATOMIC_RELAXED);
	load->word = &load->file->slots[slot];
	load->pid = getpid();
	segue_load_set(load, 0, capacity);
	return 0;
}

/* Releases the slot. A forked process that shares its parent's slot leaves it to the parent. */
static inline void segue_load_close(struct segue_load *load)
{
	if (load->word != NULL && getpid() == load->pid)
		segue_load_set(load, 0, 0);
	munmap(load->file, SEGUE_LOAD_FILE_SIZE);
	close(load->fd);
}

#endif
