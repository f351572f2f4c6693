// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/rundir"
)

// choose returns the instance with a name. Without a name it returns the only instance on the host,
// or the only one in this network namespace. If several instances remain, the error is a
// severalError.
func choose(name string) (datapath.Instance, error) {
	found, err := datapath.Instances()
	if err != nil {
		return datapath.Instance{}, err
	}
	which := "instance"
	if name != "" {
		if err := refuseUnknown(name, found); err != nil {
			return datapath.Instance{}, err
		}
		which = fmt.Sprintf("instance %q", name)
		found = slices.DeleteFunc(found, func(i datapath.Instance) bool { return i.Name != name })
	}
	switch len(found) {
	case 0:
		return datapath.Instance{}, fmt.Errorf("no %s under %s: start it by systemctl start segue-lb (or segue-agent), or "+
			"without the package by segue lb (or segue agent)", which, datapath.Dir(""))
	case 1:
		return found[0], nil
	}
	several := &severalError{}
	for _, instance := range found {
		located, err := datapath.Locate(instance)
		if err != nil {
			return datapath.Instance{}, err
		}
		several.instances = append(several.instances, located)
	}
	if here := several.here(); len(here) == 1 {
		return here[0].Instance, nil
	}
	return datapath.Instance{}, several
}

// checkInstance returns an error if a name is probably mistyped: there is no socket of this name,
// and all instances have other names.
func checkInstance(name string) error {
	if _, err := os.Stat(rundir.SocketFile(name)); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	found, err := datapath.Instances()
	if err != nil {
		return nil // the request to the process will fail with a better error
	}
	return refuseUnknown(name, found)
}

// refuseUnknown returns an error if there are instances, but none has the name. The error lists the
// instances.
func refuseUnknown(name string, found []datapath.Instance) error {
	names := make([]string, len(found))
	for i := range found {
		names[i] = found[i].Name
	}
	if len(names) == 0 || slices.Contains(names, name) {
		return nil
	}
	return fmt.Errorf("no instance %q on this host; there are: %s", name, strings.Join(names, ", "))
}

// severalError is the error if it is not clear which of several instances a command means.
type severalError struct{ instances []datapath.Located }

// here returns the instances in this network namespace.
func (e *severalError) here() []datapath.Located {
	return slices.DeleteFunc(slices.Clone(e.instances), func(l datapath.Located) bool { return !l.Here() })
}

// Error names the instances in this network namespace or, if there are none, all instances with
// their network namespaces.
func (e *severalError) Error() string {
	if here := e.here(); len(here) > 0 {
		names := make([]string, len(here))
		for i := range here {
			names[i] = here[i].Name
		}
		return e.advice() + ": " + strings.Join(names, ", ")
	}
	places := make([]string, len(e.instances))
	for i := range e.instances {
		l := &e.instances[i]
		places[i] = fmt.Sprintf("%s (%s)", l.Name, describePlace(l))
	}
	return e.advice() + ": " + strings.Join(places, ", ")
}

// advice is the error without the list of instances.
func (e *severalError) advice() string {
	if len(e.here()) > 0 {
		return "this network namespace has several instances; name one with --instance"
	}
	return "this network namespace has no instance; name one with --instance, or enter its " +
		"network namespace with `nsenter --net=`"
}

// listInstances prints a table of instances, or JSON.
func listInstances(out io.Writer, instances []datapath.Located, asJSON bool) error {
	if asJSON {
		return cli.PrintJSON(out, map[string]any{"instances": instances})
	}
	table := newTable(out)
	table.row("instance", "role", "interface", "network namespace")
	for i := range instances {
		l := &instances[i]
		name := "-"
		if l.Attachment != nil {
			name = interfaceName(l.Attachment.Interface, l.Attachment.Ifindex)
		}
		table.row(l.Name, string(l.Role), name, describePlace(l))
	}
	return table.Flush()
}

// describePlace names the network namespace of an instance.
func describePlace(l *datapath.Located) string {
	switch {
	case l.Attachment == nil:
		return "not attached"
	case l.Here():
		return "this one"
	case l.Namespace == "":
		return "another one, path unknown"
	}
	return l.Namespace
}
