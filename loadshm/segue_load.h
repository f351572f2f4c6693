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
 * It needs C99 or C++ with GCC or Clang, on 64-bit Linux. Threads may share a struct segue_load. A
 * forked process shares its parent's slot, and is counted with it, until it closes the slot,
 * executes another program or ends. To be counted on its own, it closes that slot and opens the
 * file again.
 *
 * A descriptor stays open while the slot is taken. A process that closes all descriptors, as
 * daemons do when they start, must do so before it opens the file.
 */
#ifndef SEGUE_LOAD_H
#define SEGUE_LOAD_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#error "segue_load.h needs open file description locks: define _GNU_SOURCE before the first #include"
#endif

enum { SEGUE_LOAD_FILE_SIZE = 4096, SEGUE_LOAD_HEADER_SIZE = 64, SEGUE_LOAD_VERSION = 1 };

/* The file as it lies in memory, in the byte order of the machine. */
struct segue_load_file {
	char magic[8]; /* "segueshm" */
	uint32_t version;
	unsigned char unused[SEGUE_LOAD_HEADER_SIZE - 12]; /* zero */
	/* One for each process that reports: capacity << 32 | busy. */
	uint64_t slots[(SEGUE_LOAD_FILE_SIZE - SEGUE_LOAD_HEADER_SIZE) / sizeof(uint64_t)];
};

/* This process's slot. */
struct segue_load {
	struct segue_load_file *file;
	uint64_t *word;
	int fd;	   /* keeps the lock on the slot */
	pid_t pid; /* the process that took the slot */
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

/* Locks the first free slot. Returns its index or a negative errno. */
static inline int segue_load_take(int fd, struct segue_load_file *file)
{
	int i, n = (int)(sizeof(file->slots) / sizeof(file->slots[0]));
	struct flock lock;

	for (i = 0; i < n; i++) {
		memset(&lock, 0, sizeof(lock));
		lock.l_type = F_WRLCK;
		lock.l_whence = SEEK_SET;
		lock.l_start = SEGUE_LOAD_HEADER_SIZE + i * (int)sizeof(uint64_t);
		lock.l_len = sizeof(uint64_t);
		if (fcntl(fd, F_OFD_SETLK, &lock) == 0)
			return i;
		if (errno != EAGAIN && errno != EACCES)
			return -errno;
	}
	return -ENOSPC;
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

/*
 * Maps the file, and takes a slot. Creates the file if there is none. capacity is the number of
 * requests that this process serves at a time, at least 1. Returns 0 or a negative errno: -EINVAL
 * for a file of another kind or a capacity of 0, -ENOSPC if all slots are taken.
 */
static inline int segue_load_open(struct segue_load *load, const char *path, uint32_t capacity)
{
	struct segue_load_file *file = NULL;
	struct stat st;
	int fd, kept = -1, err = 0, slot = 0;
	void *page;

	if (capacity == 0)
		return -EINVAL;
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0660);
	if (fd < 0)
		return -errno;
	if (fstat(fd, &st) != 0 || (st.st_size == 0 && ftruncate(fd, SEGUE_LOAD_FILE_SIZE) != 0))
		err = -errno;
	else if (st.st_size != 0 && st.st_size != SEGUE_LOAD_FILE_SIZE)
		err = -EINVAL;
	if (err == 0) {
		page = mmap(NULL, SEGUE_LOAD_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (page == MAP_FAILED)
			err = -errno;
		else
			file = (struct segue_load_file *)page;
	}
	if (err == 0)
		err = segue_load_header(file);
	if (err == 0) {
		slot = segue_load_take(fd, file);
		err = slot < 0 ? slot : 0;
	}
	if (err == 0) {
		kept = segue_load_keep_open(fd);
		err = kept < 0 ? kept : 0;
	}
	close(fd);
	if (err != 0) {
		if (file != NULL)
			munmap(file, SEGUE_LOAD_FILE_SIZE);
		return err;
	}
	load->file = file;
	load->word = &file->slots[slot];
	load->fd = kept;
	load->pid = getpid();
	segue_load_set(load, 0, capacity);
	return 0;
}

/* Releases the slot. A forked process that shares its parent's slot leaves it to the parent. */
static inline void segue_load_close(struct segue_load *load)
{
	if (getpid() == load->pid)
		segue_load_set(load, 0, 0);
	munmap(load->file, SEGUE_LOAD_FILE_SIZE);
	close(load->fd);
}

#endif
