// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// TestForgedReportsChangeNothing records the signals with load reports of real connections. A
// neighbour on the fabric sends them again: as they were, with another load, in the name of a
// stranger, and after their key has expired. The balancer must count each for what it is. Neither
// what it knows of the servers' loads nor the connections may change.
func TestForgedReportsChangeNothing(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	const connections = 40
	topology := hunting(reportingServices(desired.SelectReports)...)
	topology.Servers = 4
	l := up(t, topology)
	tagSignals(t, l, "000102030405060708090a0b0c0d0e0f")
	c := startCapture(t, l, "lb1")
	var open []*connection
	for _, s := range l.Topology.Services {
		for range connections {
			one, err := dial(t.Context(), l, s)
			must(t, err)
			defer one.conn.Close()
			open = append(open, one)
		}
	}
	received, _ := c.stop(t)
	signals := slices.DeleteFunc(received, func(frame []byte) bool { return !creates(frame, l.Node("lb1")) })
	if len(signals) < connections/4 {
		t.Fatalf("lb1 got %d signals of %d connections", len(signals), len(open))
	}

	forger := &forger{t: t, l: l, before: loadsKnown(t, l)}
	forger.send("again", "return_create", signals)
	forger.send("with another load", "drop_tag", changed(signals, func(frame []byte) {
		const load = 1 << 13 // the lowest bit of its code
		part := reporter(frame)[8:]
		binary.BigEndian.PutUint64(part, binary.BigEndian.Uint64(part)^load)
	}))
	forger.send("as a stranger", "drop_sender", changed(signals, func(frame []byte) {
		reporter(frame)[7] = 99
	}))
	tagSignals(t, l, "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
	forger.send("with an expired key", "drop_tag", signals)

	for _, one := range open {
		if server, err := one.request(); server != one.server || err != nil {
			t.Errorf("a connection of %s to %s went to %q: %v", one.service.Name, one.server, server, err)
		}
	}
}

// forger sends frames to lb1 that must not change what it knows of the servers' loads.
type forger struct {
	t      *testing.T
	l      *lab.Lab
	before map[string]knownLoad
}

// send sends the frames from s4, waits until lb1 has counted them for the reason, and compares the
// loads.
func (f *forger) send(how, reason string, frames [][]byte) {
	f.t.Helper()
	counted := packetCounts(f.t, f.l.Node("lb1"))
	send(f.t, f.l, "s4", "eth0", "lb1", "eth0", frames)
	eventually(f.t, func() error {
		if n := packetCounts(f.t, f.l.Node("lb1")).since(f.t, counted)[reason]; n != uint64(len(frames)) {
			return fmt.Errorf("sent %s: %s counts %d of %d signals", how, reason, n, len(frames))
		}
		return nil
	})
	after := loadsKnown(f.t, f.l)
	for name, load := range f.before {
		if after[name].age <= load.age {
			f.t.Errorf("sent %s: the report of %s was %gs old, and is now %gs old", how, name, load.age, after[name].age)
		}
	}
	if diff := cmp.Diff(f.before, after, cmp.Comparer(func(a, b knownLoad) bool {
		return a.load == b.load && a.taken == b.taken && a.relayed == b.relayed
	})); diff != "" {
		f.t.Errorf("sent %s: what lb1 knows changed (-before +after):\n%s", how, diff)
	}
	f.before = after
}

// knownLoad is what a balancer knows of a server's load.
type knownLoad struct {
	load, age      float64
	taken, relayed uint64 // reports
}

// loadsKnown returns what lb1 knows of the loads of all servers that have reported one, by service
// and server.
func loadsKnown(t *testing.T, l *lab.Lab) map[string]knownLoad {
	t.Helper()
	known := map[string]knownLoad{}
	for _, s := range l.Topology.Services {
		for server, r := range reportsOf(t, l, "lb1", s.Name) {
			if r.Load != nil {
				known[s.Name+" "+server] = knownLoad{*r.Load, *r.Age, r.Counts["taken"], r.Counts["relayed"]}
			}
		}
	}
	return known
}

// tagSignals gives all nodes a key, the servers first.
func tagSignals(t *testing.T, l *lab.Lab, key string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	must(t, os.WriteFile(file, []byte(key+"\n"), 0o600))
	for _, name := range nodes(l, lab.RoleServer) {
		cfg := l.Node(name).AgentConfig()
		cfg.Node.SignalKey = file
		must(t, l.Node(name).WriteAgentConfig(cfg))
		reload(t, l, name)
	}
	reconfigure(t, l, func(cfg *desired.Balancer) { cfg.Node.SignalKey = file })
}

const (
	ethernetSize, ipv6Size, addressSize = 14, 40, 16
	// firstSegment is where the last entry of a list of three begins, behind the fixed part of the
	// routing header.
	firstSegment = ethernetSize + ipv6Size + 8 + 2*addressSize
)

// creates tells whether a frame is a create-stickiness to the balancer.
func creates(frame []byte, balancer *lab.Node) bool {
	if len(frame) < ethernetSize+ipv6Size || frame[ethernetSize]>>4 != 6 {
		return false
	}
	to := srv6.Parse(netip.AddrFrom16([16]byte(frame[ethernetSize+24:])))
	return to.Locator == balancer.Locator && to.Function == srv6.CreateStickiness
}

// reporter returns the address in a signal by which a server names itself and reports its load.
func reporter(frame []byte) []byte {
	at := ethernetSize + 8 // the source of srv6-encap
	if nextHeader := frame[ethernetSize+6]; nextHeader == 43 {
		at = firstSegment
	}
	return frame[at : at+addressSize]
}

// changed returns changed copies of frames.
func changed(frames [][]byte, change func(frame []byte)) (all [][]byte) {
	for _, frame := range frames {
		frame = slices.Clone(frame)
		change(frame)
		all = append(all, frame)
	}
	return all
}
