// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/poll"
	"github.com/segue-lb/segue/internal/testhost"
)

// Agents and balancers change their keys by reloads, one after the other. No poll is lost at any
// step.
func TestReloadOfPollKeys(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	file := filepath.Join(t.TempDir(), "signal.key")
	writeKeys(t, file, oldKey)
	cfg := n.config(1, desired.SRv6Encap, vip6.Addr())
	cfg.Node.SignalKey, cfg.Poll.Listen = file, "[::1]:0"
	a := n.run(1, cfg, link.AttachTCX)
	b := poll.NewPoller()
	t.Cleanup(func() { _ = b.Close() })
	b.SetKeys(desired.SignalKeys{oldKey})
	target := poll.Target{
		Address: netip.MustParseAddrPort(a.polls.Address()),
		Service: poll.Service{VIP: vip6.Addr(), Port: vip6.Port(), Protocol: 6},
	}
	answered := uint64(0)
	asks := func(step string) {
		t.Helper()
		n.in(n.servers[0], func() error { return b.Ask(target) })
		answered++
		for end := time.Now().Add(patience); a.polls.Counts().Received < answered ||
			b.Counts().Received < answered; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: no answer: agent %+v, balancer %+v", step, a.polls.Counts(), b.Counts())
			}
		}
	}
	asks("at first")
	for _, keys := range []desired.SignalKeys{{oldKey, newKey}, {newKey, oldKey}, {newKey}} {
		asks("before the agent reloads")
		testhost.Must(t, a.Reload(t.Context(), cfg, desired.Secrets{SignalKeys: keys}))
		asks("before the balancer reloads")
		b.SetKeys(keys)
		asks("after both")
	}
	if refused := a.polls.Counts().Refused + b.Counts().Refused; refused != 0 {
		t.Errorf("%d datagrams are refused", refused)
	}
}
