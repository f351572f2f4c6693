// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/wording"
)

// Serving tells which servers take new flows, by the names of services and servers. A server takes
// new flows unless it is drained or has the weight 0. For an agent, the only outer key is "". The
// inner keys are the services of the host, and the values tell which ones accept connections.
type Serving map[string]map[string]bool

// Serving tells for each server of each service whether it takes new flows.
func (b *Balancer) Serving() Serving {
	all := Serving{}
	for i := range b.Services {
		servers := map[string]bool{}
		for _, s := range b.Services[i].Servers {
			servers[s.Name] = !s.Drained && (s.Weight == nil || *s.Weight > 0)
		}
		all[b.Services[i].Name] = servers
	}
	return all
}

// Serving tells for each service of the host whether it accepts connections.
func (a *Agent) Serving() Serving {
	services := map[string]bool{}
	for i := range a.Services {
		services[a.Services[i].Name] = !a.Services[i].Drained
	}
	return Serving{"": services}
}

// WithoutDrains returns the same servers, but says that all of them take new flows.
func (s Serving) WithoutDrains() Serving {
	all := Serving{}
	for service, servers := range s {
		all[service] = map[string]bool{}
		for name := range servers {
			all[service][name] = true
		}
	}
	return all
}

// Drains tells whether a server that takes new flows in s is still there in after, and takes none.
func (s Serving) Drains(after Serving) bool {
	for service, servers := range s {
		for name, serves := range servers {
			if still, ok := after[service][name]; serves && ok && !still {
				return true
			}
		}
	}
	return false
}

// CheckLoss returns an error if a change takes more than a share of a service's servers out of
// service, or the last one that takes new flows. A service may always lose one server, unless it is
// the last: otherwise a limit of 30 percent would permit no change of a service with three servers.
// A removed server counts even if it took no new flows, because it can have connections. 100
// percent means no limit.
func (s Serving) CheckLoss(after Serving, percent uint32) error {
	var all losses
	for _, service := range slices.Sorted(maps.Keys(s)) {
		if l := lossOf(s[service], after[service]); percent < 100 && l.exceeds(int(percent)) {
			l.service = service
			all = append(all, l)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return fmt.Errorf("%s, and the limit is %d percent", all, percent)
}

// loss is how many servers of a service a change takes out of service.
type loss struct {
	service          string
	removed, drained int
	of               int  // how many servers the service had
	leavesNone       bool // no server is left that takes new flows
}

// lossOf compares the servers of a service before and after a change.
func lossOf(before, after map[string]bool) loss {
	l := loss{of: len(before)}
	servedBefore, servesAfter := false, false // whether any server took or takes new flows
	for name, serving := range before {
		still, ok := after[name]
		switch {
		case !ok:
			l.removed++
		case serving && !still:
			l.drained++
		}
		servedBefore = servedBefore || serving
	}
	for _, serving := range after {
		servesAfter = servesAfter || serving
	}
	l.leavesNone = servedBefore && !servesAfter
	return l
}

// exceeds tells whether the loss is more than a limit in percent.
func (l *loss) exceeds(percent int) bool {
	lost := l.removed + l.drained
	permitted := max(1, l.of*percent/100) // one server may always be lost,
	permitted = min(permitted, l.of-1)    // but not the last one
	return lost > 0 && (l.leavesNone || lost > permitted)
}

// String tells what is lost, such as "9 of 10 servers of web".
func (l loss) String() string {
	text := fmt.Sprintf("%d of %s of %s", l.removed+l.drained, wording.Count(l.of, "server"), l.service)
	if l.service == "" {
		text = fmt.Sprintf("%d of %s", l.removed+l.drained, wording.Count(l.of, "service"))
	}
	if l.leavesNone && l.removed+l.drained < l.of {
		text += ", the last in service"
	}
	switch {
	case l.drained == 0:
		return text
	case l.removed == 0:
		return fmt.Sprintf("%s (drained or of weight 0)", text)
	}
	return fmt.Sprintf("%s (%d removed, %d drained or of weight 0)", text, l.removed, l.drained)
}

// losses are the losses of several services.
type losses []loss

// String tells what would be lost, such as "would remove 9 of 10 servers of web".
func (all losses) String() string {
	const most = 5
	var texts []string
	removed, drained := 0, 0
	for _, l := range all {
		removed, drained = removed+l.removed, drained+l.drained
	}
	for _, l := range all[:min(len(all), most)] {
		texts = append(texts, l.String())
	}
	verb := "remove"
	switch {
	case removed == 0:
		verb = "take out of service"
	case drained > 0:
		verb = "remove or take out of service"
	}
	text := "would " + verb + " " + strings.Join(texts, ", ")
	if more := len(all) - most; more > 0 {
		text += fmt.Sprintf(", and servers of %d more", more)
	}
	return text
}
