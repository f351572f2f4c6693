// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/field"
)

// Override replaces settings of one server, for as long as the override exists. It is apart from
// the configuration, so that a server can be drained without a change of the configuration.
type Override struct {
	Service string `yaml:"service" json:"service"`
	Server  string `yaml:"server" json:"server"`
	// Drained and Weight replace the server's fields of the same names. Nil keeps the server's
	// field. One of them at least is set.
	Drained *bool   `yaml:"drained,omitempty" json:"drained,omitempty"`
	Weight  *uint32 `yaml:"weight,omitempty" json:"weight,omitempty" range:"0 to 1000"`
}

// String returns the override as SERVICE/SERVER and the settings, such as web/s1 (drained).
func (o Override) String() string {
	var settings []string
	switch {
	case o.Drained != nil && *o.Drained:
		settings = append(settings, "drained")
	case o.Drained != nil:
		settings = append(settings, "not drained")
	}
	if o.Weight != nil {
		settings = append(settings, fmt.Sprintf("weight %d", *o.Weight))
	}
	return fmt.Sprintf("%s/%s (%s)", o.Service, o.Server, strings.Join(settings, ", "))
}

// Overrides are the overrides of a balancer.
type Overrides struct {
	Overrides []Override `yaml:"overrides"`
}

// Validate returns an error for every rule that the overrides break. An override of a server that
// does not exist is valid.
func (o *Overrides) Validate() field.Errors {
	var r rules
	for i, override := range o.Overrides {
		r.checkOverride(field.Item("overrides", i), &override)
		same := func(other Override) bool {
			return other.Service == override.Service && other.Server == override.Server
		}
		if first := slices.IndexFunc(o.Overrides[:i], same); first >= 0 && override.Server != "" {
			r.failf(field.Item("overrides", i), "server %s of service %s is already in %s",
				override.Server, override.Service, field.Item("overrides", first))
		}
	}
	return r.errs
}

func (r *rules) checkOverride(path string, o *Override) {
	r.checkName(field.Child(path, "service"), o.Service)
	r.checkName(field.Child(path, "server"), o.Server)
	if o.Drained == nil && o.Weight == nil {
		r.failf(path, "must have drained or weight")
	}
	r.checkRanges(path, reflect.ValueOf(*o))
}

// Override makes the services follow overrides. It leaves out overrides of servers that do not
// exist. It returns a warning for each of these, and for each service that gets no new connections
// because of overrides.
func (b *Balancer) Override(overrides []Override) (warnings field.Errors) {
	b.Overrides = nil
	took := make([]bool, len(b.Services)) // new connections, without overrides
	for i := range b.Services {
		took[i] = b.Services[i].Takes()
	}
	for i, o := range overrides {
		server := b.Server(o.Service, o.Server)
		if server == nil {
			warnings.Addf(field.Item("overrides", i),
				"service %s has no server %s: the override has no effect", o.Service, o.Server)
			continue
		}
		b.Overrides = append(b.Overrides, o)
		if o.Drained != nil {
			server.Drained = *o.Drained
		}
		if o.Weight != nil {
			server.Weight = o.Weight
		}
	}
	for i := range b.Services {
		if took[i] && !b.Services[i].Takes() {
			warnings.Addf("overrides", "all servers are now drained or have weight 0: "+
				"service %s gets no new connections", b.Services[i].Name)
		}
	}
	return warnings
}

// Server returns a server of a service, or nil.
func (b *Balancer) Server(service, name string) *Server {
	for i := range b.Services {
		for j := range b.Services[i].Servers {
			if b.Services[i].Name == service && b.Services[i].Servers[j].Name == name {
				return &b.Services[i].Servers[j]
			}
		}
	}
	return nil
}
