// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"maps"

	"github.com/segue-lb/segue/internal/desired"
)

// CheckRemovals returns an error if a change of the content takes more than the given share of a
// service's servers out of service. It counts servers in the same way as a balancer that follows
// the change. If mayDrain is true, only removed servers count, and drained ones do not.
func CheckRemovals(before, after Tree, percent uint32, mayDrain bool) error {
	had, has, err := bothServing(before, after)
	if err != nil {
		return err
	}
	if mayDrain {
		had, has = had.WithoutDrains(), has.WithoutDrains()
	}
	if err := had.CheckLoss(has, percent); err != nil {
		return fmt.Errorf("the change %w", err)
	}
	return nil
}

// drains tells whether a change of the content drains a server, or gives it the weight 0.
func drains(before, after Tree) (bool, error) {
	had, has, err := bothServing(before, after)
	return err == nil && had.Drains(has), err
}

// bothServing returns the servers of two contents, and tells for each whether it takes new flows.
func bothServing(before, after Tree) (had, has desired.Serving, err error) {
	first, err := before.Document()
	if err != nil {
		return nil, nil, err
	}
	second, err := after.Document()
	if err != nil {
		return nil, nil, err
	}
	return first.serving(), second.serving(), nil
}

// serving returns the servers of the document, and tells for each whether it takes new flows. It
// applies the overrides itself, so it also works for a document that no balancer can follow.
func (d *Document) serving() desired.Serving {
	servers := map[string]map[string]desired.Fields{}
	for _, service := range d.Services {
		servers[fmt.Sprint(service["name"])] = serversIn(service["servers"])
	}
	for _, o := range d.Overrides {
		switch { // other overrides neither add nor remove a service
		case o.Server == "" && o.Remove:
			delete(servers, o.Service)
		case o.Server == "" && o.Add != nil && servers[o.Service] == nil:
			servers[o.Service] = serversIn(o.Add["servers"])
		}
	}
	// The loop above has applied the overrides of services. Those of servers follow.
	for _, o := range d.Overrides {
		list := servers[o.Service]
		switch {
		case o.Server == "" || list == nil: // not of a server, or its service does not exist
			continue
		case o.Remove:
			delete(list, o.Server)
			continue
		case o.Add != nil:
			list[o.Server] = o.Add
		}
		if fields, ok := list[o.Server]; ok { // the server exists, so what the override sets applies
			list[o.Server] = maps.Clone(fields)
			maps.Copy(list[o.Server], o.Set)
		}
	}
	all := desired.Serving{}
	for service, list := range servers {
		all[service] = map[string]bool{}
		for name, fields := range list {
			all[service][name] = serves(fields)
		}
	}
	return all
}

// serversIn returns the fields of a list of servers by their names.
func serversIn(list any) map[string]desired.Fields {
	all := map[string]desired.Fields{}
	elements, _ := list.([]any)
	for _, element := range elements {
		if fields, ok := element.(map[string]any); ok {
			all[fmt.Sprint(fields["name"])] = fields
		}
	}
	return all
}

// serves tells whether a server with these fields takes new flows. A value may be a string, such as
// "true".
func serves(fields desired.Fields) bool {
	return fmt.Sprint(fields[drainedField]) != "true" && fmt.Sprint(fields["weight"]) != "0"
}
