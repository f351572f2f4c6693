// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
)

// Apache reads the scoreboard of an Apache httpd 2.4 on 64-bit Linux, in which each worker keeps
// its state: a process under the MPM prefork, a thread under worker and event.
type Apache struct {
	path    string
	workers uint32
	buffer  []byte
}

// NewApache returns the source for path: the file of the directive ScoreBoardFile, an absolute
// path. The file need not exist yet. workers is the value of the directive MaxRequestWorkers, which
// the scoreboard does not contain. If workers is 0, the capacity is an upper bound: ServerLimit
// times the threads of a process.
func NewApache(path string, workers uint32) *Apache {
	return &Apache{path: filepath.Clean(path), workers: workers}
}

// Read counts the workers that serve a connection.
func (a *Apache) Read() (Load, error) {
	board, err := a.read()
	if err != nil {
		return Load{}, fmt.Errorf("apache scoreboard: %w", err)
	}
	l := board.load()
	if a.workers != 0 {
		l.Capacity = a.workers
	}
	return l, nil
}

// read returns the scoreboard. Where it is depends on the build of the Apache Portable Runtime
// (APR): in the file, in POSIX shared memory named after the file (Debian, Ubuntu), or in System V
// shared memory, with only its size in the file (APR's default).
func (a *Apache) read() (scoreboard, error) {
	path := a.path
	err := a.fill(path)
	if errors.Is(err, fs.ErrNotExist) {
		path = posixShared(a.path)
		err = a.fill(path)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("neither %s nor %s exists; start Apache with this ScoreBoardFile", a.path, path)
		}
	}
	if err != nil {
		return scoreboard{}, err
	}
	content, err := a.unwrap(path)
	if err != nil {
		return scoreboard{}, err
	}
	board, err := parseScoreboard(content)
	if err != nil {
		return scoreboard{}, fmt.Errorf("%s: %w", path, err)
	}
	return board, nil
}

// fill reads a file into the buffer.
func (a *Apache) fill(path string) (err error) {
	a.buffer, err = readRegular(path, a.buffer, sizeWord, sizeWord+maxScoreboard)
	return err
}

// sizeWord is the length, in bytes, of the first field of APR's file: the size of the shared
// memory, as a size_t.
const sizeWord = 8

// unwrap returns the scoreboard that belongs to the file in the buffer. If the file has only the
// size field, the scoreboard is in System V shared memory.
func (a *Apache) unwrap(path string) ([]byte, error) {
	size := binary.NativeEndian.Uint64(a.buffer)
	if len(a.buffer) == sizeWord {
		return a.attach(path, size)
	}
	if size != uint64(len(a.buffer)) {
		return nil, fmt.Errorf("%s: not shared memory of Apache: its first %d bytes give the size %d, but its size is %d",
			path, sizeWord, size, len(a.buffer))
	}
	return a.buffer[sizeWord:], nil
}

// layout has the sizes of the three structures of a scoreboard (httpd: include/scoreboard.h), in
// bytes and rounded up to a multiple of 8. A scoreboard has one global_score, ServerLimit
// process_scores, and ServerLimit x ThreadLimit worker_scores.
type layout struct{ global, process, worker int }

// layouts are those of httpd 2.4 on 64-bit Linux, with the first release of each. With the same
// limits, a scoreboard of each layout is larger than one of the layout before. So the size of a
// scoreboard identifies its layout.
var layouts = []layout{
	{24, 32, 248}, // 2.4.1
	{24, 40, 248}, // 2.4.17
	{24, 40, 264}, // 2.4.20
	{56, 40, 272}, // 2.4.35
	{56, 40, 336}, // 2.4.37
}

// size returns the size of a scoreboard with ServerLimit servers and ThreadLimit threads, in bytes.
func (l layout) size(servers, threads int) int {
	return l.global + servers*(l.process+threads*l.worker)
}

// Offsets of fields within their structures, in bytes. They are the same in every layout.
const (
	globalServerLimit = 0  // int
	globalThreadLimit = 4  // int
	processPID        = 0  // pid_t
	processQuiescing  = 8  // char
	workerStatus      = 20 // unsigned char
)

// The bounds of ServerLimit and ThreadLimit are those of the MPMs (MAX_SERVER_LIMIT,
// MAX_THREAD_LIMIT). maxScoreboard is far above the size for all workers that a host can run.
const (
	maxServers    = 200000
	maxThreads    = 100000
	maxScoreboard = 256 << 20 // bytes
)

// States of a worker: the constants SERVER_* of include/scoreboard.h.
const (
	serverDead     = 0
	serverStarting = 1
	serverReady    = 2
	serverIdleKill = 10
	serverStates   = 11 // number of states
)

// scoreboard is a copy of a scoreboard. Apache writes while it is copied, so the states of workers
// may be of different moments.
type scoreboard struct {
	layout
	servers, threads int
	content          []byte
}

// parseScoreboard finds the limits and the layout of a scoreboard.
func parseScoreboard(content []byte) (scoreboard, error) {
	if len(content) < layouts[0].global {
		return scoreboard{}, fmt.Errorf("size is %d bytes, too small for a scoreboard", len(content))
	}
	servers := int(int32(binary.NativeEndian.Uint32(content[globalServerLimit:])))
	threads := int(int32(binary.NativeEndian.Uint32(content[globalThreadLimit:])))
	if servers < 1 || servers > maxServers {
		return scoreboard{}, fmt.Errorf("ServerLimit is %d, outside 1 to %d", servers, maxServers)
	}
	if threads < 1 || threads > maxThreads {
		return scoreboard{}, fmt.Errorf("ThreadLimit is %d, outside 1 to %d", threads, maxThreads)
	}
	for _, l := range layouts {
		if l.size(servers, threads) == len(content) {
			return scoreboard{l, servers, threads, content}, nil
		}
	}
	return scoreboard{}, fmt.Errorf("size is %d bytes, which does not fit ServerLimit %d and ThreadLimit %d in any httpd 2.4 on 64-bit Linux",
		len(content), servers, threads)
}

// load counts the busy workers, and finds the capacity. Busy workers are those that mod_status
// counts: those of live processes that are not being replaced, in any state but dead, starting,
// ready and dying. After a graceful restart of prefork, a worker that still finishes its request
// counts, because it occupies its slot. Newer versions of mod_status show such workers separately.
//
// A process never uses its slots beyond ThreadsPerChild. So the highest slot in use, of all
// processes, gives the number of threads of a process.
func (s scoreboard) load() Load {
	busy, used := 0, 1 // used: slots of a process
	for i := range s.servers {
		process := s.content[s.global+i*s.process:]
		alive := binary.NativeEndian.Uint32(process[processPID:]) != 0 && process[processQuiescing] == 0
		workers := s.content[s.global+s.servers*s.process+i*s.threads*s.worker:]
		for j := range s.threads {
			state := workers[j*s.worker+workerStatus]
			if state == serverDead {
				continue
			}
			used = max(used, j+1)
			if alive && serves(state) {
				busy++
			}
		}
	}
	return Load{Busy: uint32(busy), Capacity: uint32(s.servers * used)}
}

// serves tells whether a worker in this state serves a connection.
func serves(state byte) bool {
	switch state {
	case serverDead, serverStarting, serverReady, serverIdleKill:
		return false
	}
	return state < serverStates
}
