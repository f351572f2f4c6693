// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
)

// usesLoadMaps tells whether a service has the load source shared-map. Then all applications keep
// their loads in maps, too.
func (t Topology) usesLoadMaps() bool {
	isMap := func(s desired.Source) bool { return s.Kind == desired.LoadSharedMap }
	return slices.ContainsFunc(t.Services, func(s Service) bool {
		return isMap(s.Load) ||
			slices.ContainsFunc(s.Exceptions, func(e Exception) bool { return isMap(e.Load) })
	})
}

// loadPins returns the folder of the pins of the applications' maps. Its name begins like those of
// the lab's instances, so the lab's removal removes it.
func (l *Lab) loadPins() string { return filepath.Join(pinRoot, instancePrefix(l.Name)+"@loads") }

// LoadPin returns the pin of the map in which the node's application keeps its load, or "" if no
// service needs it.
func (n *Node) LoadPin() string {
	if !n.lab.Topology.usesLoadMaps() {
		return ""
	}
	return filepath.Join(n.lab.loadPins(), n.Name)
}

// makeLoadPins makes the folder of the pins, if a service needs it.
func (l *Lab) makeLoadPins() error {
	if !l.Topology.usesLoadMaps() {
		return nil
	}
	return os.MkdirAll(l.loadPins(), 0o755)
}

// loadModule is a module by which a server program keeps its load in a map. Both fields are empty
// if no service needs it.
type loadModule struct {
	LoadModule string // the path of the module
	LoadPin    string
}

// loadModule returns the module with a file name. It is the one that `make modules` has built beside
// the executable segue-lab, or else that of the module's package, in the folder installed.
func (n *Node) loadModule(name, installed string) loadModule {
	pin := n.LoadPin()
	if pin == "" {
		return loadModule{}
	}
	path := filepath.Join(filepath.Dir(n.lab.laboratory), "modules", name)
	if _, err := os.Stat(path); err != nil {
		path = filepath.Join(installed, name)
	}
	return loadModule{path, pin}
}
