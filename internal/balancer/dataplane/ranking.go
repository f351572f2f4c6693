// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	// ranksPerLine is RANKS_PER_LINE in bpf/balancer/types.h.
	ranksPerLine = uint32(len(balancerRankLine{}.Node))
	// rankNone is RANK_NONE in bpf/balancer/tables/ranking.h: no server to choose.
	rankNone = math.MaxInt64
	// rankedPerRun is how many slots one run of rank_servers ranks. As for a sweep, one run should
	// take less than a millisecond.
	rankedPerRun = 1 << 12
)

// Rankings are the rankings of services by which the data path finds the server with the lowest
// score: the maps rankings and rank_lines of bpf/balancer/tables/ranking.h. One goroutine owns
// them.
//
// A ranking never changes its servers. If they change, a new ranking is made beside the old one,
// and one store replaces the old one. The old one's lines are used again when all packets that may
// use them have left.
type Rankings struct {
	plane     *Plane
	memory    [2][]byte
	byService []balancerRanking
	lines     []balancerRankLine
	space     lineSpace
	former    []region                     // packets may still use them
	placeOf   map[uint32]map[uint32]uint32 // by service and slot
	program   *ebpf.Program
}

// mapRankings maps the rankings. They are those of an earlier process.
func (p *Plane) mapRankings() (*Rankings, error) {
	r := &Rankings{
		plane: p, placeOf: map[uint32]map[uint32]uint32{}, program: p.Objects.RankServers,
	}
	var err error
	if r.memory[0], r.byService, err = mapArray[balancerRanking](p.Objects.Rankings); err != nil {
		return nil, fmt.Errorf("map the rankings: %w", err)
	}
	if r.memory[1], r.lines, err = mapArray[balancerRankLine](p.Objects.RankLines); err != nil {
		return nil, errors.Join(fmt.Errorf("map the lines of rankings: %w", err), r.close())
	}
	r.space.size = uint32(len(r.lines))
	return r, nil
}

func (r *Rankings) close() error {
	var errs []error
	for _, memory := range r.memory {
		if memory != nil {
			errs = append(errs, unix.Munmap(memory))
		}
	}
	return errors.Join(errs...)
}

// load finds out which lines are in use, and which places servers have, after an earlier process. A
// process can be killed while it changes a ranking. Servers can then have places that do not belong
// to the service's ranking. The next call of Set for the service then makes a new ranking, because
// Rankings.has returns false.
func (r *Rankings) load(servers []balancerServer) {
	for service := range r.byService {
		if at := r.region(uint32(service)); at.count > 0 && !r.space.occupy(at) {
			// The lines overlap others, or are outside of the map. No process writes such a
			// ranking.
			r.publish(uint32(service), region{}, 0)
		}
	}
	for slot := range servers {
		if s := &servers[slot]; s.Rank > 0 {
			r.note(s.Service, uint32(slot), s.Rank-1)
		}
	}
}

// note stores the place that a server has in the ranking of its service.
func (r *Rankings) note(service, slot, place uint32) {
	if r.placeOf[service] == nil {
		r.placeOf[service] = map[uint32]uint32{}
	}
	r.placeOf[service][slot] = place
}

// region returns the lines of a service's ranking.
func (r *Rankings) region(service uint32) region {
	ranking := r.byService[service]
	return region{ranking.First, linesOf(ranking.Servers)}
}

// publish replaces the ranking of a service by one atomic write.
func (r *Rankings) publish(service uint32, at region, servers int) {
	word := (*uint64)(unsafe.Pointer(&r.byService[service]))
	atomic.StoreUint64(word, uint64(at.first)|uint64(servers)<<32)
}

// Set makes the service's ranking have the servers of these slots, in any order. Their prices must
// be set. The servers that take new flows can be chosen at once. If the ranking has these servers
// and no others already, Set does nothing. Without slots, Set removes the ranking. It returns an
// error if there is no room, or if a system call fails.
func (r *Rankings) Set(service uint32, slots []uint32) error {
	before := r.placeOf[service]
	switch {
	case len(slots) == 0:
		r.Remove(service)
		return nil
	case r.has(service, slots):
		return nil
	}
	at, err := r.take(linesOf(uint32(len(slots))))
	if err != nil {
		return err
	}
	placed := arrange(slots, before)
	fillTree(r.lines[at.first:at.end()], r.ranks(service, placed)) // no packet uses it yet
	r.unrank(service, slots)
	for place, slot := range placed {
		if _, isRanked := before[slot]; !isRanked {
			r.plane.Loads.beginCounts(slot)
		}
		r.plane.Servers.setRank(slot, uint32(place)+1)
		r.note(service, slot, uint32(place))
	}
	r.retire(service)
	r.publish(service, at, len(slots))
	return r.Rank(slots) // scores may have changed since fillTree
}

// has tells whether the service's ranking has these servers and no others, each in its place.
func (r *Rankings) has(service uint32, slots []uint32) bool {
	before := r.placeOf[service]
	if int(r.byService[service].Servers) != len(slots) || len(before) != len(slots) {
		return false
	}
	taken := make([]bool, len(slots))
	for _, slot := range slots {
		place, ok := before[slot]
		if !ok || int(place) >= len(slots) || taken[place] {
			return false
		}
		taken[place] = true
	}
	return true
}

// take puts the given number of free lines into use. If there is no gap of this size, it waits
// until no packet uses the lines of former rankings, and frees them. During a takeover it does not
// do so, because an undo needs these lines.
func (r *Rankings) take(count uint32) (region, error) {
	at, ok := r.space.take(count)
	if !ok && len(r.former) > 0 && r.plane.backup == nil {
		if err := r.plane.Settle(); err != nil {
			return at, err
		}
		at, ok = r.space.take(count)
	}
	if !ok {
		return at, fmt.Errorf("no room for a ranking of %d lines: the rankings of other services leave no "+
			"gap of this size, and node.limits.servers is too low", count)
	}
	return at, nil
}

// ranks returns the ranks of the servers in these slots: the score of a server that takes new flows
// of the service, and rankNone for any other server.
func (r *Rankings) ranks(service uint32, slots []uint32) []uint64 {
	ranks := make([]uint64, len(slots))
	for i, slot := range slots {
		ranks[i] = rankNone
		if r.plane.Servers.takesFlowsOf(slot, service) {
			ranks[i] = r.plane.Loads.Score(slot)
		}
	}
	return ranks
}

// unrank removes the servers of a service from its ranking, except those of some slots.
func (r *Rankings) unrank(service uint32, except []uint32) {
	kept := make(map[uint32]bool, len(except))
	for _, slot := range except {
		kept[slot] = true
	}
	for slot := range r.placeOf[service] {
		if !kept[slot] {
			r.plane.Servers.setRank(slot, 0)
			delete(r.placeOf[service], slot)
		}
	}
}

// retire notes that the lines of a service's ranking are about to be replaced.
func (r *Rankings) retire(service uint32) {
	if at := r.region(service); at.count > 0 {
		r.former = append(r.former, at)
	}
}

// Remove removes the ranking of a service, if it has one. No packet may be placed by it any more.
func (r *Rankings) Remove(service uint32) {
	if r.byService[service].Servers == 0 && len(r.placeOf[service]) == 0 {
		return
	}
	r.retire(service)
	r.publish(service, region{}, 0)
	r.unrank(service, nil)
	delete(r.placeOf, service)
}

// HasFormer tells whether lines wait for a Settle, to be used again.
func (r *Rankings) HasFormer() bool { return len(r.former) > 0 }

// settled frees the given number of former regions, the oldest ones: no packet uses their lines any
// more. During a takeover it does nothing, because an undo needs them.
func (r *Rankings) settled(regions int) {
	if r.plane.backup != nil {
		return
	}
	for _, at := range r.former[:regions] {
		r.space.release(at)
	}
	r.former = r.former[regions:]
}

// Rank ranks the servers of the slots again. It must be called when their prices have changed, or
// when other servers than before take new flows. It may be called by any goroutine. Slots
// between the given ones are ranked as well, which does no harm. Rank returns an error if the
// program cannot be run.
func (r *Rankings) Rank(slots []uint32) error {
	if len(slots) == 0 {
		return nil
	}
	return rankSlots(r.program, slices.Min(slots), slices.Max(slots))
}

// rankSlots ranks the servers of the slots from first to last by the program rank_servers.
func rankSlots(program *ebpf.Program, first, last uint32) error {
	for ; first <= last; first += rankedPerRun {
		run := balancerRankRun{First: first, Count: min(rankedPerRun, last-first+1)}
		if _, err := program.Run(&ebpf.RunOptions{Context: run}); err != nil {
			return fmt.Errorf("rank %d servers from slot %d: %w", run.Count, first, err)
		}
	}
	return nil
}
