// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// formerIdentity is the identity of tables that an earlier build has made.
// dataplane.TestPlacesInTablesOfAFormerBuild compares the places in them with those of that build.
func (f *fixture) formerIdentity() *dataplane.Identity {
	identity := f.identity
	identity.Version = 10
	for i := range 3 {
		identity.FlowKeys[i] |= 1
	}
	return &identity
}

// This build takes over the tables of an earlier one, whose hash for buckets is another, and finds
// all flows in them: also half-open ones, and again after the next restart. It does not change the
// identity, so that the earlier build can take the tables over as well.
func TestTakesOverTablesOfAnEarlierBuild(t *testing.T) {
	t.Parallel()
	s1, s2, s3 := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)
	cfg := webOf(s1, s2, s3)
	cfg.Node.Limits.Flows = 1 << 14
	f := open(t, cfg)
	if f.identity.HasFormerPlaces() {
		t.Fatal("new tables have the former hash")
	}
	former := f.formerIdentity()
	f.restartWith(former)
	f.route()
	// No flow is where hashing would place it.
	servers := map[dataplane.Flow]string{}
	for port := range uint16(liveFlows) {
		flow := fromPort(web, 10000+port)
		other, bucket := f.otherThanPlaced(flow, "web"), f.bucket(flow)
		bucket[slices.Index(bucket, 0)] = entryOf(f.signature(flow), f.slot("web", other), stateEstablished, f.now())
		servers[flow] = "web/" + other
	}
	for range 2 {
		f.stay(servers, "")
		f.restartAs(cfg)
		if f.identity != *former {
			t.Errorf("the identity is %+v, want %+v", f.identity, *former)
		}
	}
	// New flows are found at once, too.
	for port := range uint16(liveFlows) {
		flow := fromPort(web, 20000+port)
		f.run(frameOf(flow, packet.Flags(packet.SYN)))
		if f.entry(flow).State() != stateNew {
			t.Errorf("%v has no entry in its bucket", flow)
		}
	}
}

// The log and the status say that tables of an earlier build keep its hash, and how to renew them.
func TestTellsOfTablesOfAnEarlierBuild(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1))
	f := open(t, cfg)
	instance := f.cfg.Node.Instance
	hasFormerHash := func() (string, bool) {
		t.Helper()
		f.stop()
		var log bytes.Buffer
		b, err := New(cfg, desired.Secrets{}, slog.New(slog.NewTextHandler(&log, nil)))
		f.must(err)
		f.must(b.Close())
		view, err := inspect.OpenView(instance)
		f.must(err)
		defer view.Close()
		snapshot, err := view.Snapshot()
		f.must(err)
		return log.String(), snapshot.FlowTable.FormerHash
	}
	if log, is := hasFormerHash(); is || log != "" {
		t.Errorf("new tables: %t, log %q", is, log)
	}
	f.start(cfg)
	f.must(f.plane.Objects.Identity.Put(uint32(0), f.formerIdentity()))
	log, is := hasFormerHash()
	if want := "segue lb detach " + instance; !is || !strings.Contains(log, want) {
		t.Errorf("tables of an earlier build: %t, log %q, want %q", is, log, want)
	}
	f.must(dataplane.Detach(instance))
	f.start(cfg)
	if f.identity.HasFormerPlaces() {
		t.Error("tables made anew have the former hash")
	}
}

// A stranger who sends from chosen sources, two packets from each, does not displace another
// client's flow from its bucket, however the sources differ.
func TestChosenFlowsLeaveTheVictimsBucket(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Node.Limits = desired.Limits{Flows: 1 << 20, Servers: 64}
	f := open(t, cfg)
	for name, clients := range packettest.ClientSets() {
		victim := web
		victim.Source = clients[0]
		if victim.Source.Addr().Is4In6() {
			continue // not an address of IPv6 packets
		}
		server := serverOf(f.run(frameOf(victim, packet.Flags(packet.SYN))))
		f.run(frameOf(victim, packet.Flags(packet.ACK)))
		mates := 0
		for _, client := range clients[1:] {
			other := victim
			other.Source = client
			f.exec(frameOf(other, packet.Flags(packet.SYN)), nil)
			f.exec(frameOf(other, packet.Flags(packet.ACK)), nil)
		}
		for _, value := range f.bucket(victim) {
			if dataplane.FlowEntry(value).State() != stateFree {
				mates++
			}
		}
		// By chance, 511 flows share one of 262,144 buckets with a probability of 1/513.
		if mates--; mates < 0 || mates > 1 {
			t.Errorf("%s: %d chosen flows are in the victim's bucket", name, mates)
		}
		if got := serverOf(f.run(frameOf(victim, packet.Flags(packet.ACK)))); got != server {
			t.Errorf("%s: the victim's connection moved from %s to %s", name, server, got)
		}
		f.forgetFlows()
	}
}
