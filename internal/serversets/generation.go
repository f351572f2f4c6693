// SPDX-License-Identifier: Apache-2.0

// Package serversets keeps the last sets of servers of each service. A balancer places new flows by
// the present set. By the former sets it finds the servers of older flows that it does not know,
// because another balancer had them (6LB, section III). Candidate tables follow from the sets
// alone, so balancers with the same generations have the same tables.
//
// A set is part of the desired state. Health, next hops and draining never change it.
package serversets

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/tables"
)

// Set determines the candidate table of one generation.
type Set struct {
	Placement  desired.Placement `json:"placement"`
	Buckets    int               `json:"buckets"`
	Candidates int               `json:"candidates"`
	// BucketHash is empty for the default hash, as in the sets of earlier builds.
	BucketHash desired.BucketHash `json:"bucket_hash,omitempty"`
	// Affinity is nil if the whole flow selects its bucket, as in the sets of earlier builds.
	Affinity *desired.ClientAffinity `json:"affinity,omitempty"`
	Servers  []Server                `json:"servers"` // by name
}

// Server is a server of a set, with its weight, which is more than 0.
type Server struct {
	Name   string `json:"name"`
	Weight uint32 `json:"weight"`
}

// Generation is the present set of a service and its former sets.
type Generation struct {
	// Number counts the changes of the set. It is 1 for a new service.
	Number uint64 `json:"number"`
	// Sets has the present set first, and then the former ones, the newest first. No set occurs
	// twice.
	Sets []Set `json:"sets"`
}

// Generations are the generations of services, by name.
type Generations map[string]Generation

// SetOf returns the set of a configured service, without servers of weight 0.
func SetOf(service *desired.Service) Set {
	s := Set{
		Placement:  service.Placement.Method().Stored,
		Buckets:    service.Buckets,
		Candidates: service.Candidates,
		Servers:    []Server{},
	}
	if service.BucketHash != desired.BucketHashMultilinear {
		s.BucketHash = service.BucketHash
	}
	if a := service.ClientAffinity(); a.IsWanted() {
		s.Affinity = &a
	}
	for _, server := range service.Servers {
		if *server.Weight > 0 {
			s.Servers = append(s.Servers, Server{Name: server.Name, Weight: *server.Weight})
		}
	}
	slices.SortFunc(s.Servers, func(a, b Server) int { return cmp.Compare(a.Name, b.Name) })
	return s
}

// Next returns the generations of the configured services, each with at most service.Generations
// sets. A service whose set has changed begins a new generation. Next does not change g.
func (g Generations) Next(services []desired.Service) Generations {
	return g.NextOf(services, func(string) bool { return true })
}

// NextOf returns the same as Next, and is faster. The function changed returns true for the names
// of the services that may have changed. Other services keep the generation that they have.
func (g Generations) NextOf(services []desired.Service, changed func(name string) bool) Generations {
	next := make(Generations, len(services))
	for i := range services {
		s := &services[i]
		before := g[s.Name]
		next[s.Name] = before
		if changed(s.Name) || len(before.Sets) == 0 {
			next[s.Name] = before.Next(s)
		}
	}
	return next
}

// Equal tells whether two balancers have the same generations. It is fast if the generations of
// most services share memory.
func (g Generations) Equal(other Generations) bool {
	return maps.EqualFunc(g, other, Generation.Equal)
}

// Equal tells whether two generations are the same.
func (g Generation) Equal(other Generation) bool {
	if len(g.Sets) != len(other.Sets) || g.Number != other.Number {
		return false
	}
	// If the first sets are at the same address, both generations share memory.
	return len(g.Sets) == 0 || &g.Sets[0] == &other.Sets[0] || reflect.DeepEqual(g.Sets, other.Sets)
}

// Next returns the generation in which the set of the service is the present one. If it is the
// present one in g already, the number stays. Otherwise Next begins a new generation, and a former
// set that is equal moves to the front. It keeps at most service.Generations sets.
func (g Generation) Next(service *desired.Service) Generation {
	set, most := SetOf(service), service.Generations
	equal := func(other Set) bool { return reflect.DeepEqual(set, other) }
	if len(g.Sets) == 0 || !equal(g.Sets[0]) {
		former := slices.DeleteFunc(slices.Clone(g.Sets), equal)
		g = Generation{Number: g.Number + 1, Sets: slices.Insert(former, 0, set)}
	}
	g.Sets = slices.Clip(g.Sets[:min(len(g.Sets), most)])
	return g
}

// Check returns an error if a configured service has no generation, or one for another set. Builds
// with other defaults can disagree about the set of the same service.
func (g Generations) Check(services []desired.Service) error {
	for i := range services {
		s := &services[i]
		now := g[s.Name]
		if len(now.Sets) == 0 {
			return fmt.Errorf("service %s has no generation", s.Name)
		}
		if !reflect.DeepEqual(now.Sets[0], SetOf(s)) {
			return fmt.Errorf("generation %d of service %s has another set of servers, another number of "+
				"buckets or candidates, another bucket hash, or another affinity than the service", now.Number, s.Name)
		}
	}
	return nil
}

// Table builds the candidate table of the set. If flows take turns, it has a row for each turn of a
// cycle, and otherwise s.Buckets rows. The indexes in its rows are those of s.Servers.
// Table returns an error if the set is not valid.
func (s Set) Table() (*tables.Table, error) {
	servers := make([]tables.Server, len(s.Servers))
	for i, server := range s.Servers {
		servers[i] = tables.Server{Name: server.Name, Weight: server.Weight}
	}
	switch s.Placement.Method().Rows {
	case desired.RowsOfColumns:
		return tables.BuildColumns(servers, s.Buckets, s.Candidates)
	case desired.RowsOfTurns:
		return tables.BuildTurns(servers, s.Buckets, s.Candidates)
	default:
		return tables.Build(servers, s.Buckets, s.Candidates)
	}
}

// CanHold tells whether the candidate table of the set can also hold a former set. A flow must have
// the same bucket in the tables of both, so they must have the same number of rows, the same hash
// and the same affinity. Under round-robin, flows have no bucket of their own: any row of a former set is as good as
// any other.
func (s Set) CanHold(former Set) bool {
	if former.Placement.Method().TakesTurns() {
		return true
	}
	return !s.Placement.Method().TakesTurns() && s.Buckets == former.Buckets &&
		s.BucketHash == former.BucketHash && s.affinity() == former.affinity()
}

// GivesSameServers tells whether a hash selects the same servers in the candidate tables of both
// sets, as far as both have as many candidates.
func (s Set) GivesSameServers(other Set) bool {
	return s.Placement == other.Placement && s.CanHold(other) && slices.Equal(s.Servers, other.Servers)
}

func (s Set) affinity() desired.ClientAffinity {
	if s.Affinity == nil {
		return desired.ClientAffinity{}
	}
	return *s.Affinity
}

// Validate returns an error that names the first value that no configuration can have.
func (g Generation) Validate() error {
	for i, set := range g.Sets {
		if err := set.validate(); err != nil {
			return fmt.Errorf("set %d: %w", i, err)
		}
	}
	return nil
}

// validate returns an error that names the first value of the set that no configuration can have.
func (s Set) validate() error {
	if s.Placement == "" || s.Placement.Method().Stored != s.Placement {
		return fmt.Errorf("placement %q: not known", s.Placement)
	}
	if err := tables.ValidBuckets(s.Buckets); err != nil {
		return err
	}
	if s.BucketHash != "" && s.BucketHash != desired.BucketHashCRC32 {
		return fmt.Errorf("bucket hash %q: not known", s.BucketHash)
	}
	if a := s.Affinity; a != nil && (a.Prefix < 1 || a.Prefix > 128) {
		return fmt.Errorf("affinity by %d bits: out of range 1 to 128", a.Prefix)
	}
	if s.Candidates < 1 || s.Candidates > tables.MaxCandidates {
		return fmt.Errorf("%d candidates: out of range 1 to %d", s.Candidates, tables.MaxCandidates)
	}
	for i, server := range s.Servers {
		switch {
		case server.Name == "" || server.Weight == 0:
			return fmt.Errorf("server %d: no name or weight 0", i)
		case i > 0 && server.Name <= s.Servers[i-1].Name:
			return fmt.Errorf("server %q: not in the order of names", server.Name)
		}
	}
	return nil
}
