// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/load"
)

// acceptPolicies and loadSources map the words of a configuration file to the numbers of the data
// path.
var (
	acceptPolicies = map[desired.AcceptPolicy]agentAcceptPolicy{
		desired.AcceptAlways:  agentAcceptPolicyACCEPT_ALWAYS,
		desired.AcceptNever:   agentAcceptPolicyACCEPT_NEVER,
		desired.AcceptStatic:  agentAcceptPolicyACCEPT_STATIC,
		desired.AcceptDynamic: agentAcceptPolicyACCEPT_DYNAMIC,
		desired.AcceptLeast:   agentAcceptPolicyACCEPT_LEAST,
		Drained:               agentAcceptPolicyACCEPT_DRAINED,
	}
	loadSources = map[desired.LoadSource]agentLoadSource{
		desired.LoadConnections:  agentLoadSourceLOAD_CONNECTIONS,
		desired.LoadAcceptQueue:  agentLoadSourceLOAD_ACCEPT_QUEUE,
		desired.LoadApache:       agentLoadSourceLOAD_APACHE_SCOREBOARD,
		desired.LoadCgroup:       agentLoadSourceLOAD_CGROUP,
		desired.LoadSharedMemory: agentLoadSourceLOAD_SHARED_MEMORY,
		desired.LoadSharedMap:    agentLoadSourceLOAD_SHARED_MAP,
	}
)

// Drained is the policy of a drained service in the data path. A configuration file cannot name it.
const Drained desired.AcceptPolicy = "drained"

// newAcceptance returns the accept policy of a service in the form of the data path. Its threshold
// is the initial one.
func newAcceptance(s desired.AgentService) agentAcceptance {
	if s.Drained {
		s.Accept = desired.Accept{Policy: Drained}
	}
	a := agentAcceptance{
		Policy:   uint8(acceptPolicies[s.Accept.Policy]),
		Source:   uint8(loadSources[s.Load.Kind]),
		Capacity: capacityOf(s.Load),
	}
	switch s.Accept.Policy {
	case desired.AcceptStatic:
		a.Initial = *s.Accept.Threshold
	case desired.AcceptDynamic:
		a.Initial, a.Window = *s.Accept.Initial, s.Accept.Window
		a.Few, a.Many = accept.Bounds(s.Accept.Window, *s.Accept.Epsilon)
		a.WindowTime = uint64(*s.Accept.WindowTime)
	}
	a.Threshold = a.Initial
	if s.Load.Kind.IsPolled() {
		a.StaleAfter = uint64(load.StaleAfter(s.Load.Interval))
	}
	if s.NotLocal == desired.NotLocalReset {
		a.Reset = 1
	}
	return a
}

// capacityOf returns the capacity that the configuration gives a load. For the source connections,
// this is the number of workers if there is no other capacity. If the configuration gives neither,
// capacityOf returns accept.NoCapacity. Then the capacity that the load source tells applies, if it
// tells one: the source apache-scoreboard tells the configured number of workers.
func capacityOf(s desired.Source) uint32 {
	if s.Capacity == 0 && s.Kind == desired.LoadConnections {
		return cmp.Or(s.Workers, accept.NoCapacity)
	}
	return cmp.Or(s.Capacity, accept.NoCapacity)
}

// sameRule tells whether two acceptances are the same policy with the same parameters. It ignores
// the fields that the data path changes, and the service's number.
func sameRule(a, b agentAcceptance) bool {
	a.Lock, a.Threshold, a.Attempts, a.Accepted = b.Lock, b.Threshold, b.Attempts, b.Accepted
	a.Began, a.Number = b.Began, b.Number
	return a == b
}

// writeAcceptances writes the accept policies of the services to the data path. A service whose
// policy has not changed keeps its current threshold. Removed services stay in the tables until the
// takeover is complete, because the previous process uses the same tables until then.
func (k *kernel) writeAcceptances(
	t *datapath.Takeover, want map[agentServiceKey]agentAcceptance,
) error {
	numbers, err := k.serviceNumbers()
	if err != nil {
		return err
	}
	for key, a := range want {
		if err := addIfAbsent(t, k.objects.Connections, key, agentConnectionCount{}); err != nil {
			return err
		}
		if err := k.writeAcceptance(t, key, a, numbers); err != nil {
			return err
		}
	}
	// The connection count of a removed service is not removed: its connections may still be open
	// when the service is added again.
	t.OnCommit(func() error {
		return errors.Join(
			datapath.Keep(k.objects.Acceptances, want),
			datapath.Keep(k.objects.Loads, want),
			datapath.Keep(k.objects.LoadMaps, want),
		)
	})
	return nil
}

// serviceNumbers are the numbers that services have: the indexes of their counters in the map
// offers.
type serviceNumbers map[uint32]bool

// serviceNumbers reads the numbers of the services that have accept policies.
func (k *kernel) serviceNumbers() (serviceNumbers, error) {
	numbers := serviceNumbers{}
	var key agentServiceKey
	var a agentAcceptance
	all := k.objects.Acceptances.Iterate()
	for all.Next(&key, &a) {
		numbers[a.Number] = true
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", k.objects.Acceptances, err)
	}
	return numbers, nil
}

// next returns the lowest number that no service has, and marks it as used.
func (n serviceNumbers) next() (number uint32) {
	for n[number] {
		number++
	}
	n[number] = true
	return number
}

// writeAcceptance writes the accept policy of one service. A new service gets a number, and its
// counters of offers begin at zero. A service with the same policy as before keeps its acceptance.
// A changed policy begins with its initial threshold, and keeps the number of the service.
func (k *kernel) writeAcceptance(
	t *datapath.Takeover, key agentServiceKey, a agentAcceptance, numbers serviceNumbers,
) error {
	m := k.objects.Acceptances
	var now agentAcceptance
	err := m.LookupWithFlags(key, &now, ebpf.LookupLock)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		a.Number = numbers.next()
		if err := k.objects.Offers.Put(a.Number, agentOffers{}); err != nil {
			return fmt.Errorf("write to %s: %w", k.objects.Offers, err)
		}
		return addIfAbsent(t, m, key, a)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", m, err)
	}
	a.Number = now.Number
	if sameRule(a, now) {
		return nil
	}
	put := func(a agentAcceptance) error {
		if err := m.Update(key, a, ebpf.UpdateExist|ebpf.UpdateLock); err != nil {
			return fmt.Errorf("write to %s: %w", m, err)
		}
		return nil
	}
	t.OnUndo(func() error { return put(now) })
	return put(a)
}

// addIfAbsent adds an element to a table, unless the key has one.
func addIfAbsent(t *datapath.Takeover, m *ebpf.Map, key agentServiceKey, value any) error {
	err := m.Update(key, value, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("write to %s: %w", m, err)
	}
	t.OnUndo(func() error { return m.Delete(key) })
	return nil
}
