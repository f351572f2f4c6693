// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// Memory is the memory of a lab's balancers, in bytes.
type Memory struct {
	// Processes is the resident memory of all processes on the balancers, such as proxies, without
	// pages of files: several processes share their program, and maps that a process has mapped are
	// in Kernel.
	Processes uint64
	// Kernel is the memory of the BPF maps and programs that these processes have opened, as far as
	// the kernel reports it.
	Kernel uint64
}

// BalancerMemory returns the present memory of the lab's balancers.
func (l *Lab) BalancerMemory() (m Memory, err error) {
	objects := bpfObjects{}
	for _, n := range l.Nodes {
		if n.Role != RoleBalancer {
			continue
		}
		pids, err := processesIn(n.namespacePath())
		if err != nil {
			return m, err
		}
		for _, pid := range pids {
			resident, err := residentMemory(pid)
			if err == nil {
				err = objects.addOf(pid)
			}
			if hasEnded(err) {
				continue
			}
			if err != nil {
				return m, fmt.Errorf("memory of process %d on %s: %w", pid, n.Name, err)
			}
			m.Processes += resident
		}
	}
	m.Kernel = objects.sum()
	return m, nil
}

// hasEnded tells whether an error of a file in /proc says that its process has ended.
func hasEnded(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}

// residentMemory returns the resident memory of a process without pages of files.
func residentMemory(pid int) (uint64, error) {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return 0, err
	}
	status, err := process.NewStatus()
	return status.RssAnon + status.RssShmem, err
}

// bpfObject identifies a BPF map or program: its key in /proc/PID/fdinfo, and its number.
type bpfObject struct {
	key string
	id  uint32
}

const (
	mapKey     = "map_id"
	programKey = "prog_id"
	memoryKey  = "memlock" // bytes
	typeKey    = "map_type"
)

// bpfObjects has the memory of BPF maps and programs, each once.
type bpfObjects map[bpfObject]uint64

func (o bpfObjects) sum() (bytes uint64) {
	for _, size := range o {
		bytes += size
	}
	return bytes
}

// addOf adds the maps and programs that a process has opened, and the maps inside these maps.
func (o bpfObjects) addOf(pid int) error {
	directory := filepath.Join("/proc", strconv.Itoa(pid), "fdinfo")
	descriptors, err := os.ReadDir(directory)
	if err != nil {
		return err
	}
	for _, d := range descriptors {
		text, err := os.ReadFile(filepath.Join(directory, d.Name()))
		if hasEnded(err) { // the process has closed the descriptor
			continue
		}
		if err == nil {
			err = o.add(fdInfo(text))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fdInfo returns the numbers in a file of /proc/PID/fdinfo.
func fdInfo(text []byte) map[string]uint64 {
	numbers := map[string]uint64{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		if n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64); err == nil {
			numbers[key] = n
		}
	}
	return numbers
}

// add adds the map or the program of a descriptor. It does nothing for other descriptors.
func (o bpfObjects) add(info map[string]uint64) error {
	if id, ok := info[programKey]; ok && info[memoryKey] > 0 { // a link to a program has no memory
		o[bpfObject{programKey, uint32(id)}] = info[memoryKey]
	}
	id, ok := info[mapKey]
	if !ok {
		return nil
	}
	o[bpfObject{mapKey, uint32(id)}] = info[memoryKey]
	if ebpf.MapType(info[typeKey]) == ebpf.ArrayOfMaps {
		return o.addInside(ebpf.MapID(id))
	}
	return nil
}

// addInside adds the maps inside an array of maps.
func (o bpfObjects) addInside(outer ebpf.MapID) error {
	m, err := ebpf.NewMapFromID(outer)
	if errors.Is(err, fs.ErrNotExist) { // it has been removed
		return nil
	}
	if err != nil {
		return err
	}
	defer m.Close()
	// One batch is enough for all keys. Single look-ups would take a second for 32,768 keys.
	keys, inside := make([]uint32, m.MaxEntries()), make([]ebpf.MapID, m.MaxEntries())
	n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, inside, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // there are no more keys
		return fmt.Errorf("maps inside map %d: %w", outer, err)
	}
	for _, id := range inside[:n] {
		if err := o.addMap(id); err != nil {
			return fmt.Errorf("map %d inside map %d: %w", id, outer, err)
		}
	}
	return nil
}

// addMap adds a map by its number.
func (o bpfObjects) addMap(id ebpf.MapID) error {
	m, err := ebpf.NewMapFromID(id)
	if errors.Is(err, fs.ErrNotExist) { // it has been replaced
		return nil
	}
	if err != nil {
		return err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return err
	}
	bytes, _ := info.Memlock()
	o[bpfObject{mapKey, uint32(id)}] = bytes
	return nil
}
