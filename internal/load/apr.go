// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// posixFolder is where glibc's shm_open puts the files of shared memory (shm_overview(7)).
const posixFolder = "/dev/shm"

// posixShared returns the file of the POSIX shared memory that APR uses in place of the file at
// path (apr: shmem/unix/shm.c, make_shm_open_safe_name). Its name consists of two hashes of path:
// that of Bernstein, with the factor 33, and that of Sedgewick, with a factor that changes.
func posixShared(path string) string {
	var times33, sedgewick uint32
	var factor uint32 = 63689
	for _, c := range []byte(path) {
		times33 = times33*33 + uint32(c)
		sedgewick = sedgewick*factor + uint32(c)
		factor *= 378551
	}
	return filepath.Join(posixFolder, fmt.Sprintf("ShM.%xH%x", times33, sedgewick))
}

// systemVKey returns the key of the System V shared memory that belongs to a file. APR calls
// ftok(3) with the path, and with the last byte of a hash of the path (with the factor 33) as
// proj_id.
func systemVKey(path string) (int, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	stat := info.Sys().(*syscall.Stat_t)
	var project uint32
	for _, c := range []byte(path) {
		project = project*33 + uint32(c)
	}
	return int(int32(uint32(stat.Ino&0xffff) | uint32(stat.Dev&0xff)<<16 | project&0xff<<24)), nil
}

// attach copies the scoreboard from the System V shared memory that belongs to the file. size is
// the size that the file gives. The memory may be larger.
func (a *Apache) attach(path string, size uint64) ([]byte, error) {
	key, err := systemVKey(path)
	if err != nil {
		return nil, err
	}
	id, err := unix.SysvShmGet(key, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: open its System V shared memory, key %#x: %w", path, uint32(key), err)
	}
	shared, err := unix.SysvShmAttach(id, 0, unix.SHM_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("%s: attach its System V shared memory, key %#x: %w", path, uint32(key), err)
	}
	defer unix.SysvShmDetach(shared)
	if uint64(len(shared)) < size || size > maxScoreboard {
		return nil, fmt.Errorf("%s: gives the size %d, but its System V shared memory, key %#x, has %d bytes",
			path, size, uint32(key), len(shared))
	}
	a.buffer = append(a.buffer[:0], shared[:size]...)
	return a.buffer, nil
}
