// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

const (
	// auditInterval is the time between comparisons of the counts of open connections with the
	// kernel's sockets.
	auditInterval = time.Minute
	// confirmInterval is the time from a comparison that finds a difference to the comparison that
	// is to confirm it. The program that counts takes far less time for its two steps (see
	// correct).
	confirmInterval = time.Second
)

// auditor compares the counts of open connections with the sockets that are marked as counted
// (bpf/agent/connections.h), and corrects a count that is wrong. A count goes wrong if sockets end
// while the program that counts is not attached, or if another BPF program switches off the
// kernel's calls of the program for a socket.
//
// Connections begin and end during a comparison. So each count has two halves, and the program adds
// new connections to only one of them. The auditor compares the other half, which can only fall. If
// this half is N before the comparison and M after it, the kernel should list M to N sockets that
// are marked for it. Only a number outside this range shows that the count is wrong. After each
// comparison the halves change their roles.
//
// For services of one port, the auditor also counts the open connections without a mark. They began
// while no program, or one of an earlier build, counted connections. No program sees their end. So
// the count includes as many of them as the last comparison found.
type auditor struct {
	log     *slog.Logger
	kernel  *kernel
	sockets *socketDump
	confirm time.Duration
	growing uint32 // the half to which the program adds connections: 0 or 1
	failed  bool   // the last comparison failed
}

// newAuditor returns an auditor of the calling thread's network namespace.
func (k *kernel) newAuditor() (*auditor, error) {
	sockets, err := openSocketDump(k.objects.CountedSockets)
	if err != nil {
		return nil, err
	}
	return &auditor{log: k.log, kernel: k, sockets: sockets, confirm: confirmInterval}, nil
}

// auditConnections audits the counts of open connections until the context ends or end is called.
// The function end waits for the last comparison.
func (a *Agent) auditConnections(ctx context.Context) (end func()) {
	audits, err := a.kernel.newAuditor()
	if err != nil {
		a.log.Warn("cannot compare the counts of open connections with the kernel's sockets", "error", err)
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		audits.run(ctx)
	}()
	return func() {
		cancel()
		<-done
		_ = audits.sockets.close()
	}
}

// run audits both halves of the counts soon after the start of the process, and then one half at
// each interval.
func (a *auditor) run(ctx context.Context) {
	for _, pause := range []time.Duration{0, a.confirm} {
		if !wait(ctx, pause) {
			return
		}
		a.audit(ctx)
	}
	for wait(ctx, auditInterval) {
		a.audit(ctx)
	}
}

// wait returns false if the context ends before the time is over.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}

// audit corrects the half of the counts that cannot grow, because the program adds connections only
// to the other half. Then the halves change their roles. After an error, they keep them. audit logs
// only the first of successive errors.
func (a *auditor) audit(ctx context.Context) {
	half := 1 - a.growing
	err := a.correct(ctx, half)
	if err == nil {
		err = a.grow(half)
	}
	if err != nil && !a.failed {
		a.log.Warn("cannot compare the counts of open connections with the kernel's sockets", "error", err)
	}
	a.failed = err != nil
}

// grow chooses the half to which the program adds connections.
func (a *auditor) grow(half uint32) error {
	if err := a.kernel.objects.GrowingHalf.Set(half); err != nil {
		return fmt.Errorf("choose a half of the counts: %w", err)
	}
	a.growing = half
	return nil
}

// drift is a range of errors: a count is too high by at least low and at most high connections.
// Negative numbers tell that the count is too low.
type drift struct{ low, high int64 }

// certain returns the smallest error that the range allows: its number nearest to 0.
func (d drift) certain() int64 {
	switch {
	case d.low > 0:
		return d.low
	case d.high < 0:
		return d.high
	}
	return 0
}

// and returns the common part of two ranges that were found for the same count.
func (d drift) and(other drift) drift {
	common := drift{max(d.low, other.low), min(d.high, other.high)}
	if common.low > common.high {
		return drift{} // nothing in common: the count has changed in between
	}
	return common
}

// steady returns the part of a difference that two comparisons have found: the one nearer to 0 of a
// and b, or 0 if they have different signs.
func steady(a, b int64) int64 {
	switch {
	case a > 0 && b > 0:
		return min(a, b)
	case a < 0 && b < 0:
		return max(a, b)
	}
	return 0
}

// mismatch is the difference between the counts and the sockets, by service.
type mismatch struct {
	drifts map[agentServiceKey]drift
	// unseen tells how many more connections without a mark there are than the count includes.
	unseen map[agentServiceKey]int64
}

// isWrong tells whether there is a difference.
func (m *mismatch) isWrong() bool {
	for key, d := range m.drifts {
		if d.certain() != 0 || m.unseen[key] != 0 {
			return true
		}
	}
	return false
}

// correct corrects the counts of a half that cannot grow, by the part of the difference that a
// second comparison confirms. The first difference may last only a moment: the program counts in
// two steps, and it removes the mark of a socket just before the kernel changes the socket's state.
func (a *auditor) correct(ctx context.Context, half uint32) error {
	first, err := a.compare(half)
	if err != nil || !first.isWrong() {
		return err
	}
	if !wait(ctx, a.confirm) {
		return nil
	}
	second, err := a.compare(half)
	if err != nil {
		return err
	}
	var errs []error
	for key, d := range first.drifts {
		if by := d.and(second.drifts[key]).certain(); by != 0 {
			errs = append(errs, a.add(key, half, -by))
		}
		if by := steady(first.unseen[key], second.unseen[key]); by != 0 {
			errs = append(errs, a.change(agentCountCorrection{Service: key, AddUnseen: by}))
		}
	}
	return errors.Join(errs...)
}

// compare compares the counts of a half that cannot grow with the sockets. It finds nothing if the
// program that counts is not that of this process.
func (a *auditor) compare(half uint32) (found mismatch, err error) {
	if counting, err := a.kernel.isCounting(); err != nil || !counting {
		return found, err
	}
	before, err := a.counts()
	if err != nil {
		return found, err
	}
	marked, unmarked := map[agentServiceKey]int64{}, map[agentServiceKey]int64{}
	others, err := a.kernel.view().otherKeys()
	if err != nil {
		return found, err
	}
	firsts := map[agentServiceKey]agentServiceKey{}
	for first, keys := range others {
		for _, key := range keys {
			firsts[key] = first
		}
	}
	err = a.sockets.each(func(s diagSocket) {
		switch { // other sockets are half-open, or are marked for the other half
		case s.mark == nil && s.isEstablished():
			key := countKey(s.local)
			if first, ok := firsts[key]; ok {
				key = first
			}
			unmarked[key]++
		case s.mark != nil && uint32(s.mark.Half) == half:
			marked[s.mark.Service]++
		}
	})
	if err != nil {
		return found, err
	}
	after, err := a.counts()
	if err != nil {
		return found, err
	}
	found = mismatch{map[agentServiceKey]drift{}, map[agentServiceKey]int64{}}
	for key, was := range before { // a service that is not in both readings is left out
		if is, ok := after[key]; ok {
			// The half can only fall, so there should be is.Open to was.Open marked sockets.
			found.drifts[key] = drift{is.Open[half] - marked[key], was.Open[half] - marked[key]}
			found.unseen[key] = unmarked[key] - is.Unseen
		}
	}
	return found, nil
}

// countKey returns the key of the service of one port to which a local address and port belong.
// Services of all ports are left out: the connections of their clients cannot be told from those
// that the host itself opens.
func countKey(local netip.AddrPort) agentServiceKey {
	key := agentServiceKey{Protocol: unix.IPPROTO_TCP, Port: networkOrder(local.Port())}
	key.Vip.In6U.U6Addr8 = local.Addr().As16()
	return key
}

// counts reads the counts of open connections of all services.
func (a *auditor) counts() (map[agentServiceKey]agentConnectionCount, error) {
	counts := map[agentServiceKey]agentConnectionCount{}
	var key agentServiceKey
	var count agentConnectionCount
	m := a.kernel.objects.Connections
	all := m.Iterate()
	for all.Next(&key, &count) {
		counts[key] = count
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", m, err)
	}
	return counts, nil
}

// isCounting tells whether the attached program that counts connections is that of this process.
func (k *kernel) isCounting() (bool, error) {
	l, err := link.LoadPinnedLink(k.loader.PathOf(connectionCountPin), nil)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open %s: %w", connectionCountPin, err)
	}
	defer l.Close()
	attached, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("read %s: %w", connectionCountPin, err)
	}
	own, err := k.objects.CountConnections.Info()
	if err != nil {
		return false, fmt.Errorf("read program %s: %w", agentProgCountConnections, err)
	}
	id, ok := own.ID()
	return ok && attached.Program == id, nil
}

// add adds n to a half of a service's count, and logs the correction.
func (a *auditor) add(key agentServiceKey, half uint32, n int64) error {
	if err := a.change(agentCountCorrection{Service: key, Half: half, Add: n}); err != nil {
		return err
	}
	a.log.Warn("the count of open connections was wrong, and is corrected", "service", a.nameOf(key), "added", n)
	return nil
}

// change runs the program that changes a count. User space cannot change it, because other programs
// add to it at the same time.
func (a *auditor) change(by agentCountCorrection) error {
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&by)), unsafe.Sizeof(by))
	if _, err := a.kernel.objects.CorrectConnections.Run(&ebpf.RunOptions{Data: bytes}); err != nil {
		return fmt.Errorf("correct a count of open connections: %w", err)
	}
	return nil
}

// nameOf returns the name of a service, or its VIP and port if it is no longer configured.
func (a *auditor) nameOf(key agentServiceKey) string {
	var label agentServiceLabel
	if known, err := find(a.kernel.objects.ServiceNames, key, &label); !known || err != nil {
		return addressOf(key).String()
	}
	return text(label.Name[:])
}
