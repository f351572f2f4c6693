// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"math"
	"sync"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/research/sim"
)

// Hash offers a flow to the candidates of its bucket in the consistent-hash table. With one
// candidate this is SC (Maglev). With several candidates and an accept policy it is 6LB.
type Hash struct {
	// Candidates is the number of candidates of each bucket, 1 to 8.
	Candidates int `yaml:"candidates"`
	// Buckets is the number of buckets of the table. 0 stands for tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	tables  tableCache
}

// New implements sim.Method.
func (m *Hash) New(b *sim.Balancer) (sim.Placement, error) {
	p := &hash{bucketTable{
		cache: &m.tables, b: b, buckets: m.Buckets, candidates: m.Candidates,
	}}
	return p, p.build()
}

// Build implements Spec.
func (m *Hash) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

func (m *Hash) validate() error {
	return errors.Join(checkCandidates(m.Candidates, 1), checkBuckets(m.Buckets))
}

type hash struct{ bucketTable }

func (p *hash) Place(f *sim.Flow, offer *sim.Offer) { p.offerRow(f, offer) }

// Recover returns the servers to which Place may have offered the flow.
func (p *hash) Recover(f *sim.Flow, offer *sim.Offer) { p.offerRow(f, offer) }

func (p *hash) MembershipChanged() { must(p.build()) }

// bucket returns the bucket of a flow. It scales the lower 32 bits of the flow's row key to the
// number of buckets.
func bucket(key uint64, buckets int) int {
	lower := key & math.MaxUint32
	return int(lower * uint64(buckets) >> 32)
}

// tableCache keeps the table that a method built last, so that balancers and runs with the same
// servers share it.
type tableCache struct {
	mutex   sync.Mutex
	servers *sim.Server // the first server, which identifies the configuration
	live    string      // a byte for each server: 1 if it is live, else 0
	table   *tables.Table
}

// build returns a table of the live servers. It keeps the table for the next call, and builds
// another one only if the configuration or the live servers differ. weights has the weights of all
// servers, live or not.
func (c *tableCache) build(
	b *sim.Balancer, weights []uint32, buckets, candidates int,
) (*tables.Table, error) {
	servers := make([]tables.Server, len(b.Servers))
	for i := range b.Servers {
		servers[i].Name = b.Servers[i].Name
	}
	live := make([]byte, len(servers))
	for _, s := range b.Live {
		servers[s].Weight = weights[s]
		live[s] = 1
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.table != nil && c.servers == &b.Servers[0] && c.live == string(live) {
		return c.table, nil
	}
	table, err := tables.Build(servers, buckets, candidates)
	if err != nil {
		return nil, err
	}
	c.servers, c.live, c.table = &b.Servers[0], string(live), table
	return table, nil
}
