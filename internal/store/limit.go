// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"maps"
	"slices"

	"github.com/segue-lb/segue/internal/plural"
)

// removal is how many servers of a service a change removes.
type removal struct {
	service     string
	removed, of int
}

func (r removal) String() string {
	return fmt.Sprintf("%d of %s of %s", r.removed, plural.Count(r.of, "server"), r.service)
}

// CheckRemovals returns an error if a change of the content removes more than the given share of a
// service's servers. It counts as a balancer that follows the change does.
func CheckRemovals(before, after Tree, percent uint32) error {
	had, err := before.Document()
	if err != nil {
		return err
	}
	has, err := after.Document()
	if err != nil {
		return err
	}
	if all := removals(had.servers(), has.servers(), percent); len(all) > 0 {
		return fmt.Errorf("the change removes %s, and the limit is %d percent",
			describeRemoved(all), percent)
	}
	return nil
}

// servers are the names of servers by the names of their services.
type servers map[string]map[string]bool

// servers returns the servers of the content, whether or not a balancer could follow it.
func (d *Document) servers() servers {
	all := servers{}
	for _, service := range d.Services {
		all.add(fmt.Sprint(service["name"]), service["servers"])
	}
	for _, o := range d.Overrides {
		switch {
		case o.Server == "" && o.Remove:
			delete(all, o.Service)
		case o.Server == "" && o.Add != nil && all[o.Service] == nil:
			all.add(o.Service, o.Add["servers"])
		case o.Server == "" || all[o.Service] == nil:
		case o.Remove:
			delete(all[o.Service], o.Server)
		case o.Add != nil:
			all[o.Service][o.Server] = true
		}
	}
	return all
}

// add adds a service with a list of servers.
func (s servers) add(service string, list any) {
	names := map[string]bool{}
	elements, _ := list.([]any)
	for _, element := range elements {
		if fields, ok := element.(map[string]any); ok {
			names[fmt.Sprint(fields["name"])] = true
		}
	}
	s[service] = names
}

// removals returns the services that lose more servers than the limit permits, by their names. A
// service may lose one server in any case, unless it is the last: a limit of 30 percent would
// otherwise permit no change of a service with three servers. 100 percent is no limit.
func removals(before, after servers, percent uint32) (all []removal) {
	for _, service := range slices.Sorted(maps.Keys(before)) {
		r := removal{service: service, of: len(before[service])}
		for name := range before[service] {
			if !after[service][name] {
				r.removed++
			}
		}
		permitted := r.of
		if percent < 100 {
			permitted = min(max(1, r.of*int(percent)/100), r.of-1)
		}
		if r.removed > 0 && r.removed > permitted {
			all = append(all, r)
		}
	}
	return all
}
