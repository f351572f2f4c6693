// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/rundir"
)

// Instance returns the instance name of a node's balancer or agent. It is unique on this machine.
func Instance(lab, node string) string { return instancePrefix(lab) + node }

// instancePrefix begins the names of all instances of a lab.
func instancePrefix(lab string) string { return "lab-" + lab + "-" }

// labInstance matches the names that any lab gives to its instances.
var labInstance = regexp.MustCompile(`^lab-[a-z0-9]{1,12}-`)

// instancesOf returns the names of the instances that belong to a lab: its balancers and agents. An
// instance belongs to the lab if its name begins with the lab's prefix. An instance with a name
// that no lab gives belongs to the lab if it is in one of the namespaces: somebody has started it
// there by hand, for example in a bare lab.
func instancesOf(lab string, namespaces []string) ([]string, error) {
	all, err := instancesOnMachine()
	if err != nil {
		return nil, err
	}
	var own, others []string
	for _, name := range all {
		switch {
		case strings.HasPrefix(name, instancePrefix(lab)):
			own = append(own, name)
		case !labInstance.MatchString(name):
			others = append(others, name)
		}
	}
	var errs []error
	for _, namespace := range namespaces {
		found, err := instancesIn(namespace, others)
		own = append(own, found...)
		errs = append(errs, err)
	}
	return own, errors.Join(errs...)
}

// instancesOnMachine returns the names of all instances that have a directory of pins, or a lock
// file NAME.lock.
func instancesOnMachine() (names []string, err error) {
	for dir, suffix := range map[string]string{pinRoot: "", runDir: ".lock"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			if name, ok := strings.CutSuffix(entry.Name(), suffix); ok {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// instancesIn returns those of the given instances that are in a namespace: their process runs
// there, or their program is attached to an interface there.
func instancesIn(namespace string, instances []string) (found []string, err error) {
	path := filepath.Join(netnsDir, namespace)
	err = doIn(namespace, path, func() error {
		for _, name := range instances {
			process, err := rundir.FindProcess(name)
			if err != nil {
				return err
			}
			// An error means that the pins are of another program or another build, so not of this
			// lab.
			attached, _ := datapath.AttachedHere(name)
			runsHere := process != nil && isIn(process.PID, path)
			if attached || runsHere {
				found = append(found, name)
			}
		}
		return nil
	})
	if errors.Is(err, unix.EINVAL) { // a file that an interrupted createNamespace left behind
		return nil, nil
	}
	return found, err
}

// removeInstances removes the pins, locks, records and sockets of instances. Their programs are
// attached by pinned links, or to interfaces that end with the lab's namespaces. So the kernel
// unloads the programs when pins and namespaces are gone.
func removeInstances(names []string) error {
	for _, name := range names {
		if err := os.RemoveAll(filepath.Join(pinRoot, name)); err != nil {
			return err
		}
		for _, file := range []string{
			rundir.RecordFile(name), rundir.SocketFile(name), rundir.LockFile(name),
		} {
			if err := removeFile(file); err != nil {
				return err
			}
		}
	}
	os.Remove(pinRoot) // fails while other instances have pins
	return nil
}
