// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"iter"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// countPatience is how long a switch may take to answer with its counters.
const countPatience = 2 * time.Second

// Status is what a controller knows of its switch.
type Status struct {
	Address    string `json:"address"`
	Device     uint64 `json:"device"`
	ElectionID uint64 `json:"election_id" doc:"of this controller"`
	Follows    bool   `json:"follows" doc:"whether the switch has all entries"`
	Problem    string `json:"problem,omitempty" doc:"why it does not follow"`
	// Since is when Follows was last changed.
	Since time.Time `json:"since" doc:"when follows last changed"`
	// Entries is how many the switch had when they were last known.
	Entries  int             `json:"entries" doc:"in all tables of the switch"`
	Services []ServiceStatus `json:"services" nullable:"false" doc:"services that the switch balances"`
	Passed   []PassedService `json:"passed_services" nullable:"false" doc:"services whose packets all pass to the host"`
	// Reasons are the counters of the switch. Bytes are of whole frames.
	Reasons   []datapath.ReasonCount `json:"reasons" nullable:"false" doc:"packets and bytes of frames by reason, since the switch began to run the program"`
	Uncounted string                 `json:"uncounted,omitempty" doc:"why reasons is empty"`
}

// ServiceStatus is what a switch has of a service.
type ServiceStatus struct {
	Name string `json:"name"`
	// Entries counts the entries by which packets find servers.
	Entries int `json:"entries" doc:"by which packets of the service find servers on the switch"`
	// Generation and Digest are those of the rows in force, as `segue status` shows them for the
	// balancer's own table. They are found by a hash of the entries that the switch has.
	Generation *uint64 `json:"generation" doc:"whose rows are in force on the switch; null: the switch has other rows"`
	Digest     string  `json:"digest,omitempty" doc:"of the generation"`
}

// PassedService is a service that a switch does not balance.
type PassedService struct {
	Name   string `json:"name"`
	Reason string `json:"reason" example:"persistence table"`
}

// RatesSince sets the rates of the counters since an earlier status that has them.
func (s *Status) RatesSince(earlier *Status, interval time.Duration) {
	if len(earlier.Reasons) > 0 {
		datapath.SetRates(s.Reasons, earlier.Reasons, interval)
	}
}

// sum is a hash of entries that depends neither on their order nor on the set of tables that has
// them.
type sum struct {
	hash    uint64
	entries int
}

// add adds an entry. The service and the set of tables in its key do not count.
func (s *sum) add(table, key, value string) {
	h := fnv.New64a()
	_, rest := split(table, key)
	_, _ = io.WriteString(h, table+" "+rest+value) // packed texts tell their lengths; it never fails
	s.hash += h.Sum64()
	s.entries++
}

// split returns the first part of the key of an entry, and the rest: the service and the set of tables
// of an entry of rowTables, and otherwise the service.
func split(table, key string) (of, rest string) {
	end := 1 + int(key[0])
	if slices.Contains(rowTables, table) {
		end += 1 + int(key[end])
	}
	return key[:end], key[end:]
}

// summed adds the entries of a service to a sum while they are consumed.
func summed(entries iter.Seq[Entry], into *sum) iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		for e := range entries {
			into.add(e.Table, e.key(), e.value())
			if !yield(e) {
				return
			}
		}
	}
}

// sums returns the sums of the entries by which packets find servers on the switch, by the number of
// the service. Rows that are not in force do not count.
func (s *Switch) sums() map[uint16]sum {
	found, ofIDs := map[uint16]sum{}, s.sumsOfIDs()
	for _, table := range serviceTables {
		for _, value := range s.tables[table] {
			_, params := unpack(value)
			its := ofIDs[pack(params[0])]
			for _, table := range rowTables {
				for key, value := range s.tables[shelf(table, pack(params[:2]...))] {
					its.add(table, key, value)
				}
			}
			found[uint16(params[0].number())] = its
		}
	}
	return found
}

// sumsOfIDs returns the sums of the entries of idTables, by the packed number of the service.
func (s *Switch) sumsOfIDs() map[string]sum {
	found := map[string]sum{}
	for _, table := range idTables {
		for key, value := range s.tables[table] {
			of, _ := split(table, key)
			its := found[of]
			its.add(table, key, value)
			found[of] = its
		}
	}
	return found
}

// version is a generation of a service, and the sum of its entries.
type version struct {
	generation uint64
	digest     uint32
	sum
}

// note stores what the switch has of the services of a content.
func (f *Follower) note(s *Switch, c *Content) {
	for number, its := range s.inForce {
		f.known[number] = its.version
	}
	found, services := s.sums(), []ServiceStatus{}
	for _, service := range c.Services {
		state := ServiceStatus{Name: service.Name, Entries: found[service.Number].entries}
		known, isKnown := f.known[service.Number]
		if isKnown && state.Entries > 0 && found[service.Number] == known.sum {
			state.Generation, state.Digest = &known.generation, fmt.Sprintf("%08x", known.digest)
		}
		services = append(services, state)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state.Services, f.state.Passed, f.state.Entries = services, append([]PassedService{}, c.Passed...), s.Size()
	f.servers = c.Servers
}

// Status returns what is known of the switch, with its counters, which it reads now.
func (f *Follower) Status(ctx context.Context) *Status {
	counts, err := f.reasons(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	state := f.state
	state.Reasons = counts
	if err != nil {
		state.Reasons, state.Uncounted = []datapath.ReasonCount{}, err.Error()
	}
	return &state
}

func (f *Follower) reasons(ctx context.Context) (counts []datapath.ReasonCount, err error) {
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	err = withReader(&f.to, func(r *Reader) (err error) {
		counts, err = r.Reasons(ctx)
		return err
	})
	return counts, err
}

// withReader calls a function with a connection of its own: it works also while another controller
// is the primary one, and reads the certificates anew.
func withReader(to *desired.Switch, do func(*Reader) error) error {
	r, err := NewReader(to)
	if err != nil {
		return err
	}
	defer r.Close()
	return do(r)
}
