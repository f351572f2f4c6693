// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v4"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/atomicfile"
)

const (
	// stateRoot contains a directory for each lab, with its topology, rendered configurations,
	// contents of the servers, PID files and logs.
	stateRoot = runDir + "/lab"
	// runDir is shared with the daemons.
	runDir = "/run/segue"
	bpffs  = "/sys/fs/bpf"
	// pinRoot is where the daemons pin the objects of their instances.
	pinRoot = bpffs + "/segue"
)

func stateDir(lab string) string { return filepath.Join(stateRoot, lab) }

// path returns a path in the lab's state directory.
func (l *Lab) path(elem ...string) string {
	return filepath.Join(append([]string{stateDir(l.Name)}, elem...)...)
}

// lockPatience is how long to wait for a lock that only a starting child process may hold.
const lockPatience = time.Second

// lock is held by the process that builds or removes a lab.
type lock struct{ dir *os.File }

func lockState(name string) (*lock, error) {
	dir, err := os.Open(stateDir(name))
	if err != nil {
		return nil, err
	}
	// If a process is killed while it starts a child, the child holds the lock until its exec.
	for deadline := time.Now().Add(lockPatience); ; time.Sleep(lockPatience / 100) {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			dir.Close()
			return nil, fmt.Errorf("lab %q is being built or removed by another process", name)
		}
	}
	return &lock{dir}, nil
}

func (l *lock) unlock() { l.dir.Close() }

// createState makes the lab's state directory and locks it. The directory reserves the lab's name.
func (l *Lab) createState() (*lock, error) {
	left, err := namespaces(l.Name)
	if err != nil {
		return nil, err
	}
	taken := fmt.Errorf("lab %q is already up, or was not removed; remove it with: segue-lab lab down --name %s", l.Name, l.Name)
	if len(left) > 0 {
		return nil, taken
	}
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return nil, err
	}
	err = os.Mkdir(l.path(), 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil, taken
	}
	if err != nil {
		return nil, err
	}
	lock, err := lockState(l.Name)
	if err != nil {
		return nil, err
	}
	return lock, l.fillState()
}

// List returns the names of the labs that are up, including those that are partly built or removed.
func List() (names []string, err error) {
	// A lab without a state directory may still have data, as after a reboot, or namespaces.
	for _, root := range []string{stateRoot, labsData} {
		entries, err := os.ReadDir(root)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			names = append(names, entry.Name())
		}
	}
	entries, err := os.ReadDir(netnsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, entry := range entries {
		if match := labNamespace.FindStringSubmatch(entry.Name()); match != nil {
			names = append(names, match[1])
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// ErrNotUp is the error for a lab of which nothing exists.
var ErrNotUp = errors.New("is not up")

// checkUp returns ErrNotUp if nothing of the lab exists. The error lists the labs that are up.
func checkUp(name string) error {
	names, err := List()
	switch {
	case err != nil:
		return err
	case slices.Contains(names, name):
		return nil
	case len(names) == 0:
		return fmt.Errorf("lab %q %w, and neither is any other; build one with: segue-lab lab up", name, ErrNotUp)
	}
	return fmt.Errorf("lab %q %w; choose a lab that is up with --name: %s", name, ErrNotUp,
		strings.Join(names, ", "))
}

func (l *Lab) fillState() error {
	for _, dir := range []string{"conf", "log", "run", "state"} {
		if err := os.Mkdir(l.path(dir), 0o755); err != nil {
			return err
		}
	}
	return l.writeTopology()
}

func (l *Lab) writeTopology() error {
	text, err := yaml.Dump(l.Topology)
	if err != nil {
		return fmt.Errorf("write topology: %w", err)
	}
	return atomicfile.Write(l.path("topology.yaml"), text, 0o644)
}

// Open returns the lab with the given name, which must be up.
func Open(name string, options Options) (*Lab, error) {
	if err := ValidateName(name); err != nil {
		return nil, err
	}
	if err := checkUp(name); err != nil {
		return nil, err
	}
	if err := checkRoot(); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(stateDir(name), "topology.yaml"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lab %q is half built or half removed; "+
			"remove it with: segue-lab lab down --name %s", name, name)
	}
	if err != nil {
		return nil, err
	}
	topology, err := ParseTopology(text)
	if err != nil {
		return nil, fmt.Errorf("topology of lab %q: %w", name, err)
	}
	return newLab(topology, options)
}

// Down removes the lab with the given name and everything that belongs to it, even if it was only
// partly built. It returns ErrNotUp if nothing of the lab exists. After an error it continues with
// the rest.
func Down(name string) error {
	if err := ValidateName(name); err != nil {
		return err
	}
	if err := checkUp(name); err != nil {
		return err
	}
	if err := checkRoot(); err != nil {
		return err
	}
	lock, err := lockState(name)
	if err == nil {
		defer lock.unlock()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return remove(name)
}

// remove does the same as Down, with the lock held.
func remove(name string) error {
	errs := []error{endRecorded(name)}
	left, err := namespaces(name)
	errs = append(errs, err)
	// Running processes show which instances are the lab's, and may add pins until they end.
	running, err := instancesOf(name, left)
	errs = append(errs, err)
	for _, namespace := range left {
		errs = append(errs, endRemaining(filepath.Join(netnsDir, namespace)))
	}
	pinned, err := instancesOf(name, left)
	errs = append(errs, err, removeInstances(append(running, pinned...)))
	for _, namespace := range left {
		errs = append(errs, deleteNamespace(namespace))
	}
	errs = append(errs, removeCPULimits(name))
	if err := errors.Join(errs...); err != nil {
		return err // keeps what another attempt needs
	}
	if err := unmountBPFFS(name); err != nil {
		return err
	}
	for _, dir := range []string{dataDir(name), stateDir(name)} {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	// Other labs and daemons use these directories. Remove fails while they are not empty.
	for _, dir := range []string{labsData, dataRoot, stateRoot, runDir} {
		os.Remove(dir)
	}
	return nil
}

// endRecorded ends the processes of a lab's PID files, all at the same time.
func endRecorded(name string) error {
	files, err := filepath.Glob(filepath.Join(stateDir(name), "run", "*.pid"))
	if err != nil {
		return err
	}
	errs := make([]error, len(files))
	var wait sync.WaitGroup
	for i, file := range files {
		wait.Go(func() { errs[i] = pidFile(file).end(unix.SIGTERM) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// endRemaining kills the remaining processes in a namespace, which would exist until its last
// process ends. Such processes are shells that somebody opened, or a process whose PID file an
// interrupted Up did not write.
func endRemaining(namespacePath string) error {
	return killAll(namespacePath, func(int) bool { return true })
}

// killAll kills the processes in a namespace for which meant returns true.
func killAll(namespacePath string, meant func(pid int) bool) error {
	inside := func(pid int) bool { return isIn(pid, namespacePath) && meant(pid) }
	for range 10 { // they may be starting others
		pids, err := processesIn(namespacePath)
		pids = slices.DeleteFunc(pids, func(pid int) bool { return !meant(pid) })
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := endProcess(pid, inside, unix.SIGKILL); err != nil {
				return err
			}
		}
	}
	return fmt.Errorf("%s: processes keep appearing", namespacePath)
}

// mountedMark returns the path of a file that exists if the lab has mounted the BPF file system.
func mountedMark(name string) string { return filepath.Join(stateDir(name), "mounted-bpffs") }

func isBPFFS() (bool, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(bpffs, &stat); err != nil {
		return false, fmt.Errorf("%s: %w", bpffs, err)
	}
	return stat.Type == unix.BPF_FS_MAGIC, nil
}

// mountBPFFS mounts the BPF file system if it is not mounted.
func mountBPFFS(name string) error {
	if mounted, err := isBPFFS(); mounted || err != nil {
		return err
	}
	if err := os.WriteFile(mountedMark(name), nil, 0o644); err != nil {
		return err
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount %s: %w", bpffs, err)
	}
	return nil
}

// isPin tells whether a file is a user's pin. The kernel itself pins its iterators over maps and
// programs.
func isPin(file fs.DirEntry) bool {
	return file.Name() != "maps.debug" && file.Name() != "progs.debug"
}

// unmountBPFFS unmounts the BPF file system if the lab mounted it and it has no pins.
func unmountBPFFS(name string) error {
	if _, err := os.Stat(mountedMark(name)); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	mounted, err := isBPFFS()
	if !mounted || err != nil {
		return err
	}
	pins, err := os.ReadDir(bpffs)
	if err != nil || slices.ContainsFunc(pins, isPin) {
		return err
	}
	err = unix.Unmount(bpffs, 0)
	if errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}
