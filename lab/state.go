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
	// stateRoot contains a directory for each lab. It has the lab's topology, configurations, files
	// of the servers, PID files and logs.
	stateRoot = runDir + "/lab"
	// runDir is also used by balancers and agents, for their locks, records and sockets.
	runDir = "/run/segue"
	bpffs  = "/sys/fs/bpf"
	// pinRoot contains a directory for each balancer and agent, with its pinned maps and links.
	pinRoot = bpffs + "/segue"
)

func stateDir(lab string) string { return filepath.Join(stateRoot, lab) }

// path returns a path in the lab's state directory.
func (l *Lab) path(elem ...string) string {
	return filepath.Join(append([]string{stateDir(l.Name)}, elem...)...)
}

// lockPatience is how long to wait for a lock that may be free in a moment (lockState).
const lockPatience = time.Second

// lock is the lock of a lab's state directory. A process holds it while it builds, changes or
// removes the lab.
type lock struct{ dir *os.File }

// lockState takes the lock of a lab. It returns an error if another process holds the lock, or if
// the lab has no state directory.
func lockState(name string) (*lock, error) {
	dir, err := os.Open(stateDir(name))
	if err != nil {
		return nil, err
	}
	// Between fork and exec, a child also holds the lock of the process that starts it. If that
	// process is killed in this moment, the lock is free shortly after.
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

// unlock releases the lock: the kernel does so when the directory is closed.
func (l *lock) unlock() { l.dir.Close() }

// createState makes the lab's state directory, which reserves the lab's name, locks it, and fills
// it. If it fails before it has the lock, it returns nil and the error. If it fails to fill the
// directory, it returns both the lock and the error: the caller must then remove the directory.
func (l *Lab) createState() (*lock, error) {
	left, err := namespaces(l.Name)
	if err != nil {
		return nil, err
	}
	errTaken := fmt.Errorf("lab %q is already up, or was not removed; "+
		"remove it with: segue-lab lab down --name %s", l.Name, l.Name)
	if len(left) > 0 {
		return nil, errTaken
	}
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return nil, err
	}
	err = os.Mkdir(l.path(), 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil, errTaken
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
// Besides state directories, it looks for data and namespaces: after a reboot a lab may have data
// only, and an interrupted removal may leave namespaces.
func List() (names []string, err error) {
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

// checkUp returns nil if anything of the lab exists. Otherwise it returns an error that wraps
// ErrNotUp, and whose text lists the labs that are up.
func checkUp(name string) error {
	names, err := List()
	switch {
	case err != nil:
		return err
	case slices.Contains(names, name):
		return nil
	case len(names) == 0:
		return fmt.Errorf("lab %q %w, and neither is any other; build one with: segue-lab lab up",
			name, ErrNotUp)
	}
	return fmt.Errorf("lab %q %w; choose a lab that is up with --name: %s", name, ErrNotUp,
		strings.Join(names, ", "))
}

// fillState makes the directories in the lab's state directory, and writes the topology.
func (l *Lab) fillState() error {
	for _, dir := range []string{"conf", "log", "run", "state"} {
		if err := os.Mkdir(l.path(dir), 0o755); err != nil {
			return err
		}
	}
	return l.writeTopology()
}

// writeTopology replaces the topology in the lab's state directory, which Open reads.
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
// partly built. It returns ErrNotUp if nothing of the lab exists. If something cannot be removed,
// Down goes on with the rest, but keeps the state directory for another attempt.
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

// remove removes all that exists of a lab. The caller holds the lock, unless the lab has no state
// directory.
func remove(name string) error {
	errs := []error{endRecorded(name)}
	left, err := namespaces(name)
	errs = append(errs, err)
	// Look for instances before and after the processes end. The first time, a process in one of
	// the lab's namespaces shows that its instance belongs to the lab. The second time, no process
	// can pin anything any more, so nothing is missed.
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
		return err // and keep the directories, so that the next attempt finds the lab
	}
	if err := unmountBPFFS(name); err != nil {
		return err
	}
	for _, dir := range []string{dataDir(name), stateDir(name)} {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	// Other labs, balancers and agents use these directories. os.Remove fails unless one is empty.
	for _, dir := range []string{labsData, dataRoot, stateRoot, runDir} {
		os.Remove(dir)
	}
	return nil
}

// endRecorded ends the processes for which a lab has PID files, all at the same time.
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

// endRemaining kills all processes that remain in a namespace, because they would keep the
// namespace alive. Such a process is a shell that somebody has opened, or a process whose PID file
// an interrupted Up did not write.
func endRemaining(namespacePath string) error {
	return killAll(namespacePath, func(int) bool { return true })
}

// killAll kills the processes in a namespace for which meant returns true. It repeats that until it
// finds none. It returns an error if it still finds some in the tenth round.
func killAll(namespacePath string, meant func(pid int) bool) error {
	inside := func(pid int) bool { return isIn(pid, namespacePath) && meant(pid) }
	for range 10 { // processes may start others until they are killed
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

// mountedMark returns the path of a file that exists if this lab has mounted the BPF file system.
func mountedMark(name string) string { return filepath.Join(stateDir(name), "mounted-bpffs") }

// bpffsMounted tells whether the BPF file system is mounted at bpffs.
func bpffsMounted() (bool, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(bpffs, &stat); err != nil {
		return false, fmt.Errorf("%s: %w", bpffs, err)
	}
	return stat.Type == unix.BPF_FS_MAGIC, nil
}

// mountBPFFS mounts the BPF file system, unless it is mounted already. Before it mounts, it makes
// the file mountedMark, by which unmountBPFFS knows that the lab has mounted it.
func mountBPFFS(name string) error {
	if mounted, err := bpffsMounted(); mounted || err != nil {
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

// isPin tells whether a file in the BPF file system is a pin or a directory of pins. The kernel
// itself adds two files to each such file system.
func isPin(file fs.DirEntry) bool {
	return file.Name() != "maps.debug" && file.Name() != "progs.debug"
}

// unmountBPFFS unmounts the BPF file system if the lab has mounted it. It leaves it mounted, and
// returns nil, if it has pins or is in use.
func unmountBPFFS(name string) error {
	if _, err := os.Stat(mountedMark(name)); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	mounted, err := bpffsMounted()
	if !mounted || err != nil {
		return err
	}
	pins, err := os.ReadDir(bpffs)
	if err != nil || slices.ContainsFunc(pins, isPin) {
		return err
	}
	err = unix.Unmount(bpffs, 0)
	if errors.Is(err, unix.EBUSY) { // somebody still uses it
		return nil
	}
	return err
}
