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
)

const (
	// stateRoot holds a folder for each lab: its topology, rendered configurations, contents of the
	// servers, PID files and logs.
	stateRoot = runDir + "/lab"
	// runDir is shared with the daemons.
	runDir = "/run/segue"
	bpffs  = "/sys/fs/bpf"
	// pinRoot is where the daemons pin what belongs to their instance.
	pinRoot = bpffs + "/segue"
)

func stateDir(lab string) string { return filepath.Join(stateRoot, lab) }

// path returns a path in the lab's state folder.
func (l *Lab) path(elem ...string) string {
	return filepath.Join(append([]string{stateDir(l.Name)}, elem...)...)
}

// lockPatience is how long a lock may be held by nobody who matters.
const lockPatience = time.Second

// lock is held by whoever builds or removes a lab.
type lock struct{ dir *os.File }

func lockState(name string) (*lock, error) {
	dir, err := os.Open(stateDir(name))
	if err != nil {
		return nil, err
	}
	// A process that was killed while it started another leaves the lock to that one's beginnings, up
	// to its exec.
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

// createState makes the lab's state folder, which also claims its name, and locks it.
func (l *Lab) createState() (*lock, error) {
	left, err := namespaces(l.Name)
	if err != nil {
		return nil, err
	}
	taken := fmt.Errorf("lab %q is already up, or was not removed; remove it with: segue lab down --name %s", l.Name, l.Name)
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

// List returns the names of the labs that are up, also half built or half removed ones.
func List() (names []string, err error) {
	entries, err := os.ReadDir(stateRoot)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	// A lab whose state is lost still has these.
	entries, err = os.ReadDir(netnsDir)
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

// ErrNotUp is why something cannot be done with a lab that there is nothing of.
var ErrNotUp = errors.New("is not up")

// checkUp returns an error, which is ErrNotUp and names the labs that are up, unless there is
// something of a lab.
func checkUp(name string) error {
	names, err := List()
	switch {
	case err != nil:
		return err
	case slices.Contains(names, name):
		return nil
	case len(names) == 0:
		return fmt.Errorf("lab %q %w, and neither is any other; build one with: segue lab up", name, ErrNotUp)
	}
	return fmt.Errorf("lab %q %w; choose a lab that is up with --name: %s", name, ErrNotUp,
		strings.Join(names, ", "))
}

func (l *Lab) fillState() error {
	for _, dir := range []string{"conf", "log", "run"} {
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
	return replaceFile(l.path("topology.yaml"), text)
}

// replaceFile renames a new file into place, so that nobody ever reads half of it.
func replaceFile(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Open returns the lab of a name that is up.
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
			"remove it with: segue lab down --name %s", name, name)
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

// Down removes the lab of a name and everything that belongs to it, however far it was built. The
// error is ErrNotUp where there is nothing of it. Errors do not keep it from removing the rest.
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

// remove is Down with the lock held.
func remove(name string) error {
	errs := []error{endRecorded(name)}
	left, err := namespaces(name)
	errs = append(errs, err)
	// Processes show which instances are the lab's while they run, and may pin more until they end.
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
	if err := errors.Join(errs...); err != nil {
		return err // and keep what it takes to try again
	}
	if err := unmountBPFFS(name); err != nil {
		return err
	}
	if err := os.RemoveAll(stateDir(name)); err != nil {
		return err
	}
	// These two are shared with other labs and daemons: they stay while they are not empty.
	os.Remove(stateRoot)
	os.Remove(runDir)
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

// endRemaining kills what is still in a namespace, which would live on until its last process ends:
// shells that somebody opened in it, or a process whose PID file an interrupted Up did not come to
// write.
func endRemaining(namespacePath string) error {
	return killAll(namespacePath, func(int) bool { return true })
}

// killAll kills the processes in a namespace that are meant.
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

// mountedMark is the file that tells that the lab mounted the BPF file system.
func mountedMark(name string) string { return filepath.Join(stateDir(name), "mounted-bpffs") }

func isBPFFS() (bool, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(bpffs, &stat); err != nil {
		return false, fmt.Errorf("%s: %w", bpffs, err)
	}
	return stat.Type == unix.BPF_FS_MAGIC, nil
}

// mountBPFFS mounts the BPF file system where it is not mounted yet.
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

// isPin tells whether a file was put there by somebody other than the kernel itself, which pins its
// iterators over maps and programs.
func isPin(file fs.DirEntry) bool {
	return file.Name() != "maps.debug" && file.Name() != "progs.debug"
}

// unmountBPFFS unmounts the BPF file system if the lab mounted it and nobody has pinned anything
// there since.
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
