// Package placement has the placements that the simulator knows.
package placement

import (
	"sync"

	"github.com/segue-lb/segue/internal/sim"
	"github.com/segue-lb/segue/internal/tables"
)

// Hash offers a flow to the candidates of its bucket in the consistent-hash table: with one candidate
// SC (Maglev), with several and an accept policy 6LB.
type Hash struct {
	Candidates int // 1 to sim.MaxChain
	Buckets    int // see tables.ValidBuckets
	tables     tableCache
}

// New implements sim.Method.
func (h *Hash) New(b *sim.Balancer) (sim.Placement, error) {
	p := &hash{method: h, b: b}
	return p, p.build()
}

type hash struct {
	method *Hash
	b      *sim.Balancer
	table  *tables.Table
}

func (p *hash) build() (err error) {
	p.table, err = p.method.tables.build(p.b, p.method.Buckets, p.method.Candidates)
	return err
}

func (p *hash) Place(f *sim.Flow, offer *sim.Offer) {
	if p.table.Candidates == 0 {
		return
	}
	for _, s := range p.table.Row(bucket(f, p.table.Buckets)) {
		offer.Add(int32(s))
	}
}

// Recover looks where Place may have put the flow.
func (p *hash) Recover(f *sim.Flow, offer *sim.Offer) { p.Place(f, offer) }

func (p *hash) MembershipChanged() {
	if err := p.build(); err != nil {
		panic("placement: " + err.Error()) // the first table of the same parameters could be built
	}
}

// bucket is the row of a flow.
func bucket(f *sim.Flow, buckets int) int {
	return int(f.Key & 0xffffffff * uint64(buckets) >> 32)
}

// tableCache keeps the last table: balancers and runs of the same servers share it.
type tableCache struct {
	mutex   sync.Mutex
	servers *sim.Server // the first: tells configurations apart
	live    string
	table   *tables.Table
}

func (c *tableCache) build(b *sim.Balancer, buckets, candidates int) (*tables.Table, error) {
	servers := make([]tables.Server, len(b.Servers))
	for i := range b.Servers {
		servers[i].Name = b.Servers[i].Name
	}
	live := make([]byte, len(servers))
	for _, s := range b.Live {
		servers[s].Weight = 1
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
