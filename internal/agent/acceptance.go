// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/load"
)

// acceptPolicies and loadSources are the numbers of the data path.
var (
	acceptPolicies = map[config.AcceptPolicy]agentAcceptPolicy{
		config.AcceptAlways:  agentAcceptPolicyACCEPT_ALWAYS,
		config.AcceptNever:   agentAcceptPolicyACCEPT_NEVER,
		config.AcceptStatic:  agentAcceptPolicyACCEPT_STATIC,
		config.AcceptDynamic: agentAcceptPolicyACCEPT_DYNAMIC,
	}
	loadSources = map[config.LoadSource]agentLoadSource{
		config.LoadConnections:  agentLoadSourceLOAD_CONNECTIONS,
		config.LoadAcceptQueue:  agentLoadSourceLOAD_ACCEPT_QUEUE,
		config.LoadApache:       agentLoadSourceLOAD_APACHE_SCOREBOARD,
		config.LoadCgroup:       agentLoadSourceLOAD_CGROUP,
		config.LoadSharedMemory: agentLoadSourceLOAD_SHARED_MEMORY,
	}
)

// newAcceptance is how a service takes connections, at first.
func newAcceptance(s config.AgentService) agentAcceptance {
	a := agentAcceptance{
		Policy:   uint8(acceptPolicies[s.Accept.Policy]),
		Source:   uint8(loadSources[s.Load.Kind]),
		Capacity: accept.NoCapacity,
	}
	switch s.Accept.Policy {
	case config.AcceptStatic:
		a.Initial = *s.Accept.Threshold
	case config.AcceptDynamic:
		a.Initial, a.Window = *s.Accept.Initial, s.Accept.Window
		a.Few, a.Many = accept.Bounds(s.Accept.Window, *s.Accept.Epsilon)
	}
	a.Threshold = a.Initial
	if s.Load.Kind == config.LoadConnections && s.Load.Workers != 0 {
		a.Capacity = s.Load.Workers
	}
	if interval := intervals[s.Load.Kind]; interval != 0 {
		a.StaleAfter = uint64(load.StaleAfter(interval))
	}
	if s.NotLocal == config.NotLocalReset {
		a.Reset = 1
	}
	return a
}

// sameRule tells whether two acceptances differ only in what the data path made of them.
func sameRule(a, b agentAcceptance) bool {
	a.Lock, a.Threshold, a.Attempts, a.Accepted = b.Lock, b.Threshold, b.Attempts, b.Accepted
	return a == b
}

// writeAcceptances makes the data path follow the policies. A service whose policy stays keeps the
// threshold that it has come to.
func (k *kernel) writeAcceptances(want map[agentServiceKey]agentAcceptance) error {
	none := make([]agentOffers, ebpf.MustPossibleCPU())
	for key, a := range want {
		if err := addIfAbsent(k.objects.Offers, key, none); err != nil {
			return err
		}
		if err := addIfAbsent(k.objects.Connections, key, int64(0)); err != nil {
			return err
		}
		var now agentAcceptance
		err := k.objects.Acceptances.LookupWithFlags(key, &now, ebpf.LookupLock)
		if err == nil && sameRule(a, now) {
			continue
		}
		flags := ebpf.UpdateAny
		if err == nil {
			flags = ebpf.UpdateExist | ebpf.UpdateLock
		} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read %s: %w", k.objects.Acceptances, err)
		}
		if err := k.objects.Acceptances.Update(key, a, flags); err != nil {
			return fmt.Errorf("write to %s: %w", k.objects.Acceptances, err)
		}
	}
	// The connections of a service that is gone stay counted: they may outlast its absence.
	return errors.Join(
		datapath.Keep(k.objects.Acceptances, want),
		datapath.Keep(k.objects.Offers, want),
		datapath.Keep(k.objects.Loads, want),
	)
}

func addIfAbsent(m *ebpf.Map, key agentServiceKey, value any) error {
	if err := m.Update(key, value, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("write to %s: %w", m, err)
	}
	return nil
}
