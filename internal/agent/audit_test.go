// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// auditTest is a server whose counts of open connections are audited. A difference is confirmed at
// once.
type auditTest struct {
	*countTest
	*auditor
	log bytes.Buffer
}

func newAuditTest(t *testing.T) *auditTest { return newAuditTestOf(t, flow{client4, vip4}) }

// newAuditTestOf is newAuditTest for connections between the ends of a flow.
func newAuditTestOf(t *testing.T, way flow) *auditTest {
	t.Helper()
	a := &auditTest{countTest: newCountTest(t, way.client, way.vip)}
	a.do(func() (err error) {
		a.auditor, err = a.k.newAuditor()
		return err
	})
	a.auditor.confirm = 0
	a.auditor.log = slog.New(slog.NewTextHandler(&a.log, nil))
	t.Cleanup(func() { _ = a.sockets.close() })
	return a
}

// auditAll audits both halves of the counts, and requires the number of connections, and that by
// which the counts were ever corrected.
func (a *auditTest) auditAll(when string, want int64, corrected uint64) {
	a.t.Helper()
	for range 2 {
		if a.audit(context.Background()); a.failed {
			a.t.Fatalf("%s: %s", when, a.log.String())
		}
	}
	var count agentConnectionCount
	testhost.Must(a.t, a.k.objects.Connections.Lookup(serviceKey(a.service), &count))
	if got := count.Open[0] + count.Open[1]; got != want || count.Corrected != corrected {
		a.t.Errorf("%s: %d connections, corrected by %d; want %d, corrected by %d",
			when, got, count.Corrected, want, corrected)
	}
}

// requireUnseen requires that audits have found so many connections whose begin no program has
// seen.
func (a *auditTest) requireUnseen(when string, want int64) {
	a.t.Helper()
	var count agentConnectionCount
	testhost.Must(a.t, a.k.objects.Connections.Lookup(serviceKey(a.service), &count))
	if count.Unseen != want {
		a.t.Errorf("%s: %d unseen connections, want %d", when, count.Unseen, want)
	}
}

// drift makes the count of a half wrong.
func (a *auditTest) drift(half int, by int64) {
	a.t.Helper()
	key := serviceKey(a.service)
	var count agentConnectionCount
	m := a.k.objects.Connections
	testhost.Must(a.t, m.Lookup(key, &count))
	count.Open[half] += by
	testhost.Must(a.t, m.Put(key, count))
}

// A wrong count is corrected, in whatever half and direction, and logged. Right counts stay.
func TestAuditCorrectsWrongCounts(t *testing.T) {
	a := newAuditTest(t)
	accepted := a.listen(vip4)
	_, first := a.openBy(a.ordinary, accepted)
	a.auditAll("a right count", 1, 0)
	_, _ = a.openBy(a.fastOpen, accepted)
	a.auditAll("with Fast Open", 2, 0)
	a.drift(0, 5)
	a.auditAll("too high", 2, 5)
	a.drift(1, -3)
	a.auditAll("too low", 2, 8)
	a.drift(0, -1)
	a.drift(1, 1)
	a.auditAll("both halves", 2, 10)
	if !strings.Contains(a.log.String(), `service="198.51.100.80 80" added=-5`) {
		t.Errorf("the log is %s", a.log.String())
	}
	testhost.Must(t, first.Close())
	a.expect("one is closed", 1)
	a.auditAll("one is closed", 1, 10)
}

// While the program that counts is not attached, connections end and begin. Audits count those that
// it has not seen begin, until they end.
func TestAuditAfterCountingStopped(t *testing.T) {
	a := newAuditTest(t)
	accepted := a.listen(vip4)
	_, unseenEnd := a.openBy(a.ordinary, accepted)
	_, seen := a.openBy(a.ordinary, accepted)
	a.auditAll("two connections", 2, 0)
	a.detach()
	testhost.Must(t, unseenEnd.Close())
	_, unseen := a.openBy(a.ordinary, accepted)
	a.drift(0, 7)
	a.auditAll("nothing counts", 2+7, 0)
	a.drift(0, -7)
	a.attach()
	a.auditAll("counting again", 1, 1)
	a.requireUnseen("counting again", 1)
	testhost.Must(t, errors.Join(unseen.Close(), seen.Close()))
	a.expect("both are closed", 0)
	a.auditAll("both are closed", 0, 1)
	a.requireUnseen("both are closed", 0)
}

// Connections from before the first start are part of the load until they end.
func TestConnectionsFromBefore(t *testing.T) {
	for _, way := range []flow{{client4, vip4}, {client6, vip6}} {
		a := newAuditTestOf(t, way)
		accepted := a.listen(way.vip)
		a.detach()
		_, first := a.openBy(a.ordinary, accepted)
		_, second := a.openBy(a.ordinary, accepted)
		a.attach()
		_, third := a.openBy(a.ordinary, accepted)
		load := func(when string, want uint32) {
			t.Helper()
			a.auditAll(when, 1, 0)
			l, known, err := a.k.view().openConnections(serviceKey(a.service))
			if err != nil || !known || l.Busy != want {
				t.Errorf("%s: %d connections, want %d (known: %v, %v)", when, l.Busy, want, known, err)
			}
		}
		load("all are open", 3)
		testhost.Must(t, first.Close())
		load("one from before has ended", 2)
		testhost.Must(t, second.Close())
		load("both have ended", 1)
		_ = third.Close()
	}
}

// Audits correct nothing while many connections come and go.
func TestAuditLeavesRightCountsAlone(t *testing.T) {
	a := newAuditTest(t)
	accepted := a.listen(vip4)
	const clients, rounds = 4, 300
	a.openBy(a.ordinary, accepted) // stays open
	var traffic sync.WaitGroup
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for range clients * rounds {
			_ = (<-accepted).Close()
		}
	}()
	for range clients {
		traffic.Go(func() {
			err := a.ns.Do(func() error {
				for range rounds {
					c, err := net.Dial("tcp", vip4.String())
					if err != nil {
						return err
					}
					_ = c.Close()
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	ended := make(chan struct{})
	go func() { traffic.Wait(); close(ended) }()
	audits, wrong := 0, 0
	for running := true; running; audits++ {
		select {
		case <-ended:
			running = false
		default:
		}
		// Each audit follows the one before at once, so it meets many connections that end.
		found, err := a.compare(1 - a.growing)
		if err = errors.Join(err, a.grow(1-a.growing)); err != nil {
			t.Fatal(err)
		}
		if found.isWrong() {
			wrong++
		}
	}
	<-closed
	a.expect("only the first connection is open", 1)
	a.auditAll("the end", 1, 0)
	t.Logf("%d audits of %d connections, %d unconfirmed differences", audits, clients*rounds, wrong)
	// A thread can stand still between two steps (confirmInterval).
	if wrong > audits/10+2 {
		t.Errorf("%d of %d audits find a difference", wrong, audits)
	}
}

// The kernel lists all marked sockets, in many messages.
func TestSocketDumpListsAllMarks(t *testing.T) {
	for _, way := range []flow{{client4, vip4}, {client6, vip6}} {
		c := newCountTest(t, way.client, way.vip)
		accepted := c.listen(way.vip)
		const connections = 500
		c.do(func() error {
			for range connections {
				client, err := net.Dial("tcp", way.vip.String())
				if err != nil {
					return err
				}
				t.Cleanup(func() { _ = client.Close() })
			}
			return nil
		})
		c.expect("all are open", connections)
		var dump *socketDump
		c.do(func() (err error) {
			dump, err = openSocketDump(c.k.objects.CountedSockets)
			return err
		})
		listed := 0
		err := dump.each(func(s diagSocket) {
			if s.mark != nil && s.mark.Service == serviceKey(c.service) {
				listed++
			}
		})
		if err = errors.Join(err, dump.close()); err != nil || listed != connections {
			t.Errorf("%s: %d marks are listed, want %d: %v", way.vip, listed, connections, err)
		}
		for range connections {
			_ = (<-accepted).Close()
		}
	}
}

func TestDriftOfCounts(t *testing.T) {
	for _, c := range []struct {
		first, second drift
		want          int64
	}{
		{drift{0, 0}, drift{0, 0}, 0},
		{drift{-3, 4}, drift{-2, 5}, 0}, // connections ended meanwhile
		{drift{5, 5}, drift{5, 5}, 5},
		{drift{2, 9}, drift{5, 7}, 5},     // at least 5 too high
		{drift{-9, -2}, drift{-7, 0}, -2}, // at least 2 too low
		{drift{1, 1}, drift{0, 0}, 0},     // a program was between its two steps
		{drift{3, 9}, drift{-1, 2}, 0},
	} {
		if got := c.first.and(c.second).certain(); got != c.want {
			t.Errorf("%v, then %v: %d, want %d", c.first, c.second, got, c.want)
		}
	}
}
